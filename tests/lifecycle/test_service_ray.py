"""`cluster=ray`: three machines of a Ray cluster (Ray's own cluster utilities, on this one), one lost mid-run."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polar_gym.errors import how_to_install
from polar_gym.protocol import TaskStatus
from tests.lifecycle.cluster import gate, on_every_machine, on_ray
from tests.support.requirements import need, need_bubblewrap

RAY = importlib.util.find_spec("ray")


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    need(RAY, "ray", how_to_install("ray"))
    need_bubblewrap()
    from ray.cluster_utils import Cluster

    directory = tempfile.mkdtemp(prefix="ray-")  # not tmp_path: names of sockets must be short
    monkeypatch.setenv("RAY_TMPDIR", directory)
    cluster = Cluster()
    for _ in range(3):
        cluster.add_node(num_cpus=1, resources={"gateway": 1}, object_store_memory=80 * 2**20)
    yield cluster
    cluster.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


async def test_the_sessions_of_a_lost_machine_finish_on_the_others(machines: Any, tmp_path: Path) -> None:
    """The lease is an hour: that the node is dead, Ray has said."""
    async with gate() as (opened, agent), on_ray(machines, tmp_path) as (_, client):
        running = await on_every_machine(client, agent, machines=3, sessions=6)
        lost = machines.list_all_nodes()[-1]
        name = f"ray-{lost.node_id[:16]}"
        assert name in running
        await asyncio.to_thread(machines.remove_node, lost, allow_graceful=False)
        opened.set()
        state = await asyncio.wait_for(client.wait("t"), 120)
        assert (state.status, state.usable, state.failures) == (TaskStatus.COMPLETED, 6, {})
        again = {session.session_id for session in state.sessions if session.attempt == 1}
        assert running[name] in again
        assert name not in {session.node for session in state.sessions if session.attempt == 1}
        retried = [event.data["reason"] async for event in client.events("t") if event.kind == "session.retried"]
        assert set(retried) == {f"node {name}: it died"}
