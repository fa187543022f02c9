"""The sandbox's end of a stream over a WebSocket (RFC 6455): what passes through HTTP proxies in both directions.

This module runs inside sandboxes too: from Python 3.9 on, with the standard library only.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import struct
from asyncio import StreamReader, StreamWriter

from polar_gym.runtimes.relay.link import CHUNK, SocketStream, within

TOKEN = "polar-gym-token"
"""The header of the request that has the session's token."""

HEAD_SECONDS = 20.0
LONGEST = 1 << 20
"""Bytes of a message's part. The gateway sends fewer; proxies may join them."""

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_PART, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_FINAL, _MASKED = 0x80, 0x80


class WebSocketStream(SocketStream):
    """The stream of an accepted WebSocket."""

    async def read(self) -> bytes:
        while True:
            try:
                first, second = await self._reader.readexactly(2)
                size = second & 0x7F
                if size > 125:
                    size = int.from_bytes(await self._reader.readexactly(2 if size == 126 else 8), "big")
                if size > LONGEST or not second & _MASKED:
                    raise OSError(f"a WebSocket's part of {size} bytes")
                mask = await self._reader.readexactly(4)
                content = _masked(await self._reader.readexactly(size), mask)
            except asyncio.IncompleteReadError:
                return b""
            kind = first & 0x0F
            if kind == _CLOSE:
                return b""
            if kind == _PING:
                await self._send(_PONG, content)
            elif kind in (_PART, _BINARY) and content:
                return content

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), CHUNK):
            await self._send(_BINARY, data[start : start + CHUNK])

    async def _send(self, kind: int, content: bytes) -> None:
        size = len(content)
        length = (
            struct.pack(">B", size)
            if size < 126
            else struct.pack(">BH" if size < 65536 else ">BQ", 126 + (size > 65535), size)
        )
        self._writer.write(bytes([_FINAL | kind]) + length + content)
        await self._writer.drain()


async def accept(reader: StreamReader, writer: StreamWriter, token: bytes) -> WebSocketStream | None:
    """Answer the request that begins a connection; return None where it has not the token, or is no WebSocket's."""
    try:
        head = await within(HEAD_SECONDS, reader.readuntil(b"\r\n\r\n"))
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError, OSError):
        writer.transport.abort()
        return None
    pairs = (line.partition(b":") for line in head.split(b"\r\n"))
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    key = headers.get(b"sec-websocket-key", b"")
    if not key or not hmac.compare_digest(headers.get(TOKEN.encode(), b""), token):
        writer.write(b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        return None
    digest = base64.b64encode(hashlib.sha1(key + _GUID).digest())
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: %b\r\n\r\n" % digest
    )
    return WebSocketStream(reader, writer)


def _masked(content: bytes, mask: bytes) -> bytes:
    size = len(content)
    whole = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(content, "big") ^ int.from_bytes(whole, "big")).to_bytes(size, "big")
