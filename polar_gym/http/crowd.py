"""Limits the connections that a server has at once: a sandbox with thousands would leave its gateway no descriptor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web

log = logging.getLogger(__name__)


class _Refused(asyncio.Protocol):
    """A connection that is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def at_most(
    count: int, server: web.Server, connect: Callable[[], asyncio.BaseProtocol], name: str
) -> Callable[[], asyncio.BaseProtocol]:
    """Return a protocol factory like `connect`, a factory of the server's connections, that closes each one which comes
    while the server has `count`. `name`: whose they are, for the line in the log."""
    told = False

    def connect_some() -> asyncio.BaseProtocol:
        nonlocal told
        if len(server.connections) < count:
            return connect()
        if not told:
            log.warning("%s has %d connections open: more are closed", name, count)
        told = True
        return _Refused()

    return connect_some
