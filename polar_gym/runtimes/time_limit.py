"""A command's end: by itself, at its time limit, because its caller says so, or because its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from polar_gym.runtimes import Command


async def until_its_end(
    running: asyncio.Task[Any], command: Command, kill: Callable[[asyncio.Task[Any]], Awaitable[None]]
) -> bool:
    """Wait for a running command; whether it had to be killed. `kill` returns when nothing of it is left, and is also
    called when this is cancelled. Raises what the command raises."""
    ending = asyncio.create_task((command.end or asyncio.Event()).wait())
    try:
        limit = command.timeout_seconds
        await asyncio.wait({running, ending}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.cancel()
        killed = not running.done()
        if killed:
            await kill(running)
    await running
    return killed
