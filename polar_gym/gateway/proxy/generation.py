"""The gate between model calls and the engine, and the clock of the harnesses, which stops while the gate is closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class GenerationGate:
    """The gate to the engine, for all sessions of a node."""

    def __init__(self) -> None:
        self.in_flight = 0
        """The number of calls that were let through and have no answer yet."""
        self._open = asyncio.Event()
        self._open.set()
        self._closed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._pauses_seconds = 0.0
        """The length of the pauses that have ended."""
        self._paused_at = 0.0
        """When the pause began that lasts."""

    @property
    def seconds(self) -> float:
        """Return the reading of a clock that stands still while generation is paused."""
        now = self._paused_at if self.paused else asyncio.get_running_loop().time()
        return now - self._pauses_seconds

    @property
    def paused(self) -> bool:
        return self._closed.is_set()

    def pause(self) -> None:
        if not self.paused:
            self._paused_at = asyncio.get_running_loop().time()
        self._open.clear()
        self._closed.set()

    def resume(self) -> None:
        if self.paused:
            self._pauses_seconds += asyncio.get_running_loop().time() - self._paused_at
        self._closed.clear()
        self._open.set()

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Hold one call's time with the engine. The call waits to begin while generation is paused."""
        while not self._open.is_set():  # a pause may follow before this task runs again
            await self._open.wait()
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def idle(self, timeout_seconds: float) -> None:
        """Wait until no call is in flight, or until the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()

    async def sleep(self, seconds: float) -> None:
        """Sleep until generation was not paused for `seconds` in total."""
        end = self.seconds + seconds
        while (left := end - self.seconds) > 0:
            await self._open.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._closed.wait()
