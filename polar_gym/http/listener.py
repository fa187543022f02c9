"""Serves an application on a port, with limits for slow connections."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from polar_gym.http.careful import SERVER_OPTIONS
from polar_gym.http.silence import SilentConnections

HEAD_SECONDS = 15.0
"""How long a connection may take for the head of its first request. aiohttp limits only the pause between requests."""
IDLE_SECONDS = 75.0
"""How long a connection may be idle between two requests."""
SHUTDOWN_SECONDS = 2.0
"""How long handlers may go on when the listener closes."""


class Listener:
    """A port that answers while `async with` lasts; `port` is its number.

    Handlers are not cancelled when their client hangs up: an action that a client began (a task, a delivery) is
    completed.
    """

    def __init__(self, app: web.Application, bound: socket.socket, lingering_seconds: float) -> None:
        """`bound`: a socket at the port's address.

        `lingering_seconds`: how long the rest of a refused body is read before the connection closes. A client that
        is still sending when the connection closes may lose the answer that says why.
        """
        self._bound = bound
        self._silent = SilentConnections(HEAD_SECONDS)
        app.middlewares.insert(0, self._silent.middleware)  # type: ignore[union-attr]
        self._runner = web.AppRunner(
            app,
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=lingering_seconds,
            shutdown_timeout=SHUTDOWN_SECONDS,
            **SERVER_OPTIONS,
        )

    async def __aenter__(self) -> Listener:
        await self._runner.setup()
        assert self._runner.server is not None
        factory, loop = self._silent.watched(self._runner.server), asyncio.get_running_loop()
        self._server = await loop.create_server(factory, sock=self._bound)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        await self._runner.cleanup()
