"""Runs blocking work beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def to_its_end(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function as `asyncio.to_thread` does, but wait for the thread's end when this is cancelled.

    This is for work that makes files in a place that the caller removes after cancelling.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
