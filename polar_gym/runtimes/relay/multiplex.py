"""Many connections over one stream of bytes that may be cut: a state machine without input or output.

Both ends have a `Multiplexer`. `feed` takes what the stream brought, and `take` gives what the stream must carry. Each
frame has a header (kind, connection, length) and that many bytes:

- OPEN, DATA, CREDIT, END and RESET are about one connection. Both ends count the bytes of these frames, and the sender
  keeps them until the other end has acknowledged them (ACK).
- HELLO begins each stream and says how many counted bytes this end has had. So an end that gets a new stream in place
  of a cut one first sends what was lost, and nothing twice.
- PING keeps a silent stream alive.

An end that opens a connection, or is told of one, may send WINDOW bytes on it. CREDIT gives back what the other end has
used up. So neither end ever holds more than WINDOW bytes of one connection that nobody reads, and UNACKNOWLEDGED bytes
that were not acknowledged, beside frames without content. END closes one direction, RESET both.

This module runs inside sandboxes too: from Python 3.9 on, with the standard library only.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass

WINDOW = 256 * 1024
"""Bytes of one connection that may be on their way to the program that reads them."""

UNACKNOWLEDGED = 4 * 1024 * 1024
"""Bytes of all connections that an end keeps until they are acknowledged. Senders wait at this limit."""

LARGEST = 32 * 1024
"""The longest content of a frame."""

CONNECTIONS = 1024
"""Connections of one opener at a time; more are reset. So an end with many never keeps the other from opening one."""

HELLO, ACK, PING, OPEN, DATA, CREDIT, END, RESET = range(8)

_HEADER = struct.Struct(">BII")
_OFFSET = struct.Struct(">Q")
_CREDIT = struct.Struct(">I")
_LENGTHS = {HELLO: _OFFSET.size, ACK: _OFFSET.size, PING: 0, OPEN: 0, CREDIT: _CREDIT.size, END: 0, RESET: 0}


class MultiplexError(Exception):
    """The other end broke the protocol, or forgot the connections: no stream between the two can be used any more."""


@dataclass(frozen=True)
class Event:
    """What a stream told about a connection."""

    number: int


class Opened(Event):
    """The other end opened a connection."""


@dataclass(frozen=True)
class Data(Event):
    """Bytes of a connection, in their order. The code that uses them up calls `Multiplexer.used`."""

    content: bytes


class Ended(Event):
    """The other end sends no more bytes on a connection."""


class Reset(Event):
    """The other end gave a connection up."""


class _Connection:
    def __init__(self) -> None:
        self.credit = WINDOW
        """Bytes that may be sent."""
        self.unread = 0
        """Bytes that came and were not used up."""
        self.returned = 0
        """Bytes that were used up, and whose credit was not given back."""
        self.ended = False
        self.other_ended = False


class Multiplexer:
    """One end. It may be used while no stream is up; the next stream then carries what was said."""

    def __init__(self, *, inside: bool) -> None:
        """`inside` tells the two ends apart: one is made with True, the other with False."""
        self._inside = inside
        self._next = 1 if inside else 2
        self._last_opened = 0
        """The highest number that the other end has opened."""
        self._connections: tuple[dict[int, _Connection], dict[int, _Connection]] = ({}, {})
        """By the parity of their numbers, which tells the end that opened them."""
        self._kept: deque[bytes] = deque()
        """The counted frames that were not acknowledged, and from which offset on."""
        self._kept_size = 0
        self._acknowledged = 0
        self._received = 0
        """Counted bytes that came."""
        self._up = False
        self._greeted = False
        """Whether this stream's HELLO has come. Before it, nothing counted is sent."""
        self._buffer = bytearray()
        self._out: list[bytes] = []

    def connect(self) -> None:
        """Begin with a new stream; the one before is dead."""
        self.disconnect()
        self._up = True
        self._out.append(_frame(HELLO, 0, _OFFSET.pack(self._received)))

    def disconnect(self) -> None:
        """Forget the stream, and all that it has not carried."""
        self._up = self._greeted = False
        self._buffer.clear()
        self._out.clear()

    def take(self) -> bytes:
        """Return the bytes that the stream must carry next."""
        data = b"".join(self._out)
        self._out.clear()
        return data

    def feed(self, data: bytes) -> list[Event]:
        """Return what the bytes of the stream tell. Raises `MultiplexError`."""
        self._buffer += data
        events: list[Event] = []
        before, start = self._received, 0
        while len(self._buffer) - start >= _HEADER.size:
            kind, number, length = _HEADER.unpack_from(self._buffer, start)
            if length != _LENGTHS.get(kind, length) or length > LARGEST or kind > RESET:
                raise MultiplexError(f"a frame of kind {kind} has {length} bytes")
            end = start + _HEADER.size + length
            if len(self._buffer) < end:
                break
            content = bytes(self._buffer[start + _HEADER.size : end])
            if (kind == HELLO) == self._greeted:
                raise MultiplexError("a stream does not begin with one HELLO")
            if kind == HELLO:
                self._greet(*_OFFSET.unpack(content))
            elif kind == ACK:
                self._acknowledge(*_OFFSET.unpack(content))
            elif kind != PING:
                self._received += end - start
                events += self._counted(kind, number, content)
            start = end
        del self._buffer[:start]
        if self._received != before:
            self._out.append(_frame(ACK, 0, _OFFSET.pack(self._received)))
        if self._kept_size > 2 * UNACKNOWLEDGED:
            raise MultiplexError("the other end acknowledges nothing")
        return events

    def ping(self) -> None:
        """Send a sign of life."""
        if self._up:
            self._out.append(_frame(PING, 0))

    def open(self) -> int:
        """Open a connection, and return its number. Raises `ConnectionResetError` where too many are open."""
        number, own = self._next, self._connections[self._inside]
        if len(own) >= CONNECTIONS:
            raise ConnectionResetError(f"{CONNECTIONS} connections are open")
        self._next += 2
        own[number] = _Connection()
        self._send(OPEN, number)
        return number

    def room(self, number: int) -> int:
        """Return how many bytes may be sent on a connection now. Raises `ConnectionResetError`."""
        free = UNACKNOWLEDGED - self._kept_size
        return max(0, min(self._open_connection(number).credit, free, LARGEST))

    def send(self, number: int, content: bytes) -> None:
        """Send bytes, at least one and not more than `room`. Raises `ConnectionResetError`."""
        connection = self._open_connection(number)
        assert 0 < len(content) <= self.room(number)
        connection.credit -= len(content)
        self._send(DATA, number, content)

    def used(self, number: int, size: int) -> None:
        """Note that so many bytes of a connection were used up, so that the other end may send more."""
        connection = self._connections[number % 2].get(number)
        if connection is None:
            return
        connection.unread -= size
        connection.returned += size
        if connection.returned >= WINDOW // 2 and not connection.other_ended:
            self._send(CREDIT, number, _CREDIT.pack(connection.returned))
            connection.returned = 0

    def end(self, number: int) -> None:
        """Send no more bytes on a connection. Does nothing where that is over already."""
        connection = self._connections[number % 2].get(number)
        if connection is not None and not connection.ended:
            connection.ended = True
            self._send(END, number)
            self._forget_ended(number, connection)

    def reset(self, number: int) -> None:
        """Give a connection up. Does nothing where it is over already."""
        if self._connections[number % 2].pop(number, None) is not None:
            self._send(RESET, number)

    def _open_connection(self, number: int) -> _Connection:
        connection = self._connections[number % 2].get(number)
        if connection is None or connection.ended:
            raise ConnectionResetError(f"connection {number} is closed")
        return connection

    def _send(self, kind: int, number: int, content: bytes = b"") -> None:
        frame = _frame(kind, number, content)
        self._kept.append(frame)
        self._kept_size += len(frame)
        if self._greeted:
            self._out.append(frame)

    def _greet(self, offset: int) -> None:
        self._acknowledge(offset)
        self._greeted = True
        self._out += self._kept

    def _acknowledge(self, offset: int) -> None:
        while self._kept and self._acknowledged + len(self._kept[0]) <= offset:
            self._acknowledged += len(self._kept[0])
            self._kept_size -= len(self._kept.popleft())
        if self._acknowledged != offset:
            raise MultiplexError(f"the other end has {offset} bytes, and this one is at {self._acknowledged}")

    def _counted(self, kind: int, number: int, content: bytes) -> list[Event]:
        if kind == OPEN:
            return self._opened(number)
        connection = self._connections[number % 2].get(number)
        if connection is None:  # this end has given it up
            return []
        if kind == CREDIT:
            connection.credit += _CREDIT.unpack(content)[0]
            if connection.credit > WINDOW:
                raise MultiplexError(f"connection {number} got more credit than was used")
            return []
        if kind == RESET:
            del self._connections[number % 2][number]
            return [Reset(number)]
        if connection.other_ended:
            raise MultiplexError(f"connection {number} goes on after its end")
        if kind == END:
            connection.other_ended = True
            self._forget_ended(number, connection)
            return [Ended(number)]
        connection.unread += len(content)
        if connection.unread + connection.returned > WINDOW or not content:
            raise MultiplexError(f"connection {number} got more bytes than it has room for")
        return [Data(number, content)]

    def _opened(self, number: int) -> list[Event]:
        if number % 2 == self._inside or number <= self._last_opened:
            raise MultiplexError(f"connection {number} is not the other end's to open")
        self._last_opened = number
        theirs = self._connections[not self._inside]
        if len(theirs) >= CONNECTIONS:
            self._send(RESET, number)
            return []
        theirs[number] = _Connection()
        return [Opened(number)]

    def _forget_ended(self, number: int, connection: _Connection) -> None:
        if connection.ended and connection.other_ended:
            del self._connections[number % 2][number]


def _frame(kind: int, number: int, content: bytes = b"") -> bytes:
    return _HEADER.pack(kind, number, len(content)) + content
