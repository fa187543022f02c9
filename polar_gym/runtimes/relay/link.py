"""Connections over a stream that may be cut, on an event loop: what drives a `Multiplexer`, on both of its ends.

This module runs inside sandboxes too: from Python 3.9 on, with the standard library only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from polar_gym.runtimes.relay.multiplex import Data, Ended, Event, Multiplexer, Opened

log = logging.getLogger(__name__)

T = TypeVar("T")

CHUNK = 64 * 1024
PING_SECONDS = 10.0
SILENCE_SECONDS = 35.0
"""A stream that brought nothing for so long, no sign of life either, is taken for cut."""


class Stream(Protocol):
    """A stream of bytes to the other end. What goes wrong with it is an `OSError`."""

    async def read(self) -> bytes:
        """Return the next bytes; none at the end."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def close(self) -> None: ...


class SocketStream:
    """A stream through a socket or a pair of pipes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        return await self._reader.read(CHUNK)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()


class Connection:
    """One connection. After a reset, its methods raise `ConnectionResetError`."""

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self._number = number
        self._incoming: deque[bytes] = deque()
        self._ended = False
        self.gone = asyncio.Event()
        """Set once the connection is reset."""
        self._changed = asyncio.Event()
        self._one_write = asyncio.Lock()

    async def read(self) -> bytes:
        """Return the next bytes; none at the end."""
        while not self._incoming and not self._ended and not self.gone.is_set():
            self._changed.clear()
            await self._changed.wait()
        if self.gone.is_set():
            raise ConnectionResetError("the connection was reset")
        if not self._incoming:
            return b""
        data = self._incoming.popleft()
        self._link.multiplexer.used(self._number, len(data))
        self._link.wake()
        return data

    async def write(self, data: bytes) -> None:
        """Send bytes, as fast as the other end uses them up, and none of another write between them."""
        multiplexer, start = self._link.multiplexer, 0
        async with self._one_write:
            while start < len(data):
                room = multiplexer.room(self._number)
                if room:
                    multiplexer.send(self._number, data[start : start + room])
                    self._link.wake()
                    start += room
                else:
                    await self._link.moved.wait()

    def end(self) -> None:
        """Send no more."""
        self._link.multiplexer.end(self._number)
        self._link.wake()

    def reset(self) -> None:
        """Give the connection up where it is not over, and let the link forget it."""
        self._link.forget(self._number)
        self.gone.set()
        self._changed.set()

    def told(self, content: bytes) -> None:
        self._incoming.append(content)
        self._changed.set()

    def told_end(self) -> None:
        self._ended = True
        self._changed.set()


class Link:
    """One end: its connections, and the stream that carries them now."""

    def __init__(self, accept: Callable[[Connection], Coroutine[Any, Any, None]], *, inside: bool) -> None:
        """`accept` serves a connection that the other end opened; it is cancelled when the link is closed."""
        self.multiplexer = Multiplexer(inside=inside)
        self.moved = asyncio.Event()
        """Set for a moment whenever there may be room to send."""
        self.heard = asyncio.get_running_loop().time()
        """When the other end was last heard, by the loop's clock."""
        self._accept = accept
        self._connections: dict[int, Connection] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._to_send = asyncio.Event()
        self._carrying: asyncio.Task[Any] | None = None
        self._one_stream = asyncio.Lock()

    def open(self) -> Connection:
        """Open a connection. Raises `ConnectionResetError` where too many are open."""
        number = self.multiplexer.open()
        self.wake()
        return self._connection(number)

    async def carry(self, stream: Stream) -> None:
        """Use this stream until it ends, is cut or falls silent, or until another one is used: that cancels this.

        Raises `OSError` where the stream failed, and `MultiplexError` where the other end is not the one of the
        streams before.
        """
        if self._carrying is not None:
            self._carrying.cancel()
        self._carrying = own = asyncio.current_task()
        try:
            async with self._one_stream:
                await self._carry(stream)
        finally:
            if self._carrying is own:
                self._carrying = None
            await _close(stream)

    def wake(self) -> None:
        """Have the stream carry what there is to send."""
        self._to_send.set()

    def forget(self, number: int) -> None:
        self._connections.pop(number, None)
        self.multiplexer.reset(number)
        self.wake()
        self._let_move()

    async def close(self) -> None:
        """Reset all connections, and end what serves them."""
        for connection in list(self._connections.values()):
            connection.reset()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    def _let_move(self) -> None:
        self.moved.set()  # wakes all who wait now
        self.moved.clear()

    def _connection(self, number: int) -> Connection:
        self._connections[number] = connection = Connection(self, number)
        return connection

    async def _carry(self, stream: Stream) -> None:
        self.multiplexer.connect()
        self.wake()
        sending = asyncio.ensure_future(self._send(stream))
        try:
            while data := await self._read(stream):
                for event in self.multiplexer.feed(data):
                    self._handle(event)
                self.heard = asyncio.get_running_loop().time()
                self._let_move()
                self.wake()
        finally:
            sending.cancel()
            await asyncio.wait({sending})
            self.multiplexer.disconnect()

    async def _read(self, stream: Stream) -> bytes:
        try:
            return await within(SILENCE_SECONDS, stream.read())
        except asyncio.TimeoutError:
            raise OSError("it was silent") from None

    async def _send(self, stream: Stream) -> None:
        """Send what there is, and signs of life, until the stream fails: then `read` ends too."""
        try:
            while True:
                self._to_send.clear()
                if data := self.multiplexer.take():
                    await stream.write(data)
                    continue
                try:
                    await within(PING_SECONDS, self._to_send.wait())
                except asyncio.TimeoutError:
                    self.multiplexer.ping()
        except OSError:
            await _close(stream)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Opened):
            task = asyncio.ensure_future(self._accept(self._connection(event.number)))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
            return
        connection = self._connections[event.number]
        if isinstance(event, Data):
            connection.told(event.content)
        elif isinstance(event, Ended):
            connection.told_end()
        else:
            connection.reset()


async def _close(stream: Stream) -> None:
    """Close a stream. An error is logged and not raised, because it would replace a cancellation."""
    try:
        await stream.close()
    except OSError as error:
        log.warning("a stream could not be closed: %s", error)


async def within(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns. Raises `asyncio.TimeoutError` where that takes longer.

    `asyncio.wait_for` loses a cancellation before Python 3.12 where it comes at the coroutine's end.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


async def join(connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on all bytes between a connection and a socket, in both directions, until both have ended or one failed."""

    async def outwards() -> None:
        while data := await reader.read(CHUNK):
            await connection.write(data)
        connection.end()

    async def inwards() -> None:
        while data := await connection.read():
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    both = {asyncio.ensure_future(outwards()), asyncio.ensure_future(inwards())}
    try:
        done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.exception() is not None for task in done):
            connection.reset()
            writer.transport.abort()
    finally:
        for task in both:
            task.cancel()
        await asyncio.wait(both)
        connection.reset()
        writer.close()
