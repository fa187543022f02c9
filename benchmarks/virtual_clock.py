"""Time for simulations: the stages' code runs as in reality, as long as it waits only for the event loop."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop on which time passes only while all tasks sleep, and then at once."""

    def __init__(self) -> None:
        super().__init__(_Jumping(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualClock) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: no task sleeps, and each waits for another task")
        self._loop.now += timeout
        return super().select(0)
