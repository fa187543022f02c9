"""The sandbox's end of a WebSocket, against a client that others wrote, and parts as a proxy may make them."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator

import aiohttp
import pytest

from polar_gym.runtimes.relay.websocket import TOKEN, accept

SIZES = (1, 125, 126, 4096, 65535, 65536, 300_000)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of a server that sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (stream := await accept(reader, writer, b"secret")) is None:
            return
        while data := await stream.read():
            await stream.write(data)
        await stream.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_messages_of_any_size_come_back(port: int) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{port}", headers={TOKEN: "secret"}) as socket,
    ):
        for size in SIZES:
            sent, came = os.urandom(size), b""
            await socket.send_bytes(sent)
            while len(came) < size:
                came += await socket.receive_bytes(timeout=20)
            assert came == sent
            await socket.ping()


async def test_the_parts_of_a_message_and_pings_between_them(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nSec-WebSocket-Key: AAAA\r\nPolar-Gym-Token:secret\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")

    def part(first: int, content: bytes) -> bytes:
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(content))
        return struct.pack(">BB", first, 0x80 | len(content)) + mask + masked

    for piece in (part(0x02, b"begin"), part(0x89, b"ping"), part(0x00, b""), part(0x80, b"end"), part(0x88, b"")):
        for byte in piece:
            writer.write(bytes([byte]))
            await writer.drain()
    assert await reader.read() == b"\x82\x05begin" + b"\x8a\x04ping" + b"\x82\x03end"
    writer.close()


@pytest.mark.parametrize(
    "head",
    [b"Sec-WebSocket-Key: AAAA", b"Sec-WebSocket-Key: AAAA\r\nPolar-Gym-Token: secre", b"Polar-Gym-Token: secret"],
)
async def test_who_has_no_token_is_refused(port: int, head: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\n" + head + b"\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 403 ")
    writer.close()
