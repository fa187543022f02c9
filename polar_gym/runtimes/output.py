"""The output of a command, within a limit. Of a longer output, the first and the last half of the limit are kept."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process

CHUNK = 64 * 1024


class Output:
    """Collects a stream; never holds more than the limit and one chunk."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit // 2
        self._tail_limit = limit - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def feed(self, data: bytes) -> None:
        free = self._head_limit - len(self._head)
        self._head += data[:free]
        self._tail += data[free:]
        excess = len(self._tail) - self._tail_limit
        if excess > 0:
            del self._tail[:excess]
            self._dropped += excess

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Collect a stream to its end."""
        while data := await stream.read(CHUNK):
            self.feed(data)

    def value(self) -> bytes:
        """Return the bytes that were kept, with a line in the middle that says how many were dropped."""
        if not self._dropped:
            return bytes(self._head + self._tail)
        return b"%b\n[... %d bytes dropped ...]\n%b" % (self._head, self._dropped, self._tail)


async def communicate(process: Process, stdin: bytes, stdout: Output, stderr: Output) -> None:
    """Write the input and collect the output until the process has ended and all its pipes are closed."""
    assert process.stdin is not None
    await asyncio.gather(feed_stdin(process.stdin, stdin), drain(process, stdout, stderr), process.wait())


async def drain(process: Process, stdout: Output, stderr: Output) -> None:
    """Collect the rest of the output from the pipes."""
    assert process.stdout is not None
    assert process.stderr is not None
    await asyncio.gather(stdout.read(process.stdout), stderr.read(process.stderr))


async def feed_stdin(stream: asyncio.StreamWriter, data: bytes) -> None:
    """Write a command's input and close it; a command may end without reading it."""
    try:
        stream.write(data)
        await stream.drain()
        stream.close()
        await stream.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        stream.close()
