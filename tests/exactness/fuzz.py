"""Random sessions of raw clients on all wires, with cuts, errors, hang-ups and deaths of engine and gateway.

A round is a stage of its own with some hundred sessions, and is drawn from one number: the same number draws the same
sessions, requests and faults. How they interleave is the machine's.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from tests.exactness.clients import WIRES, Ask, ask
from tests.exactness.counters import COUNTED, check_counters, never_sent
from tests.exactness.laws import Breaches
from tests.exactness.mutations import Records
from tests.exactness.recorder import Fault
from tests.exactness.stage import GatewayDiedError, Opened, Stage, staged
from tests.exactness.stand_in import StandIn

CONCURRENCY = 16
HARNESSES = ("pi", "claude_code", "codex", "gemini_cli")
FAULTS = {"none": 10, "leave": 4, "leave early": 2, "cut": 3, "reset": 2, "refuse": 2, "error": 2, "hang": 1}
PATIENCE_SECONDS = 1.0
"""Of the gateway with an engine that is away."""


@dataclass(slots=True)
class Round:
    """What a round of sessions found."""

    seed: int
    records: Records
    breaches: Breaches = field(default_factory=dict)
    figures: Counter[str] = field(default_factory=Counter)


async def play_round(seed: int, sessions: int, directory: Path) -> Round:
    """Play a round, and hold its books against its recording."""
    chance = random.Random(seed)
    engine = StandIn(seed=seed)
    await engine.start()
    options: dict[str, Any] = {"patience": PATIENCE_SECONDS, "streaming": chance.choice(("real", "synthetic"))}
    options["path"] = chance.choice(("auto", "auto", "generate"))
    if options["path"] == "generate" and chance.random() < 0.5:
        options["record"] = "yes"
    try:
        async with staged(engine.url, directory, **options) as stage:
            probed = engine.sampled - sum(len(answer.given.ids) for answer in stage.answers())
            await _play(stage, engine, chance, sessions)
            await stage.close()
            answers, books = stage.answers(), stage.books()
            round_ = Round(seed, Records(answers, books, stage.owners, engine.sampled - probed))
            round_.breaches, round_.figures = stage.check()
    finally:
        await engine.stop()
    round_.breaches[COUNTED] = list(check_counters(round_.records.sampled, answers, books))
    lost = never_sent(round_.records.sampled, answers, books)
    round_.figures.update({f"never in the books: {cause}": count for cause, count in lost.items()})
    round_.figures["tokens that the engine sampled"] = round_.records.sampled
    return round_


async def _play(stage: Stage, engine: StandIn, chance: random.Random, sessions: int) -> None:
    places = asyncio.Semaphore(CONCURRENCY)
    seeds = [chance.getrandbits(64) for _ in range(sessions)]
    deaths = {chance.randrange(1, sessions): chance.choice(("engine", "gateway")) for _ in range(1 + sessions // 120)}
    done, dying = 0, asyncio.Lock()

    async def one(seed: int) -> None:
        nonlocal done
        async with places:
            await _session(stage, random.Random(seed))
            done += 1
            if death := deaths.pop(done, None):
                async with dying:
                    await _die(stage, engine, death)

    await asyncio.gather(*(one(seed) for seed in seeds))


async def _die(stage: Stage, engine: StandIn, what: str) -> None:
    if what == "gateway":
        await stage.kill()
        return
    await engine.stop()
    await engine.start()


async def _session(stage: Stage, chance: random.Random) -> None:
    """Play one session: up to four requests, one after the other or two at once."""
    try:
        session = await stage.open(chance.choice(HARNESSES))
        for _ in range(chance.randint(1, 3)):
            both = [_request(stage, session, chance) for _ in range(1 + (chance.random() < 0.15))]
            await asyncio.gather(*both)
        if session in stage.opened:
            await stage.close(session)
    except (GatewayDiedError, aiohttp.ClientError, ConnectionError, KeyError):
        return  # the gateway was killed; its books are read all the same


async def _request(stage: Stage, session: Opened, chance: random.Random) -> None:
    (fault,) = chance.choices(list(FAULTS), list(FAULTS.values()))
    tokens = chance.randint(2, 150)
    name = f"z{chance.getrandbits(60):x}"
    words = f"tokens-{tokens} pace-1 fault-{name} " if fault != "none" else f"tokens-{tokens}"
    words += " tool" * (chance.random() < 0.4) + " surrogate" * (chance.random() < 0.04)
    what = Ask(wire=chance.choice(WIRES), words=words, stream=chance.random() < 0.6, tools=chance.random() < 0.6)
    leave_at, leave = None, None
    generates = stage.gateway.options.get("path") == "generate"
    match fault:
        case "leave":
            leave_at = chance.randint(1, 4000)
        case "leave early":
            leave = asyncio.sleep(chance.uniform(0, 0.15))
        case "cut" | "reset":
            stage.recorder.faults[name] = Fault(kind=fault, size=chance.randint(0, 20 * tokens))
        case "error":
            stage.recorder.faults[name] = Fault(kind="error", events=chance.randint(1, 6))
        case "refuse":
            stage.recorder.faults[name] = Fault(kind="refuse", status=chance.choice((400, 500, 503)))
        case "hang" if not generates:
            held = asyncio.Event()
            stage.recorder.faults[name] = Fault(kind="hang", size=chance.randint(0, 20 * tokens), held=held)
            leave = held.wait()
    if generates and name in stage.recorder.faults:  # a request of ids has no words: the next one meets the fault
        path = chance.choice(("/generate", "/derender"))
        stage.recorder.faults[f"*{name}"] = replace(stage.recorder.faults.pop(name), path=path)
    first = await ask(stage, session, what, leave_at=leave_at, leave=leave)
    if first.status == 200 and first.whole and what.wire == "chat" and fault == "none" and "surrogate" not in words:
        await _go_on(stage, session, chance, what, first.marker, first.message)


async def _go_on(
    stage: Stage, session: Opened, chance: random.Random, what: Ask, marker: str, message: dict[str, Any]
) -> None:
    """Ask once more, with the answer and the results of its tool calls handed back."""
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"ok {chance.random()}"}
        for call in message.get("tool_calls") or ()
    ]
    asked = {"role": "user", "content": f"{what.words} {marker} ."}
    further = Ask(
        words=f"tokens-{chance.randint(2, 60)}",
        stream=what.stream,
        tools=what.tools,
        history=[asked, message, *results],
    )
    await ask(stage, session, further)
