"""Programs of the gateway's machine: whether they are there, and their start without leaving a process behind.

`asyncio.create_subprocess_exec` must not be cancelled. When it is cancelled before its pipes are connected, it waits
for pipes that it will never connect (CPython 3.13.0), and the task never ends.
"""

from __future__ import annotations

import asyncio
import shutil
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from polar_gym.runtimes.threads import finish

PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)


def missing(packages: Mapping[str, str]) -> list[str]:
    """Return what is missing of these programs (name -> package), each with the command that installs it."""
    return [
        f"{program} is missing; install it with: apt-get install {package}"
        for program, package in packages.items()
        if not shutil.which(program)
    ]


async def kill(process: Process) -> None:
    process.kill()
    await process.wait()


async def start(argv: Sequence[str], *, undo: Callable[[Process], Awaitable[None]] = kill, **options: Any) -> Process:
    """Start a process; `options` are those of `asyncio.create_subprocess_exec`. Raises `OSError`.

    When this is cancelled, the process is started all the same, and `undo` is called with it.
    """
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*argv, **options))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:

        async def take_back() -> None:
            await undo(await starting)

        await finish(take_back())
        raise


async def run(
    argv: Sequence[str], stdin: bytes = b"", seconds: float | None = None, **options: Any
) -> tuple[int, bytes, bytes]:
    """Return the exit code, the output and the errors of a program. Raises `OSError`, also where `seconds` are over.

    The program is killed where it does not end in time, and where this is cancelled. `options` are those of `start`.
    """
    process = await start(argv, **{**PIPES, **options})
    try:
        async with asyncio.timeout(seconds):
            stdout, stderr = await process.communicate(stdin)
    finally:
        if process.returncode is None:
            await kill(process)
    assert process.returncode is not None
    return process.returncode, stdout, stderr
