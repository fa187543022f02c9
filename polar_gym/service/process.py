"""Runs the rollout server as a process: its store, its port, its nodes, and its end."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import signal
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from polar_gym.config.run_config import RunConfig
from polar_gym.errors import ConfigError, UnavailableError, how_to_install, kind_of
from polar_gym.gateway.node.admission import allowed_by, check_network
from polar_gym.gateway.node.process import serving as gateway_serving
from polar_gym.gateway.node.process import unless
from polar_gym.gateway.node.settings import GatewaySettings
from polar_gym.gateway.node.threads import give_threads
from polar_gym.http.keys import CALLBACK_KEY, NODE_KEY, SERVICE_KEY, Keys, check_exposure, is_loopback
from polar_gym.http.listener import Listener
from polar_gym.http.lookups import Lookups
from polar_gym.service.addresses import CallbackAddresses
from polar_gym.service.callbacks import CallbackSender
from polar_gym.service.live import Watch
from polar_gym.service.node_link import NodeLink
from polar_gym.service.server import make_app
from polar_gym.service.service import RolloutService
from polar_gym.service.settings import ServeSettings
from polar_gym.service.store import Store, StoreError

log = logging.getLogger(__name__)

LINGERING_SECONDS = 10.0
"""How long the rest of a refused body is read; an episode may be large."""


@asynccontextmanager
async def serving(
    settings: ServeSettings, keys: Keys, config: RunConfig | None = None
) -> AsyncIterator[tuple[RolloutService, str]]:
    """Run the service until the context ends, and give the service and its URL.

    `config`: the config of nodes that the server starts itself.

    Raises `ConfigError` before anything starts.
    """
    give_threads()
    check_exposure(settings.listen, settings.host, {SERVICE_KEY: keys.service, NODE_KEY: keys.node})
    allowed = allowed_by(settings, config, keyed=keys.service is not None and keys.node is not None)
    if config is not None:
        check_network(config.runtime, allowed)
    async with AsyncExitStack() as stack:
        bound = stack.enter_context(settings.bound())
        try:
            store = Store(settings.state)
        except StoreError as error:
            raise _kind_of(error.__cause__)(f"state={str(settings.state)!r}: {error}") from error
        stack.push_async_callback(store.close)
        link = await stack.enter_async_context(NodeLink(keys.node))
        service = await stack.enter_async_context(RolloutService(store, link, settings))
        lookups = Lookups()
        stack.push_async_callback(lookups.close)
        addresses = CallbackAddresses(loopback=is_loopback(settings.host), lookups=lookups)
        if keys.signing is not None:
            sender = CallbackSender(service.book, keys.signing, addresses)
            sending = service.book.watch(asyncio.create_task(sender.run()))
            stack.push_async_callback(asyncio.gather, sending, return_exceptions=True)
            stack.callback(sending.cancel)
        elif await store.due_callbacks(math.inf, 1) or any(
            task.request.callback_url for task in service.book.live.values()
        ):
            raise ConfigError(
                f"{CALLBACK_KEY} is not set, and state={str(settings.state)!r} has tasks whose results are sent to a "
                "callback_url: set the key that signed them before"
            )
        watch = Watch(service, link, settings.learning)
        app = make_app(service, keys, allowed, addresses, watch.lines, settings.url)
        listener = await stack.enter_async_context(Listener(app, bound, LINGERING_SECONDS))
        yield service, settings.own_url(listener.port)


def _kind_of(error: BaseException | None) -> type[ConfigError]:
    """Return the error of a state directory that cannot be opened, as `kind_of` does, also because of an error of
    SQLite."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the part that tells more
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return UnavailableError
    return kind_of(error)


async def serve(settings: ServeSettings, config: RunConfig | None, keys: Keys, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `config`: the config of nodes that the server starts itself.

    Raises `ConfigError`, or the error that stopped the service, e.g. a `StoreError`.
    """
    if settings.cluster.name == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(f"cluster=ray: needs Ray; install it with: {how_to_install('ray')}")
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    async with AsyncExitStack() as stack:
        service, url = await stack.enter_async_context(serving(settings, keys, config))
        say(f"the rollout server listens on {url}")
        if config is not None and settings.cluster.name == "local":
            own = GatewaySettings(
                listen="127.0.0.1:0", server=url, name="local", state=settings.state / "node", **settings.allowing
            )
            gateway = await unless(told, stack.enter_async_context(gateway_serving(config, own, keys.node)))
            if gateway is None:
                return
            say(f"node {gateway.service.node.name} listens on {gateway.url}")
        elif config is not None and settings.cluster.name == "ray":
            from polar_gym.service.ray_cluster import RayCluster  # imported here, because ray is an extra

            cluster = RayCluster(settings, config, url, keys.node, service.node_died)
            await stack.enter_async_context(cluster)
            service.book.watch(cluster.watching)
        error = await unless(told, asyncio.shield(service.book.failed))
        if error is not None:
            raise error
