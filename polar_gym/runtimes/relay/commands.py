"""Commands in a sandbox, each over a connection that the gateway opens: their start, input, output, end and exit code.

The gateway sends a frame with the command as JSON, then the bytes of its input, and ends its direction. The sandbox
sends frames of output, and the exit code in the last one. A frame is a kind, a length, and that many bytes.

This module runs inside sandboxes too: from Python 3.9 on, with the standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polar_gym.runtimes.relay.link import CHUNK, Connection

COMMAND, STDOUT, STDERR, EXIT, KILL = range(5)

_HEADER = struct.Struct(">BI")
_KILL_ALL = ("/bin/sh", "-c", "kill -9 -1")


class CommandError(Exception):
    """A sandbox did not say how a command ended."""


async def run(
    connection: Connection,
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    uid: int | None,
    stdin: bytes,
    stdout: Callable[[bytes], None],
    stderr: Callable[[bytes], None],
) -> int:
    """Have the other end run a command, and return its exit code; 128 and the signal's number where one ended it.

    `uid`: the user and group of the command; None: those of the relay. `stdout` and `stderr` are called with the
    output. When this is cancelled, the other end kills the command. Raises `CommandError` and `ConnectionResetError`.
    """
    head = json.dumps({"argv": list(argv), "environment": dict(environment), "uid": uid}).encode()
    feeding = asyncio.ensure_future(_feed(connection, _HEADER.pack(COMMAND, len(head)) + head, stdin))
    frames = _Frames(connection)
    try:
        while frame := await frames.next():
            kind, content = frame
            if kind == EXIT:
                return int.from_bytes(content, "big")
            (stdout if kind == STDOUT else stderr)(content)
    finally:
        feeding.cancel()
        await asyncio.wait({feeding})
        connection.reset()
    raise CommandError("a command's connection ended before the command")


async def kill(connection: Connection) -> None:
    """Have the other end kill all commands, and what earlier ones left. Raises `CommandError` where a command prevents
    that, and `ConnectionResetError`."""
    try:
        await connection.write(_HEADER.pack(KILL, 0))
        told = await _Frames(connection).next()
    finally:
        connection.reset()
    if told != (EXIT, b"\0"):
        raise CommandError("the agent killed what was to kill its processes")


async def _feed(connection: Connection, head: bytes, stdin: bytes) -> None:
    with contextlib.suppress(ConnectionResetError):  # the command is over
        await connection.write(head)
        await connection.write(stdin)
        connection.end()


class Commands:
    """The commands that run on this end, which is the sandbox's."""

    def __init__(self) -> None:
        self._running: dict[Process, int | None] = {}
        """Process -> its uid."""
        self._uids: set[int] = set()
        """The users of all commands so far. A command that has ended may have left processes."""
        self._killing = asyncio.Lock()
        """Two killers of one user would kill each other."""

    async def serve(self, connection: Connection) -> None:
        """Do what a connection asks for. Where it is reset, or this is cancelled, kill the command."""
        frames = _Frames(connection)
        try:
            frame = await frames.next()
            if frame is not None and frame[0] == COMMAND:
                await self._run(connection, frames.rest, **json.loads(frame[1]))
            else:
                await _say(connection, EXIT, b"\0" if await self._kill() else b"\1")
            connection.end()
            while await connection.read():  # a reset would take what the other end has not read
                pass
        except ConnectionResetError:
            return
        finally:
            connection.reset()

    async def _run(
        self, connection: Connection, start: bytes, argv: list[str], environment: dict[str, str], uid: int | None
    ) -> None:
        who: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
        options = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "cwd": "/", "start_new_session": True}
        try:
            process = await asyncio.create_subprocess_exec(*argv, env={**os.environ, **environment}, **options, **who)
        except (OSError, ValueError) as error:  # too long, or a zero byte
            await _say(connection, STDERR, f"{argv[0]}: {error}\n".encode())
            await _say(connection, EXIT, (126).to_bytes(1, "big"))
            return
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._running[process] = uid
        if uid is not None:
            self._uids.add(uid)
        feeding = asyncio.ensure_future(_feed_process(process.stdin, start, connection))
        passing = (_pass_on(connection, STDOUT, process.stdout), _pass_on(connection, STDERR, process.stderr))
        ending = asyncio.gather(*passing, process.wait(), return_exceptions=True)
        reset = asyncio.ensure_future(connection.gone.wait())
        try:
            await asyncio.wait({ending, reset}, return_when=asyncio.FIRST_COMPLETED)
            if not connection.gone.is_set():
                code = await process.wait()
                if code < 0 or code > 128:  # the agent may have killed the shell that was to kill the rest
                    await self._kill()
                await _say(connection, EXIT, (code if code >= 0 else 128 - code).to_bytes(1, "big"))
        finally:
            for task in (feeding, ending, reset):
                task.cancel()
            if process.returncode is None:
                await self._kill()
            await process.wait()
            del self._running[process]
            await asyncio.wait({feeding, reset})

    async def _kill(self) -> bool:
        """Kill what runs: all processes of the users that the commands have had, where these are their own. Return
        whether nothing prevented that."""
        for process, uid in list(self._running.items()):
            if uid is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()  # it is a `subreaper.py`, which kills all that it started
        async with self._killing:
            killers = [
                await asyncio.create_subprocess_exec(*_KILL_ALL, user=uid, group=uid, extra_groups=[])
                for uid in sorted(self._uids)
            ]
            return all([0 <= await killer.wait() <= 128 for killer in killers])


async def _feed_process(stdin: asyncio.StreamWriter, start: bytes, connection: Connection) -> None:
    with contextlib.suppress(OSError):  # the command reads no more, or the connection was reset
        data = start or await connection.read()
        while data:
            stdin.write(data)
            await stdin.drain()
            data = await connection.read()
    stdin.close()


async def _pass_on(connection: Connection, kind: int, output: asyncio.StreamReader) -> None:
    while data := await output.read(CHUNK):
        await _say(connection, kind, data)


async def _say(connection: Connection, kind: int, content: bytes) -> None:
    await connection.write(_HEADER.pack(kind, len(content)) + content)


class _Frames:
    """Reads the frames of a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.rest = b""
        """Bytes behind the last frame that came with it."""

    async def next(self) -> tuple[int, bytes] | None:
        """Return kind and content of the next frame; None at the end. Raises `ConnectionResetError`."""
        if not await self._reach(_HEADER.size):
            return None
        kind, length = _HEADER.unpack_from(self.rest)
        if not await self._reach(_HEADER.size + length):
            return None
        content = self.rest[_HEADER.size : _HEADER.size + length]
        self.rest = self.rest[_HEADER.size + length :]
        return kind, content

    async def _reach(self, size: int) -> bool:
        pieces = [self.rest]
        have = len(self.rest)
        while have < size and (data := await self._connection.read()):
            pieces.append(data)
            have += len(data)
        self.rest = b"".join(pieces)
        return have >= size
