"""Lose one of three machines of a Ray cluster while sessions run: `make show-ray`.

Ray's own cluster utilities simulate the machines on this one. Ray places a gateway node on each. When every machine
runs a session, one machine is removed, with all of its processes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

from polar_gym.protocol import TaskState, TaskStatus
from tests.lifecycle.cluster import gate, on_every_machine, on_ray
from tests.show.result import Result, make_parser, parse

MACHINES = 3
USABLE, ELSEWHERE = LAWS = (
    "every session ends with a usable episode",
    "the lost machine's sessions finish on other machines",
)


async def show(machines: Any, sessions: int, directory: Path) -> tuple[TaskState, str, dict[str, str], float]:
    """Return the task's end, the lost node, the session that ran on each node then, and the seconds after the loss."""
    async with gate() as (opened, agent), on_ray(machines, directory) as (_, client):
        running = await on_every_machine(client, agent, machines=MACHINES, sessions=sessions)
        lost = machines.list_all_nodes()[-1]
        name = f"ray-{lost.node_id[:16]}"
        await asyncio.to_thread(machines.remove_node, lost, allow_graceful=False)
        opened.set()
        begun = time.monotonic()
        state = await asyncio.wait_for(client.wait("t"), 300)
        return state, name, running, time.monotonic() - begun


def main() -> int:
    parser = make_parser("ray", __doc__, quick="half of the sessions")
    parser.add_argument("--sessions", type=int, default=18)
    given = parse(parser, quick={"sessions": 9})
    result = Result("ray", LAWS, given)
    directory = Path(tempfile.mkdtemp(prefix="ray-"))  # names of sockets must be short
    os.environ["RAY_TMPDIR"] = str(directory)
    machines = Cluster()
    try:
        for _ in range(MACHINES):
            machines.add_node(num_cpus=1, resources={"gateway": 1}, object_store_memory=80 * 2**20)
        state, lost, running, seconds = asyncio.run(show(machines, given.sessions, directory))
    finally:
        machines.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
    _print(state, lost, running, seconds)
    again = {session.session_id: session for session in state.sessions if session.attempt}
    unusable = state.status is not TaskStatus.COMPLETED or state.usable != given.sessions
    result.check(USABLE, [f"{state.usable} of {given.sessions}: {state.failures}"] * unusable)
    stayed = running[lost] not in again or again[running[lost]].node == lost
    result.check(ELSEWHERE, [f"session {running[lost]} of node {lost}"] * stayed)
    result.figures = {"usable": state.usable, "begun_again": len(again), "seconds_after_the_loss": seconds}
    return result.finish()


def _print(state: TaskState, lost: str, running: dict[str, str], seconds: float) -> None:
    where = Counter(session.node for session in state.sessions)
    again = Counter(session.node for session in state.sessions if session.attempt)
    table = Table("node", "finished there", "of those begun again", "", title=f"{len(state.sessions)} sessions on Ray")
    for node in running:
        table.add_row(node, str(where[node]), str(again[node]), "lost mid-run" if node == lost else "")
    Console(width=100).print(table, f"usable: {state.usable}; the last one {seconds:.1f} s after the loss")


if __name__ == "__main__":
    sys.exit(main())
