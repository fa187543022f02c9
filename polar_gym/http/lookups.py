"""Looks up the addresses of host names on threads of its own.

While a name server is away, a lookup takes some 20 seconds. On the threads that all other work of the process shares, a
few such lookups would hold up that work.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

THREADS = 8
"""How many lookups are under way at once."""


class Lookups(AbstractResolver):
    """A resolver for connectors of aiohttp."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "lookups")

    async def find(self, host: str | None, port: int | None = None, **options: int) -> list[tuple[Any, ...]]:
        """Return what `socket.getaddrinfo` returns. Raises `OSError` and `UnicodeError`."""
        lookup = partial(socket.getaddrinfo, host, port, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, lookup)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host. Raises `OSError`."""
        found = await self.find(host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        results = []
        for kind, _, protocol, _, address in found:
            # This looks nothing up: it writes the address out, with the zone of a link-local one.
            written, _ = socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
            results.append(
                ResolveResult(hostname=host, host=written, port=address[1], family=kind, proto=protocol, flags=numeric)
            )
        return results

    async def close(self) -> None:
        """Begin no lookup that waits, and do not wait for those under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)
