"""A rollout service on a Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from polar_gym.client import RolloutClient
from polar_gym.config.loading import load_config
from polar_gym.service.service import RolloutService
from polar_gym.service.settings import ClusterSpec, ServeSettings
from tests.lifecycle.nodes import engine_settings
from tests.lifecycle.service_fixtures import NODE_KEY, rollout_server
from tests.support.sessions import asking

TAKES_A_WHILE = asking("ask(); import time; time.sleep(3)")


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


async def machines_registered(client: RolloutClient, count: int) -> None:
    """Wait until each machine's node has registered, so that no machine finishes all sessions before another starts."""
    async with asyncio.timeout(90):
        while len(await client.nodes()) < count:  # noqa: ASYNC110 - no event tells that a node has registered
            await asyncio.sleep(0.2)
