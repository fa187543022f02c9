"""`cluster=ray`: Ray places one gateway node on each of its machines, restarts it, and reports its death.

Ray only places processes and reports their end. Nodes and server speak the same HTTP contract as in every other
cluster. A node is an actor bound to its machine, and keeps its state directory on that machine. When the node's process
dies, Ray starts it again on that machine, and the new process salvages the sessions of the old one. When the machine
goes, the node is gone too, and the server gives its sessions to other nodes at once, without waiting for the lease.
Machines that join the cluster get a node.

The node key goes to the actors as an argument, because Ray's dashboard shows the environment variables of actors.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polar_gym.background_loop import BackgroundLoop, cancel_all
from polar_gym.config.run_config import RunConfig
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.process import serving
from polar_gym.gateway.node.settings import GatewaySettings
from polar_gym.http.keys import hide_keys
from polar_gym.service.settings import ServeSettings

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""The time between two looks at the cluster's machines."""

NodeDied = Callable[[str, str | None], Awaitable[None]]


class GatewayActor:
    """One gateway node in a process of Ray's. The constructor starts the node, because Ray calls nothing but the
    constructor when it restarts an actor."""

    def __init__(
        self, config: RunConfig, name: str, state: Path, server: str, key: str | None, allowing: dict[str, Any]
    ) -> None:
        hide_keys()
        listen = f"{ray.util.get_node_ip_address()}:0"
        settings = GatewaySettings(listen=listen, server=server, name=name, state=state / name, **allowing)
        self._over = threading.Event()
        self._loop = BackgroundLoop()
        self._serving = serving(config, settings, key)
        self._gateway = self._loop.run(self._serving.__aenter__())

    def incarnation(self) -> str:
        return self._gateway.service.incarnation

    def run(self) -> None:
        """Return when the node has stopped. Where the process dies, Ray raises an error at the caller."""
        self._over.wait()

    def stop(self) -> None:
        """Interrupt the node's sessions, deliver the episodes that can be delivered, and end."""
        try:
            self._loop.run(self._serving.__aexit__(None, None, None))
        finally:
            self._over.set()


class RayCluster:
    """`async with RayCluster(...)` runs nodes on all machines until the context ends."""

    def __init__(
        self, settings: ServeSettings, config: RunConfig, server: str, key: str | None, died: NodeDied
    ) -> None:
        self._spec = settings.cluster
        self._allowing = settings.allowing
        self._config = config
        self._server = server
        self._key = key
        self._died = died
        self._nodes: dict[str, tuple[Any, asyncio.Task[None]]] = {}
        """Ray's id of the machine -> the actor, and the task that watches the actor."""
        self.watching: asyncio.Task[None]

    async def __aenter__(self) -> RayCluster:
        """Connect to the cluster. Raise `ConfigError` where no cluster is at the address."""
        if not ray.is_initialized():
            try:
                await asyncio.to_thread(
                    ray.init, self._spec.address, ignore_reinit_error=True, include_dashboard=False, log_to_driver=False
                )
            except (ConnectionError, RayError, ValueError) as error:
                raise ConfigError(f"cluster.address={self._spec.address!r}: {error}") from error
        self.watching = asyncio.create_task(self._watch_machines())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await cancel_all([self.watching, *(watcher for _, watcher in self._nodes.values())])
        await asyncio.gather(*(self._stop(actor) for actor, _ in self._nodes.values()))

    async def _stop(self, actor: Any) -> None:
        try:
            async with asyncio.timeout(30):
                await actor.stop.remote()
        except (RayError, TimeoutError) as error:
            log.warning("a node did not end by itself: %s", error)
        await asyncio.to_thread(ray.kill, actor)

    async def _watch_machines(self) -> None:
        while True:
            machines = await asyncio.to_thread(ray.nodes)
            alive = {machine["NodeID"] for machine in machines if machine["Alive"] and self._fits(machine)}
            for machine in [machine for machine, (_, watcher) in self._nodes.items() if watcher.done()]:
                self._nodes.pop(machine)[1].result()
            for machine in sorted(alive - self._nodes.keys()):
                if self._spec.nodes is None or len(self._nodes) < self._spec.nodes:
                    self._nodes[machine] = self._start(machine)
            await asyncio.sleep(LOOK_SECONDS)

    def _fits(self, machine: dict[str, Any]) -> bool:
        return all(machine["Resources"].get(name, 0) >= amount for name, amount in self._spec.resources.items())

    def _start(self, machine: str) -> tuple[Any, asyncio.Task[None]]:
        name = f"ray-{machine[:16]}"
        made = ray.remote(GatewayActor).options(
            num_cpus=self._spec.num_cpus,
            resources=self._spec.resources,
            max_restarts=-1,
            max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(machine, soft=False),
        )
        state = self._spec.state.absolute()
        actor = made.remote(self._config, name, state, self._server, self._key, self._allowing)
        return actor, asyncio.create_task(self._watch_node(name, actor))

    async def _watch_node(self, name: str, actor: Any) -> None:
        """Tell the server each death of a node's process, until Ray does not start the node again."""
        while True:
            incarnation: str | None = None
            try:
                incarnation = await actor.incarnation.remote()
                log.info("node %s runs", name)
                await actor.run.remote()
            except RayActorError as error:
                log.warning("node %s died: %s", name, str(error).splitlines()[0])
                if incarnation is not None:
                    await self._died(name, incarnation)
                if not await _comes_back(actor):
                    return
            except RayError as error:
                log.error("node %s: %s", name, error)
                return


async def _comes_back(actor: Any) -> bool:
    """Return whether Ray starts the actor again: not where its machine is gone, or where its constructor fails."""
    try:
        await actor.__ray_ready__.remote()
    except RayError:
        return False
    return True
