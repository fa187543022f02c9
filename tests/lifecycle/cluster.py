"""A rollout service on a Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from polar_gym.client import RolloutClient
from polar_gym.config.loading import load_config
from polar_gym.schema import HarnessSpec, RuntimeSpec
from polar_gym.service.service import RolloutService
from polar_gym.service.settings import ClusterSpec, ServeSettings
from tests.lifecycle.nodes import engine_settings
from tests.lifecycle.service_fixtures import NODE_KEY, rollout_server
from tests.support.sessions import asking, task


@asynccontextmanager
async def gate() -> AsyncIterator[tuple[asyncio.Event, HarnessSpec]]:
    """Give an event and a harness, which calls the policy once and then waits for the event. The harness needs
    `runtime.network: full`."""
    opened = asyncio.Event()

    async def wait(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await opened.wait()
        finally:
            writer.close()

    async with await asyncio.start_server(wait, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()
        try:
            yield opened, asking(f"ask(); import socket; socket.create_connection({address!r}).recv(1)")
        finally:
            opened.set()  # the server's end waits for its connections


@asynccontextmanager
async def on_ray(machines: Any, tmp_path: Path) -> AsyncIterator[tuple[RolloutService, RolloutClient]]:
    from polar_gym.service.ray_cluster import RayCluster

    config = load_config(settings={"engine": engine_settings(), "runtime": "bubblewrap", "pools": {"run": 1}})
    spec = ClusterSpec(
        name="ray", address=machines.address, num_cpus=0.5, resources={"gateway": 1}, state=tmp_path / "nodes"
    )
    async with rollout_server(tmp_path, lease_seconds=3600) as (service, client):
        cluster = RayCluster(ServeSettings(cluster=spec), config, client.url, NODE_KEY, service.node_died)
        try:
            async with cluster:
                yield service, client
        finally:
            import ray

            ray.shutdown()


async def on_every_machine(
    client: RolloutClient, agent: HarnessSpec, *, machines: int, sessions: int
) -> dict[str, str]:
    """Submit a task of sessions that wait, and return the one that runs on each node, once one runs on each."""
    await machines_registered(client, machines)
    runtime = RuntimeSpec(name="bubblewrap", network="full")
    await client.submit(task(num_samples=sessions, agent=agent, runtime=runtime))
    async with asyncio.timeout(120):
        async for event in client.events("t"):
            if event.kind == "session.status" and event.data["status"] == "RUNNING":
                state = await client.task("t")
                running = {s.node: s.session_id for s in state.sessions if s.node and s.status == "RUNNING"}
                if len(running) == machines:
                    return running
    raise AssertionError("the task ended before a session ran on each machine")


async def machines_registered(client: RolloutClient, count: int) -> None:
    """Wait until each machine's node has registered, so that no machine finishes all sessions before another starts."""
    async with asyncio.timeout(90):
        while len(await client.nodes()) < count:  # noqa: ASYNC110 - no event tells that a node has registered
            await asyncio.sleep(0.2)
