"""Run hundreds of sessions while processes are killed, then check the laws. The program and the test share this."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from polar_gym.client import RolloutClient
from polar_gym.http.keys import SERVICE_KEY
from polar_gym.protocol import TaskState
from polar_gym.schema import Episode, RuntimeSpec
from tests.faults import laws
from tests.faults.kills import Killer
from tests.faults.processes import KEYS, NODE_HEADERS, Service
from tests.faults.sessions import request

LAWS = (
    "every kind of process was killed",
    "every session ends, with an episode",
    "no captured call is lost",
    "token counts are exact",
    "no sandbox is left",
    "every result arrives exactly once",
)
SAMPLES = 10
"""The most samples of one task."""
TURNS = 4
SETTLE_SECONDS = 120.0


@dataclass(kw_only=True)
class Faults:
    """The settings of one run."""

    sessions: int
    """The least number of sessions. There are more where the kills take longer."""
    open_sessions: int = 40
    """Sessions that are open at once. Enough to have some in every stage while processes are killed."""
    pools: dict[str, int] = field(default_factory=lambda: {"init": 2, "ready": 4, "run": 8, "postrun": 2})
    nodes: int = 1
    docker_host: str | None = None
    """The Docker daemon whose containers are the sandboxes. None: bubblewrap makes the sandboxes."""
    seed: int = 0
    rounds: int = 3
    """How often every kind of kill is done."""
    engine_kills: int = 2
    engine_away_seconds: float = 30.0
    receiver_away_seconds: float = 2.0
    gateway_away_seconds: tuple[float, ...] = (0.0, 0.0, 8.0)
    """The seconds are drawn from these. The lease is five seconds."""
    pause_seconds: tuple[float, float] = (0.5, 2.5)
    """The bounds of the pause between two kills."""
    delay_seconds: float = 0.15
    """The approximate time that the engine takes for an answer."""
    limit_seconds: float = 900.0
    resume: bool = True
    """Whether sessions go on after their node's death, or begin again."""


@dataclass
class Outcome:
    killer: Killer
    found: laws.Found
    seconds: float
    breaches: dict[str, list[str]] = field(default_factory=dict)
    answers: Mapping[str, int] = field(default_factory=dict)


async def run(faults: Faults, directory: Path) -> Outcome:
    dice, mark, begun = random.Random(faults.seed), f"faults-{secrets.token_hex(8)}", time.monotonic()
    service = Service(directory, faults.nodes, faults.delay_seconds, faults.pools)
    async with (
        asyncio.timeout(faults.limit_seconds),
        service,
        RolloutClient(service.server.url, KEYS[SERVICE_KEY], keep_trying_seconds=120) as client,
    ):
        killer = Killer(
            service=service,
            mark=mark,
            dice=dice,
            engine_away_seconds=faults.engine_away_seconds,
            receiver_away_seconds=faults.receiver_away_seconds,
            gateway_away_seconds=faults.gateway_away_seconds,
            docker_host=faults.docker_host,
        )
        async with asyncio.TaskGroup() as group:
            killing = group.create_task(_kill(faults, killer, dice))
            names = await _feed(faults, client, service, mark, killing)
        states = [await _ended(client, name) for name in names]
        await _delivered(service, sum(len(state.sessions) + 1 for state in states))
        episodes = [episode async for episode in _episodes(client, names)]
        found = await asyncio.to_thread(laws.find, service, states, episodes)
        outcome = Outcome(killer, found, time.monotonic() - begun)
        lost, outcome.answers = laws.no_call_is_lost(found, killer)
        session_ids = [session.session_id for state in states for session in state.sessions]
        breaches = (
            [kind for kind in killer.kinds if not killer.done[kind]],
            laws.every_session_ends(found),
            lost,
            laws.counts_are_exact(found),
            await _nothing_left(killer, session_ids),
            laws.every_result_arrives_once(found),
        )
        outcome.breaches = dict(zip(LAWS, breaches, strict=True))
    return outcome


async def _feed(
    faults: Faults, client: RolloutClient, service: Service, mark: str, killing: asyncio.Task[None]
) -> list[str]:
    """Submit tasks as others end, until all kills are done and there were enough sessions. Return the task ids."""
    runtime = RuntimeSpec(name="bubblewrap")
    if faults.docker_host is not None:
        runtime = RuntimeSpec.model_validate({"name": "docker", "host": faults.docker_host})
    dice, names, submitted, still_open = random.Random(faults.seed + 1), [], 0, list[str]()
    while submitted < faults.sessions or not killing.done():
        states = [await client.task(name) for name in still_open]
        still_open = [state.task_id for state in states if state.finished_at is None]
        sessions = [session for state in states for session in state.sessions if not session.status.final]
        if len(sessions) < faults.open_sessions:
            samples = max(2, min(SAMPLES, faults.sessions - submitted, faults.open_sessions - len(sessions)))
            order = request(f"task{len(names)}", samples, service.callback_url, mark, dice, runtime, faults.resume)
            await client.submit(order)
            submitted += samples
            names.append(order.task_id)
            still_open.append(order.task_id)
        await asyncio.sleep(0.2)
    return names


async def _kill(faults: Faults, killer: Killer, dice: random.Random) -> None:
    """Kill every kind once a round, in a random order. The engine and the receiver are away during other kills."""
    async with asyncio.TaskGroup() as away:
        for number in range(faults.rounds):
            kinds = [kind for kind in killer.kinds if kind != "engine" or number < faults.engine_kills]
            deck = dice.sample(kinds, len(kinds))
            for kind in deck:  # a kind that had nothing to kill gets another turn
                await asyncio.sleep(dice.uniform(*faults.pause_seconds))
                if kind in ("engine", "receiver"):
                    away.create_task(killer.kill(kind))
                elif not await killer.kill(kind) and deck.count(kind) < TURNS:
                    deck.append(kind)


async def _ended(client: RolloutClient, task_id: str) -> TaskState:
    while True:
        state = await client.task(task_id)
        if state.finished_at is not None:
            return state
        await asyncio.sleep(0.25)


async def _delivered(service: Service, results: int) -> None:
    """Wait until the nodes hold no session, not even a late attempt, and the receiver has every result."""
    with contextlib.suppress(TimeoutError):  # then the laws say what is missing
        async with asyncio.timeout(SETTLE_SECONDS), aiohttp.ClientSession(headers=NODE_HEADERS) as http:
            for node in service.nodes:
                while await _held(http, node.url):  # noqa: ASYNC110 - other processes send no events
                    await asyncio.sleep(0.1)
            while await asyncio.to_thread(_stored, service.results) < results:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def _held(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(f"{url}/v1/sessions") as response:
        return len(await response.json())


def _stored(results: Path) -> int:
    with sqlite3.connect(results) as store:
        return store.execute("SELECT count(*) FROM results").fetchone()[0]


async def _episodes(client: RolloutClient, names: list[str]) -> AsyncIterator[Episode]:
    for name in names:
        async for episode in client.episodes(name, excluded=True):
            yield episode


async def _nothing_left(killer: Killer, session_ids: list[str]) -> list[str]:
    """Return the sandboxes that are left, after the kernel had ten seconds to remove dead processes."""
    deadline = time.monotonic() + 10
    while True:
        left = await asyncio.to_thread(laws.no_sandbox_is_left, killer, session_ids)
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.2)


def table_of(outcome: Outcome) -> list[tuple[str, str]]:
    """Return the figures of a run, as pairs of text."""
    killer, found = outcome.killer, outcome.found
    kinds = Counter(killer.done)
    lines = [(f"killed: {kind}", str(kinds[kind])) for kind in killer.kinds]
    lines += [(f"nothing to kill: {kind}", str(count)) for kind, count in killer.missed.items()]
    lines += [
        (f"sessions {status} after {tries} attempts", str(n))
        for (status, tries), n in sorted(laws.attempts(found).items())
    ]
    lines += [("episodes accepted", str(len(found.accepted)))]
    lines += [("episodes excluded", str(len(found.episodes) - len(found.accepted)))]
    lines += [(f"answers {what}", str(count)) for what, count in outcome.answers.items()]
    sampled, trainable, died = laws.tokens(found)
    lines += [("tokens sampled", str(sampled)), ("tokens trainable (accepted)", str(trainable))]
    lines += [("tokens lost or repeated", f"{sampled - trainable} ({(sampled - trainable) / max(1, sampled):.1%})")]
    lines += [("of them by the death of a node", str(died))]
    lines += [("results at the receiver", f"{len(found.results)}, sent {found.arrivals} times")]
    return [*lines, ("seconds", f"{outcome.seconds:.0f}")]
