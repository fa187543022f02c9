"""What one node carries: `make show-load`.

First 500 sessions at once with a light command harness, then 100 in sandboxes with one that holds a conversation that
grows by some thousand tokens a turn; all in bubblewrap. The gateway and the engine (of this repository, in vLLM's HTTP
form) are processes of their own. Shown are the gateway's memory, the time from a harness's request to its answer, of
which the engine takes half to one and a half times `--delay`, and what went wrong, which must be nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from polar_gym.protocol import Dispatch
from polar_gym.schema import Episode, HarnessSpec, RuntimeSpec, TaskRequest
from tests.faults.processes import NODE_HEADERS, Process, Service

HARNESS = """
import json, os, sys, time, urllib.request
calls, words, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
messages = [{"role": "user", "content": sys.stdin.read() + " word" * words}]
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
for number in range(calls):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    begun = time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as response:
        said = json.load(response)["choices"][0]["message"]["content"]
    print(time.monotonic() - begun, flush=True)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on." + " word" * words}]
    time.sleep(pause)
"""


@dataclass(kw_only=True)
class Load:
    name: str
    sessions: int
    calls: int
    words: int
    pause: float


@dataclass
class Measured:
    load: Load
    idle_bytes: int
    highest_bytes: int = 0
    at_once: int = 0
    """The most sessions that ran at the same time."""
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        failed = [f"{e.session.session_id}: {e.session.failure}" for e in self.episodes if e.session.failure]
        unbalanced = [e.session.session_id for e in self.episodes if not e.trajectory.fidelity.balanced]
        missing = self.load.sessions * self.load.calls - sum(e.trajectory.fidelity.calls for e in self.episodes)
        failed += [f"{missing} calls are missing"] * bool(missing)
        return failed + [f"{each}: its tokens do not add up" for each in unbalanced]

    def row(self) -> list[str]:
        grown = self.highest_bytes - self.idle_bytes
        p50, p99 = (statistics.quantiles(self.latencies, n=100)[part - 1] for part in (50, 99))
        prompts = [sum(len(t.prompt_ids) + len(t.response_ids) for t in e.trajectory.traces) for e in self.episodes]
        return [
            self.load.name,
            str(self.load.sessions),
            str(self.at_once),
            str(len(self.latencies)),
            f"{statistics.mean(prompts):.0f}",
            f"{self.highest_bytes / 2**20:.0f}",
            f"{grown / self.load.sessions / 2**10:.0f}",
            f"{p50 * 1000:.0f}",
            f"{p99 * 1000:.0f}",
            f"{self.seconds:.0f}",
            str(len(self.problems)) if self.problems else "none",
        ]


COLUMNS = (
    "load", "sessions", "most at once", "calls", "tokens a session", "gateway MiB", "KiB a session", "p50 ms", "p99 ms",
    "seconds", "errors",
)  # fmt: skip


async def measure(load: Load, delay_seconds: float) -> Measured:
    pools = {"init": 4, "ready": 8, "run": load.sessions, "postrun": 4, "prewarm": 0}
    with tempfile.TemporaryDirectory(prefix="pg-load-", dir="/tmp") as directory:
        service = Service(Path(directory), 1, delay_seconds, pools)
        async with _node_and_engine(service) as node, aiohttp.ClientSession(node.url, headers=NODE_HEADERS) as http:
            measured = Measured(load, node.memory())
            begun = time.monotonic()
            watching = asyncio.create_task(_watch(http, node, measured))
            await asyncio.gather(*(_begin(http, _request(load, number), number) for number in range(load.sessions)))
            for number in range(load.sessions):
                measured.episodes.append(await _episode(http, number))
            measured.seconds = time.monotonic() - begun
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    lines = [line for episode in measured.episodes for line in episode.artifacts.stdout.splitlines()]
    measured.latencies = [float(line) for line in lines]
    return measured


@contextlib.asynccontextmanager
async def _node_and_engine(service: Service) -> AsyncIterator[Process]:
    """Without a rollout server: the node keeps its episodes."""
    (node,) = service.nodes
    node.argv = [argument for argument in node.argv if not argument.startswith("server=")]
    try:
        await service.engine.start()
        await node.start()
        yield node
    finally:
        await asyncio.gather(node.kill(), service.engine.kill())


def _request(load: Load, number: int) -> TaskRequest:
    command = ["python3", "-S", "-c", HARNESS, str(load.calls), str(load.words), str(load.pause)]
    return TaskRequest(
        task_id=f"t{number}",
        instruction=f"Session {number}.",
        runtime=RuntimeSpec(name="bubblewrap"),
        agent=HarnessSpec.model_validate({"name": "command", "command": command}),
    )


async def _begin(http: aiohttp.ClientSession, request: TaskRequest, number: int) -> None:
    order = Dispatch(session_id=f"s{number}", sample_index=0, request=request)
    async with http.put(f"/v1/sessions/s{number}/0", data=order.to_json()) as response:
        response.raise_for_status()


async def _episode(http: aiohttp.ClientSession, number: int) -> Episode:
    while True:
        async with http.get(f"/v1/sessions/s{number}/0/episode") as response:
            if response.status == 200:
                return Episode.from_json(await response.read())
        await asyncio.sleep(0.5)


async def _watch(http: aiohttp.ClientSession, node: Process, measured: Measured) -> None:
    while True:
        measured.highest_bytes = max(measured.highest_bytes, node.memory())
        async with http.get("/v1/sessions") as response:
            running = sum(session["status"] == "RUNNING" for session in await response.json())
        measured.at_once = max(measured.at_once, running)
        await asyncio.sleep(1.0)


async def main() -> None:
    parser = argparse.ArgumentParser(prog="make show-load", description=__doc__)
    parser.add_argument("--light", type=int, default=500, help="sessions of the light harness")
    parser.add_argument("--heavy", type=int, default=100, help="sessions of the heavier one")
    parser.add_argument("--pause", type=float, default=40.0, help="seconds that a harness works between two calls")
    parser.add_argument("--delay", type=float, default=0.5, help="seconds that the engine takes for an answer")
    given = parser.parse_args()
    loads = [
        Load(name="light", sessions=given.light, calls=4, words=10, pause=given.pause),
        Load(name="heavier", sessions=given.heavy, calls=10, words=1500, pause=given.pause / 10),
    ]
    table = Table(*COLUMNS, title=f"One node; {os.cpu_count()} cores for gateway, engine and all sandboxes")
    problems = []
    for load in loads:
        measured = await measure(load, given.delay)
        table.add_row(*measured.row())
        problems += measured.problems
        if measured.at_once < load.sessions:
            problems.append(f"{load.name}: only {measured.at_once} of {load.sessions} sessions ran at once")
    Console(width=130).print(table)
    if problems:
        sys.exit("\n".join(problems[:50]))


if __name__ == "__main__":
    asyncio.run(main())
