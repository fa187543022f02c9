"""`cluster=ray`: Ray places one gateway node on each of its machines, restarts it, and reports its death.

Ray is used for what it is good at, placing processes and noticing their end. Nodes and server speak the same HTTP
contract as everywhere. A node is an actor bound to its machine, with the machine's own state directory: when its
process dies Ray starts it again there, and it salvages what it was running; when its machine goes, so does it, and the
server gives its sessions to others at once instead of waiting for the lease. Machines that join get a node.

The node key goes to the actors as an argument: environment variables of actors are shown on Ray's dashboard.
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

from polar_gym.config.run_config import RunConfig
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.process import serving
from polar_gym.gateway.node.settings import GatewaySettings
from polar_gym.service.settings import ServeSettings

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""How often the cluster's machines are looked at."""

NodeDied = Callable[[str, str | None], Awaitable[None]]


class GatewayActor:
    """One gateway node in a process of Ray's. Starting is part of making it, because Ray repeats that, and nothing
    else, when it restarts an actor."""

    def __init__(
        self, config: RunConfig, name: str, state: Path, server: str, key: str | None, allowing: dict[str, Any]
    ) -> None:
        listen = f"{ray.util.get_node_ip_address()}:0"
        settings = GatewaySettings(listen=listen, server=server, name=name, state=state / name, **allowing)
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._started = threading.Event()
        self._over = threading.Event()
        self._incarnation = ""
        self._error: BaseException | None = None
        threading.Thread(target=self._serve, args=(config, settings, key), name="gateway", daemon=True).start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def _serve(self, config: RunConfig, settings: GatewaySettings, key: str | None) -> None:
        async def serve() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            async with serving(config, settings, key) as gateway:
                self._incarnation = gateway.service.incarnation
                self._started.set()
                await self._stop.wait()

        try:
            asyncio.run(serve())
        except BaseException as error:  # whatever it is, the one who waits for the start must hear of it
            self._error = error
            log.exception("the gateway %s cannot go on", settings.name)
        finally:
            self._started.set()
            self._over.set()

    def incarnation(self) -> str:
        """Of the node's process, once it takes sessions."""
        return self._incarnation

    def run(self) -> None:
        """Until it is stopped; its caller hears of the process's death."""
        self._over.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Interrupt what runs, deliver what can be delivered, and end."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._over.wait()


class RayCluster:
    """`async with RayCluster(...)`: nodes on all machines until the context ends."""

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
        """Ray's id of the machine -> the actor, and who watches it."""
        self.watching: asyncio.Task[None]

    async def __aenter__(self) -> RayCluster:
        """Raises `ConfigError` where there is no cluster at the address."""
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
        self.watching.cancel()
        watchers = [watcher for _, watcher in self._nodes.values()]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(self.watching, *watchers, return_exceptions=True)
        await asyncio.gather(*(self._stop(actor) for actor, _ in self._nodes.values()))

    async def _stop(self, actor: Any) -> None:
        try:
            await asyncio.wait_for(actor.stop.remote(), 30)
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
        """As long as Ray keeps the node, or brings it back: each death of its process is told to the server."""
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
    """Whether Ray starts it again: false when its machine is gone, or it cannot be made."""
    try:
        await actor.__ray_ready__.remote()
    except RayError:
        return False
    return True
