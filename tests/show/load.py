"""Show how many sessions one node carries, and at what price: `make show-load`.

First 500 sessions run at once with a light command harness, then 100 with a heavier one, whose conversation grows by
some thousand tokens a turn. All sandboxes are bubblewrap's. The gateway and the engine (of this repository, in vLLM's
HTTP form) are processes of their own. The table shows the gateway's memory, the time from a harness's request to its
answer, of which the engine takes half to one and a half times `--delay`, and the number of errors.
"""

from __future__ import annotations

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
from tests.show.result import Result, make_parser, parse

AT_ONCE, COMPLETED, CALLS, EXACT = LAWS = (
    "all sessions run at once",
    "no session fails",
    "no call is missing",
    "every session's token counts are exact",
)

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
    def breaches(self) -> dict[str, list[str]]:
        """The breaches of each law."""
        load, counts = self.load, [(e.session, e.trajectory.fidelity) for e in self.episodes]
        missing = load.sessions * load.calls - sum(fidelity.calls for _, fidelity in counts)
        return {
            AT_ONCE: [f"{load.name}: {self.at_once} of {load.sessions}"] * (self.at_once < load.sessions),
            COMPLETED: [
                f"{load.name}: {session.session_id}: {session.failure}" for session, _ in counts if session.failure
            ],
            CALLS: [f"{load.name}: {missing}"] * bool(missing),
            EXACT: [f"{load.name}: {session.session_id}" for session, fidelity in counts if not fidelity.exact],
        }

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
            str(sum(map(len, self.breaches.values())) or "none"),
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
    """Start a node and its engine without a rollout server, so that the node keeps its episodes."""
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


def main() -> int:
    parser = make_parser("load", __doc__, quick="most sessions, and most of the pauses between calls")
    parser.add_argument("--light", type=int, default=500, help="sessions of the light harness")
    parser.add_argument("--heavy", type=int, default=100, help="sessions of the heavier one")
    parser.add_argument("--pause", type=float, default=40.0, help="seconds that a harness works between two calls")
    parser.add_argument("--delay", type=float, default=0.5, help="seconds that the engine takes for an answer")
    options = parse(parser, quick={"light": 40, "heavy": 10, "pause": 5.0})
    loads = [
        Load(name="light", sessions=options.light, calls=4, words=10, pause=options.pause),
        Load(name="heavier", sessions=options.heavy, calls=10, words=1500, pause=options.pause / 10),
    ]
    result = Result("load", LAWS, options)
    table = Table(*COLUMNS, title=f"One node; {os.cpu_count()} cores for gateway, engine and all sandboxes")
    for load in loads:
        measured = asyncio.run(measure(load, options.delay))
        table.add_row(*measured.row())
        result.figures[load.name] = dict(zip(COLUMNS, measured.row(), strict=True))
        for law, breaches in measured.breaches.items():
            result.check(law, breaches)
    Console(width=130).print(table)
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
