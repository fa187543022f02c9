"""One server process and many node processes that run nothing, over HTTP and on the real clock, for `make show-fleet`.

`python -m tests.support.node_processes SERVER COUNT BYTES` starts COUNT nodes, each a process, until its input ends. A
node delivers an episode of BYTES bytes for each session as soon as it gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import polar_gym
from polar_gym.client import RolloutClient
from tests.lifecycle.peer_node import PeerNode, episode_of, make_request
from tests.lifecycle.server_process import server_process
from tests.lifecycle.service_fixtures import NODE_KEY, SERVICE_KEY

SOURCES = Path(polar_gym.__file__).parent
"""The content of episodes: what harnesses print is mostly source code, and packs like it."""
BEAT_SECONDS = 5.0
PLACES = 64
ASK_SECONDS = 0.05
"""How often a trainer asks for the state of a task meanwhile."""


async def node(server: str, name: str, text: str) -> None:
    """Deliver an episode for each session that comes, until cancelled."""
    async with PeerNode(server, NODE_KEY, name=name, run=PLACES) as peer:

        async def deliver() -> None:
            while True:
                with contextlib.suppress(TimeoutError):
                    for order in await peer.take():
                        episode = episode_of(order, node=name)
                        episode.artifacts.stdout = text
                        await peer.deliver(episode, order.attempt)

        async def beat() -> None:
            while True:
                await asyncio.sleep(BEAT_SECONDS)
                await peer.beat()

        await asyncio.gather(deliver(), beat())


def fork_nodes(server: str, count: int, size: int) -> None:
    """Run the nodes until the input ends."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(SOURCES.rglob("*.py")))[:size]
    assert len(text) == size
    nodes: list[int] = []
    for number in range(count):
        if (pid := os.fork()) == 0:
            os.close(0)
            asyncio.run(node(server, f"n{number}", text))
        nodes.append(pid)
    sys.stdin.read()
    for pid in nodes:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    sys.stdout.write(f"{sum(os.times()[2:4])}\n")


@contextlib.asynccontextmanager
async def forked(server: str, count: int, size: int) -> AsyncIterator[list[float]]:
    """Run nodes; the list that is yielded gets their seconds of CPU time when the context ends."""
    used: list[float] = []
    argv = [sys.executable, "-m", "tests.support.node_processes", server, str(count), str(size)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
    try:
        yield used
    finally:
        said, _ = await process.communicate()
        used.append(float(said))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process until now, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def over_http(sessions: int, nodes: int, samples: int, size: int, directory: Path) -> dict[str, Any]:
    """Return the figures of one server and so many node processes."""
    async with server_process(directory / "state", "cluster=none") as server:
        pid = server.process.pid
        async with (
            RolloutClient(server.url, SERVICE_KEY) as client,
            forked(server.url, nodes, size) as nodes_cpu,
        ):
            while len(await client.nodes()) < nodes:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            asked = list[float]()

            async def ask() -> None:
                while True:
                    began = time.monotonic()
                    await client.task("t0")
                    asked.append(time.monotonic() - began)
                    await asyncio.sleep(ASK_SECONDS)

            before, began = cpu_seconds(pid), time.monotonic()
            names = [f"t{number}" for number in range(sessions // samples)]
            for name in names:
                await client.submit(make_request(name, num_samples=samples))
            asking = asyncio.create_task(ask())
            ended = [await client.wait(name) for name in names]
            seconds, cpu = time.monotonic() - began, cpu_seconds(pid) - before
            asking.cancel()
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    count = sum(len(task.sessions) for task in ended)
    return {
        "nodes": nodes,
        "sessions": count,
        "not_usable": sum(len(task.sessions) - task.usable for task in ended),
        "sessions_a_second": round(count / seconds),
        "server_core_busy": round(cpu / seconds, 2),
        "server_cpu_ms_a_session": round(1000 * cpu / count, 2),
        "nodes_cpu_ms_a_session": round(1000 * nodes_cpu[0] / count, 2),
        "server_mb": round(resident / 1e6),
        "answer_ms_p50_p99": [round(1000 * each, 1) for each in _p50_p99(asked)],
    }


def _p50_p99(values: list[float]) -> tuple[float, float]:
    return statistics.median(values), statistics.quantiles(values, n=100)[-1]


if __name__ == "__main__":
    fork_nodes(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
