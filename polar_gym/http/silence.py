"""Connections that ask for nothing: closed after a time, so that nobody can hold all that a port has by being slow.

aiohttp limits the pause between two requests, by a time that is long for the sake of clients that come back; this is
for the head of the first request. Bodies have a limit where they are read.
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
    """Those of one server whose first request is not there yet."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._silent: set[RequestHandler] = set()

    def watched(self, connect: Callable[[], RequestHandler]) -> Callable[[], RequestHandler]:
        """A protocol factory whose connections are closed unless they are `heard` of in time."""

        def watching() -> RequestHandler:
            protocol = connect()
            self._silent.add(protocol)
            asyncio.get_running_loop().call_later(self._seconds, self._cut, protocol)
            return protocol

        return watching

    def heard(self, protocol: RequestHandler) -> None:
        self._silent.discard(protocol)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """For applications: the first of theirs."""
        self.heard(request.protocol)
        return await handler(request)

    def _cut(self, protocol: RequestHandler) -> None:
        if protocol not in self._silent:
            return
        self._silent.discard(protocol)
        if protocol.transport is not None:
            log.warning("a connection sent no request within %g seconds: closed", self._seconds)
            protocol.transport.abort()
