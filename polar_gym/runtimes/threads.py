"""Waits for work that must come to its end also when its caller is cancelled.

Such work makes files or processes, which the caller removes after cancelling.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def finish(work: Awaitable[T]) -> T:
    """Return the result of some work. When this is cancelled, also more than once, wait for the work's end first."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({running})
        raise


async def to_its_end(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function as `asyncio.to_thread` does, and finish it also when this is cancelled."""
    return await finish(asyncio.to_thread(function, *arguments))
