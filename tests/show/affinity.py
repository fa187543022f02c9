"""Run sessions of several harnesses on four real vLLM servers behind one gateway: `make show-affinity`.

The model is tiny and random, and vLLM's own grammar makes it run commands (`steered_engine`). The same sessions run
again and again. *stay*: each with its server. *scattered*: each call on the next server, as a plain load balancer does.
*updated*: when half of the calls are done, the servers get new weights one after another, while they sample, and empty
their caches. *salted*: the same with a new `cache_salt`, as where a server does not say that its caches are empty.
*killed*: as *updated*, but one server is killed by SIGKILL before, and started again after, with its first weights.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

from polar_gym.chat import ChatRequest
from polar_gym.config.loading import load_config
from polar_gym.console import make_console
from polar_gym.engines.replicas import Replicas, Server
from polar_gym.episodes.reading import read_calls
from polar_gym.episodes.reuse import CAUSES, Reuse, block_size, lost_tokens
from polar_gym.episodes.verify import verify
from polar_gym.gateway.node.assemble import load_tasks, make_node, make_request
from polar_gym.gateway.node.node import Node
from polar_gym.schema import Episode, ModelCall
from tests.e2e.steered_engine import SteeredEngine, SteeredOptions, SteeredReplicas
from tests.e2e.vllm_server import TINY_MODEL_SCRIPT, VllmServer, run_server, vllm_python
from tests.show.result import OF_NPM, Result, make_parser, parse

ENDED, STAYED, REUSED, BACK, NAMED, UNBROKEN, EXACT = LAWS = (
    "every session ends with all of its turns, also where its server was killed",
    "a session changes its server only where its server has gone",
    "sessions that stay reuse at least 98 % of the tokens that they could",
    "the killed server is taken back with the weights of the last update",
    "each call names the weights that its server had",
    "no call fails where servers get new weights while they sample",
    "verify finds no fault",
)
GOAL = 0.98
BLOCK = "32"
"""Tokens of a block of the servers' cache. vLLM's default is 16 on GPUs, and 128 on a CPU, which prefers multiples of
32."""
STAY, SCATTERED, UPDATED, SALTED, KILLED = "stay", "scattered", "updated", "salted", "killed"


@dataclass(slots=True)
class Round:
    """The sessions of one time."""

    name: str
    episodes: list[Episode]
    seconds: float
    back_after: float | None = None
    """Seconds from the start of the killed server to its first call."""
    updated: dict[str, float] = field(default_factory=dict)
    """URL -> when the server had its new weights, Unix time."""
    killed: str = ""

    @property
    def version(self) -> str:
        """The version of the new weights."""
        return f"of {self.name}"

    @property
    def calls(self) -> list[ModelCall]:
        return [call for episode in self.episodes for call in read_calls(episode)]

    def reuse(self) -> Reuse:
        calls, total = self.calls, Reuse()
        for call, reused, lost in lost_tokens(calls, block_size(calls)):
            total.add(len(call.prompt_ids), reused, lost)
        return total


class ScatteredReplicas(SteeredReplicas):
    """Asks the next server for each call."""

    def __init__(self, options: SteeredOptions) -> None:
        super().__init__(options)
        self._turns = cycle(range(len(self.replicas)))

    def of(self, session_id: str) -> Server:
        return self.replicas[next(self._turns)].engine


class SaltedEngine(SteeredEngine):
    def _chat_body(self, request: ChatRequest, fields: dict[str, Any]) -> dict[str, Any]:
        salt = {} if self.weight_version is None else {"cache_salt": self.weight_version}
        return {**super()._chat_body(request, fields), **salt}


class SaltedReplicas(SteeredReplicas):
    make = SaltedEngine


async def play(
    name: str,
    urls: Sequence[str],
    options: argparse.Namespace,
    state: Path,
    meanwhile: Callable[[Node, Round], Coroutine[Any, Any, None]] | None = None,
) -> Round:
    """Run all sessions at once."""
    engine = {SCATTERED: ScatteredReplicas, SALTED: SaltedReplicas}.get(name, SteeredReplicas)
    common = [
        "harness.profile=lean",
        "harness.max_output_tokens=512",
        "engine=vllm",
        f"engine.name={engine.__module__}:{engine.__name__}",
        f"engine.url=[{','.join(urls)}]",
        f"engine.turns={options.turns}",
        "runtime=bubblewrap",
        "evaluator=session_completion",
        f"rollout.state={state}",
        "rollout.timeout_seconds=1800",
        f"pools.run={options.samples * len(options.harness)}",
    ]
    configs = [load_config(None, [f"harness={harness}", *common]) for harness in options.harness]
    task = load_tasks(configs[0])[0]
    started = time.monotonic()
    async with make_node(configs[0], [task]) as node, asyncio.TaskGroup() as group:
        found = Round(name, [], 0.0)
        ending = [
            group.create_task(node.rollout(make_request(config, task), sample))
            for config in configs
            for sample in range(options.samples)
        ]
        if meanwhile is not None:
            group.create_task(meanwhile(node, found))
        found.episodes = [await each for each in ending]
        found.seconds = time.monotonic() - started
    return found


async def update(node: Node, found: Round, half: int, urls: Sequence[str], weights: Path) -> None:
    """Give the servers new weights when half of the calls are done."""
    while node.proxy.calls.total() < half:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    await node.set_weights(weights, found.version)
    found.updated = dict.fromkeys(urls, time.time())


async def disturb(
    node: Node, found: Round, half: int, servers: Sequence[VllmServer], weights: Path, again: Callable[[], None]
) -> None:
    """Kill the first server, give the others new weights, and start the first one again."""
    replicas = node.engine
    assert isinstance(replicas, Replicas)
    while node.proxy.calls.total() < half:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    found.killed = servers[0].url
    assert servers[0].pid is not None
    os.killpg(servers[0].pid, signal.SIGKILL)
    await update(node, found, half, [each.url for each in servers[1:]], weights)
    await asyncio.to_thread(again)
    began = time.monotonic()
    async with asyncio.timeout(300):
        while replicas.versions[servers[0].url] != found.version or not replicas.replicas[0].up:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    found.back_after = time.monotonic() - began


def check(result: Result, found: Round, turns: int) -> None:
    """Check the laws that hold in a round."""
    broken: list[str] = []
    for episode in found.episodes:
        calls = [call for call in read_calls(episode) if call.outcome == "delivered"]
        main = [call for call in calls if call.hints.get("kind", "main") == "main"]
        told = f"{found.name}: {episode.session.harness} {episode.session.session_id}"
        if episode.session.failure is not None or len(main) < turns:
            broken.append(f"{told}: {episode.session.failure}, {len(main)} of {turns} turns")
        servers = [call.engine_url for call in calls]
        changes = [one for one, other in pairwise(servers) if one != other]
        if found.name != SCATTERED:
            result.check(STAYED, [f"{told}: {servers}"] if changes not in ([], [found.killed]) else [])
    result.check(ENDED, broken)
    wrong = []
    for call in found.calls:
        since = found.updated.get(str(call.engine_url))
        versions = {span.version for span in call.weight_versions}
        if since is not None and call.started_at > since and versions - {found.version}:
            wrong.append(f"{found.name}: {call.call_id} of {call.engine_url}: {versions}, and not {found.version!r}")
    result.check(NAMED, wrong)
    if found.updated and not found.killed:
        failed = [call for call in found.calls if call.outcome != "delivered"]
        result.check(UNBROKEN, [f"{found.name}: {call.call_id}: {call.outcome} {call.error}" for call in failed])


def rows_of(rounds: Sequence[Round], result: Result) -> Table:
    """Return the table of the rounds, and keep their figures."""
    columns = ("sessions", "calls", "by server", "prompt tokens", "reusable", "reused", "s", *CAUSES)
    table = Table("round", *columns, title="Tokens of the prefix caches; by cause: those that were lost")
    for found in rounds:
        reuse, calls = found.reuse(), found.calls
        by_server = Counter(str(call.engine_url) for call in calls)
        share = reuse.reused / max(1, reuse.ideal)
        result.figures[found.name] = {
            "sessions": len(found.episodes),
            "calls": len(calls),
            "calls_by_server": sorted(by_server.values()),
            "prompt_tokens": reuse.prompt,
            "reusable": reuse.ideal,
            "reused": reuse.reused,
            "share": round(share, 4),
            "lost": dict(reuse.lost),
            "seconds": round(found.seconds, 1),
            "failed_calls": sum(call.outcome != "delivered" for call in calls),
            "back_after_seconds": found.back_after,
        }
        spread = " ".join(map(str, sorted(by_server.values())))
        counts = (len(found.episodes), len(calls), spread, reuse.prompt, reuse.ideal, f"{share:.1%}")
        lost = (reuse.lost[cause] for cause in CAUSES)
        table.add_row(found.name, *map(str, counts), f"{found.seconds:.0f}", *map(str, lost))
    return table


async def show(options: argparse.Namespace, result: Result) -> None:
    python, console = vllm_python(), make_console()
    if python is None:
        sys.exit("vLLM is missing; install it with: python -m tests.e2e.vllm_server install")
    with tempfile.TemporaryDirectory(prefix="pg-affinity-") as name, ExitStack() as stack:
        directory = Path(name)
        for each in ("model", "other"):
            run(python, TINY_MODEL_SCRIPT, directory / each)
        run(python, "-c", BEND, directory / "other")

        def start(number: int, port: int = 0) -> VllmServer:
            own = directory / f"server-{number}-{port}"
            own.mkdir()
            flags = ["--enable-prompt-tokens-details", "--block-size", BLOCK]
            return stack.enter_context(run_server(python, own, directory / "model", flags, port))

        servers = [start(number) for number in range(options.servers)]
        urls = [each.url for each in servers]
        rounds = [await play(STAY, urls, options, directory / STAY)]
        console.print(f"{STAY}: {rounds[0].seconds:.0f} s")
        half = len(rounds[0].calls) // 2
        if not options.quick:
            rounds.append(await play(SCATTERED, urls, options, directory / SCATTERED))
            for name, weights in ((UPDATED, "other"), (SALTED, "model")):
                meanwhile = partial(update, half=half, urls=urls, weights=directory / weights)
                rounds.append(await play(name, urls, options, directory / name, meanwhile))
        port = int(urls[0].rpartition(":")[2])

        def disturbed(node: Node, found: Round) -> Coroutine[Any, Any, None]:
            return disturb(node, found, half, servers, directory / "other", lambda: start(0, port) and None)

        rounds.append(await play(KILLED, urls, options, directory / KILLED, disturbed))
        for found in rounds:
            check(result, found, options.turns)
            verified = await verify(found.episodes, None)
            result.check(EXACT, [f"{found.name}: {line}" for line in verified.broken])
        result.check(BACK, [] if rounds[-1].back_after is not None else ["it was not taken back"])
        share = rounds[0].reuse()
        few = share.reused < GOAL * share.ideal
        result.check(REUSED, [f"{share.reused / share.ideal:.1%}: lost {dict(share.lost)}"] if few else [])
        console.print(rows_of(rounds, result))


BEND = """
import sys
from pathlib import Path
from safetensors.torch import load_file, save_file
(file,) = Path(sys.argv[1]).glob("*.safetensors")
save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
"""


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, timeout=300)


def main() -> int:
    parser = make_parser(
        "affinity", __doc__, quick="half of the servers and harnesses, and all rounds but *stay* and *killed*"
    )
    parser.add_argument("--harness", action="append", choices=OF_NPM, help="only this one; may be given repeatedly")
    parser.add_argument("--servers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--samples", type=int, default=4, help="sessions of each harness (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=24, help="of each session (default: %(default)s)")
    parser.set_defaults(harness=("codex", "claude_code", "gemini_cli", "pi"))
    quick = {"harness": ["codex", "pi"], "servers": 2, "samples": 2}
    options = parse(parser, quick=quick)
    result = Result("affinity", LAWS, options)
    asyncio.run(show(options, result))
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
