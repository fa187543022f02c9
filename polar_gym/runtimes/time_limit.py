"""A command's end: by itself, at its time limit, because its caller says so, or because its caller is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from polar_gym.runtimes import Command, SandboxError

KILL_ATTEMPTS = 10


class LastingSandbox(Protocol):
    """A sandbox that outlives its commands and runs them one at a time, as this module sees it."""

    stopped: bool
    """Whether the sandbox is being removed, with everything in it."""

    async def kill_agent(self) -> None:
        """Kill every process that the agent has now."""
        ...

    async def end(self) -> None:
        """End the sandbox, with everything in it."""
        ...


async def until_its_end(running: asyncio.Task[Any], command: Command, sandbox: LastingSandbox) -> bool:
    """Wait for a running command, and return whether it had to be killed; cancelling this kills it too.

    Raises what the command raises, and `SandboxError` where the command cannot be killed.
    """
    ending = asyncio.create_task((command.end or asyncio.Event()).wait())
    try:
        limit = command.timeout_seconds
        await asyncio.wait({running, ending}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.cancel()
        killed = not running.done()
        if killed:
            await _kill(running, sandbox)
    await running
    return killed


async def _kill(running: asyncio.Task[Any], sandbox: LastingSandbox) -> None:
    """Kill every process of the agent, until the running command ends.

    More than once, because the command may only be about to start. Where that does not help, end the sandbox and raise
    `SandboxError`: no process of an agent outlives its limit.
    """
    for _ in range(KILL_ATTEMPTS):
        if sandbox.stopped:
            await asyncio.wait({running})
            return
        await sandbox.kill_agent()
        await asyncio.wait({running}, timeout=1)
        if running.done():
            return
    await sandbox.end()
    raise SandboxError("a command could not be killed at its time limit; its sandbox was ended")
