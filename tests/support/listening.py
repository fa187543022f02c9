"""A server that ends in the middle of traffic."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web


async def listen(runner: web.AppRunner, port: int = 0) -> socket.socket:
    """Serve on a port of this machine, 0 for any, and return the listening socket."""
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", port))
    await web.SockSite(runner, listening).start()
    return listening


async def stop_listening(runner: web.AppRunner, listening: socket.socket) -> None:
    """Stop a server that `listen` began, after the connections that the event loop is accepting.

    A connection that arrives in the turn of the event loop in which its server closes fails in a destructor on
    Python 3.13.0 ("'NoneType' object is not iterable"), in whatever test runs by then.
    """
    asyncio.get_running_loop().remove_reader(listening)
    await asyncio.sleep(0)
    await runner.cleanup()
