"""Runs a node of the rollout service as a process: state, engine, control port, link to the server, and its end.

Bad settings are refused before anything starts. Then the sessions that an earlier process left are salvaged, and only
then does the control port answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from polar_gym.background_loop import cancel_all
from polar_gym.config.run_config import RunConfig
from polar_gym.durable import remove_tree
from polar_gym.engines import EngineError
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.admission import allowed_by, check_network
from polar_gym.gateway.node.assemble import load_tasks, make_node, plays_tasks
from polar_gym.gateway.node.control import control_app
from polar_gym.gateway.node.link import Link
from polar_gym.gateway.node.metrics import NodeMetrics
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.node.salvage import salvage
from polar_gym.gateway.node.service import NodeService
from polar_gym.gateway.node.settings import GatewaySettings
from polar_gym.gateway.node.state import StateDirectory
from polar_gym.http.keys import NODE_KEY, check_exposure
from polar_gym.http.listener import Listener
from polar_gym.schema import PluginSpec

log = logging.getLogger(__name__)

T = TypeVar("T")

FAREWELL_SECONDS = 10.0
"""How long the delivery of the last episodes may take at the end; the next process delivers the others."""
LINGERING_SECONDS = 1.0
"""How long the rest of a refused body is read; an order is small."""
RESTART_SECONDS = 5.0
"""How long to wait before background work that failed starts again."""
ENGINE_AGAIN_SECONDS = 2.0
"""The pause between two tries to reach an engine that is not up yet."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A node that is running."""

    service: NodeService
    url: str
    """The URL of the node's control port."""


@asynccontextmanager
async def serving(config: RunConfig, settings: GatewaySettings, key: str | None) -> AsyncIterator[Gateway]:
    """Run a node of the rollout service until the context ends, and then interrupt its sessions.

    Raises `polar_gym.errors.ConfigError` and `polar_gym.engines.EngineError` before the node takes any session.
    """
    check_exposure(settings.listen, settings.host, {NODE_KEY: key})
    if missing := [str(directory) for directory in settings.directories if not directory.is_dir()]:
        raise ConfigError(f"directories={missing[0]}: is no directory on this machine; mount or make it first")
    allowed = allowed_by(settings, config, keyed=key is not None)
    check_network(config.runtime, allowed)
    async with AsyncExitStack() as stack:
        state = StateDirectory(settings.state.absolute())
        stack.enter_context(state.lock())
        remove_tree(state.root / "scratch")  # of an earlier process
        (state.root / "scratch").mkdir(mode=0o700, exist_ok=True)
        bound = stack.enter_context(settings.bound())
        tasks = await asyncio.to_thread(_demonstrated, config)
        own = config.with_rollout(state=state.root)
        node = make_node(own, tasks, name=settings.named(), scratch=state.root / "scratch")
        await _start(node, stack, settings.engine_wait_seconds if settings.server is not None else 0.0)
        await salvage(state, node.runtime)
        service = NodeService(node, state, settings, _engine_key(config.engine), allowed)
        await service.find()
        metrics = NodeMetrics(service)
        listener = await stack.enter_async_context(
            Listener(control_app(service, metrics, key), bound, LINGERING_SECONDS)
        )
        own_url = settings.own_url(listener.port)
        background = [service.keep_evicting, metrics.watch_the_loop]
        if settings.server is not None:
            background.append(Link(service, settings.server, own_url, key).run)
        for work in background:
            stack.push_async_callback(cancel_all, [asyncio.create_task(_restarted(work))])
        stack.push_async_callback(_say_goodbye, service)
        yield Gateway(service, own_url)


async def serve(config: RunConfig, settings: GatewaySettings, key: str | None, say: Callable[[str], None]) -> None:
    """Run a node until SIGTERM or SIGINT. A second signal ends the grace period."""
    loop = asyncio.get_running_loop()
    told, told_again = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (told_again if told.is_set() else told).set())
    async with AsyncExitStack() as stack:
        gateway = await unless(told, stack.enter_async_context(serving(config, settings, key)))
        if gateway is None:
            return
        say(f"node {gateway.service.node.name} listens on {gateway.url}")
        await told.wait()
        say(f"draining: running sessions have {settings.grace_seconds:g} seconds (again: none)")
        await unless(told_again, gateway.service.stop(settings.grace_seconds))


async def unless(told: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Return the result of `work`. Return None where `told` is set before the work is done; then cancel the work."""
    working, stopping = asyncio.ensure_future(work), asyncio.create_task(told.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.wait({working, stopping})


async def _start(node: Node, stack: AsyncExitStack, wait_seconds: float) -> None:
    """Start a node, and wait for its engine: both are often started together, and a model takes minutes to load.

    Raises `EngineError`.
    """
    deadline, told = time.monotonic() + wait_seconds, False
    while True:
        try:
            await stack.enter_async_context(node)
            return
        except EngineError as error:
            if error.status != 503 or time.monotonic() >= deadline:
                raise
            if not told:
                log.warning("waiting up to %g s for the engine: %s", wait_seconds, error.message)
            told = True
        await asyncio.sleep(min(ENGINE_AGAIN_SECONDS, wait_seconds))


async def _say_goodbye(service: NodeService) -> None:
    """Interrupt the sessions of a node, and wait a while for the delivery of their episodes."""
    await service.stop(0)
    if service.settings.server is None:
        return
    try:
        async with asyncio.timeout(FAREWELL_SECONDS):
            await service.all_delivered()
    except TimeoutError:
        log.warning("%d episodes are not delivered yet; the next start delivers them", len(service.sessions))


async def _restarted(work: Callable[[], Awaitable[None]]) -> None:
    """Run background work until cancelled. Work that fails is logged and starts again."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("background work failed, and starts again")
            await asyncio.sleep(RESTART_SECONDS)


def _demonstrated(config: RunConfig) -> list[Any]:
    """Return the tasks whose reference solutions a scripted policy plays, where it has no script of its own."""
    return load_tasks(config) if plays_tasks(config.engine) else []


def _engine_key(engine: PluginSpec) -> str:
    """Return a key that is the same for all nodes of one engine; an engine inside the process has its own key."""
    url = engine.options.get("url") or f"{socket.gethostname()}:{id(engine)}"
    return hashlib.sha256(f"{engine.name} {url} {engine.options.get('model')}".encode()).hexdigest()[:16]
