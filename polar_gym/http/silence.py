"""Closes connections that send no request, so that slow clients cannot use up the connections of a port.

aiohttp limits only the pause between two requests, and that limit is long, for clients that come back. This module
limits the time for the head of the first request. The time for a body is limited where the body is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

log = logging.getLogger(__name__)


class SilentConnections:
    """The connections of one server that have not sent their first request."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._silent: set[RequestHandler] = set()

    def watched(self, connect: Callable[[], RequestHandler]) -> Callable[[], RequestHandler]:
        """Return a protocol factory like `connect`, whose connections are closed unless `heard` is called in time."""

        def watching() -> RequestHandler:
            protocol = connect()
            self._silent.add(protocol)
            asyncio.get_running_loop().call_later(self._seconds, self._cut, protocol)
            return protocol

        return watching

    def heard(self, protocol: RequestHandler) -> None:
        """Note that a connection sent a request: it stays open."""
        self._silent.discard(protocol)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Call `heard` for each request. An application must have this middleware before all others."""
        self.heard(request.protocol)
        return await handler(request)

    def _cut(self, protocol: RequestHandler) -> None:
        """Close a connection that is still silent."""
        if protocol not in self._silent:
            return
        self._silent.discard(protocol)
        if protocol.transport is not None:
            log.warning("a connection sent no request within %g seconds: closed", self._seconds)
            protocol.transport.abort()
