"""A load generator: a number of connections, each of which asks again as soon as it has its answer.

The client speaks raw HTTP/1.1: a client library would cost several times as much as a direct call to the mock engine.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
LAST_CHUNK = b"0\r\n\r\n"
LIMIT = 1 << 24


class Caller:
    """One connection to one server."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Caller:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=LIMIT)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._writer.close()

    async def ask(self, request: bytes) -> bytes:
        """Return the body of the answer.

        Raises `RuntimeError` unless the status is 200.
        """
        return b"".join([piece async for piece in self.pieces(request)])

    async def pieces(self, request: bytes) -> AsyncIterator[bytes]:
        """Yield the body of the answer as it comes: chunk by chunk, or whole if it has a length.

        Raises `RuntimeError` unless the status is 200.
        """
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            body = b"".join([piece async for piece in self._body(head)])
            raise RuntimeError(f"{head.decode()}{body[:2000].decode(errors='replace')}")
        async for piece in self._body(head):
            yield piece

    async def _body(self, head: bytes) -> AsyncIterator[bytes]:
        if length := LENGTH.search(head):
            yield await self._reader.readexactly(int(length[1]))
            return
        while (size := int(await self._reader.readuntil(b"\r\n"), 16)) > 0:
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)

    async def json(self, request: bytes) -> dict[str, Any]:
        return orjson.loads(await self.ask(request))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that all threads of a process have used, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)


@dataclass(frozen=True, slots=True)
class Measured:
    """The cost of calls under one load."""

    calls: int
    p50_ms: float
    p99_ms: float
    per_second: float
    cpu_ms: float
    """CPU time of the server's processes for one call."""


async def measure(port: int, requests: Sequence[bytes], pids: Sequence[int], *, seconds: float) -> Measured:
    """Measure a server under the load of `len(requests)` connections. Each repeats one of the requests."""
    taken: list[float] = []
    async with asyncio.TaskGroup() as group:
        started, began = time.perf_counter(), sum(map(cpu_seconds, pids))
        for request in requests:
            group.create_task(_keep_asking(port, request, started + seconds, taken))
    cpu, passed = sum(map(cpu_seconds, pids)) - began, time.perf_counter() - started
    p50, p99 = np.percentile(taken, [50, 99])
    calls = len(taken)
    return Measured(calls, float(p50) * 1e3, float(p99) * 1e3, calls / passed, cpu / calls * 1e3)


async def _keep_asking(port: int, request: bytes, until: float, taken: list[float]) -> None:
    async with Caller(port) as caller:
        while (began := time.perf_counter()) < until:
            await caller.ask(request)
            taken.append(time.perf_counter() - began)
