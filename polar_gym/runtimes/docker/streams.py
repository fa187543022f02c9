"""A command's streams in a running container, on the event loop.

The SDK creates and inspects commands, but this module reads and writes their streams. The SDK would hold a thread for
as long as a harness runs, and cannot half-close a command's stdin without use of its private parts. The protocol is one
HTTP request that turns into a raw connection. The gateway sends stdin. The container sends frames: a header of 8 bytes
(stream number, three zeros, length) and that many bytes.
"""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

from polar_gym.runtimes import SandboxError
from polar_gym.runtimes.output import CHUNK, Output

STDOUT, STDERR = 1, 2


async def communicate(host: str, exec_id: str, stdin: bytes, stdout: Output, stderr: Output) -> None:
    """Start a command that was created, write its stdin, and collect its output to the end of its streams."""
    reader, writer = await start(host, exec_id)
    try:
        feeding = asyncio.create_task(_feed(writer, stdin))
        try:
            while frame := await next_frame(reader):
                number, length = frame
                output = stderr if number == STDERR else stdout
                while length:
                    data = await reader.read(min(length, CHUNK))
                    if not data:
                        raise SandboxError("the Docker daemon hung up in the middle of a command's output")
                    output.feed(data)
                    length -= len(data)
        finally:
            feeding.cancel()
            await asyncio.wait({feeding})
    finally:
        writer.close()


async def start(host: str, exec_id: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Start a command that was created; return the raw connection to its streams. Raises `SandboxError`."""
    body = json.dumps({"Detach": False, "Tty": False})
    request = (
        f"POST /exec/{exec_id}/start HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    reader, writer = await _connect(host)
    try:
        writer.write(request.encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        if head.split(" ", 2)[1] != "101":
            writer.write_eof()
            async with asyncio.timeout(10):
                reason = (await reader.read(CHUNK)).decode(errors="replace").strip()
            raise SandboxError(f"Docker did not start a command: {head.splitlines()[0]}: {reason}")
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        writer.close()
        raise SandboxError(f"the Docker daemon at {host} hung up while it started a command") from error
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def next_frame(reader: asyncio.StreamReader) -> tuple[int, int] | None:
    """Read a frame's header; return its stream number and its length, or None at the end."""
    try:
        header = await reader.readexactly(8)
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None
    return header[0], int.from_bytes(header[4:], "big")


async def _connect(host: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(host)
    try:
        if address.scheme == "unix":
            return await asyncio.open_unix_connection(address.path)
        if address.scheme in ("tcp", "http") and address.hostname:
            return await asyncio.open_connection(address.hostname, address.port or 2375)
    except OSError as error:
        raise SandboxError(f"no Docker daemon answers at {host}: {error}") from error
    raise SandboxError(
        f"DOCKER_HOST is {host!r}; sandboxes need a daemon on this machine, e.g. unix:///var/run/docker.sock"
    )


async def _feed(writer: asyncio.StreamWriter, data: bytes) -> None:
    try:
        writer.write(data)
        await writer.drain()
        writer.write_eof()
    except (BrokenPipeError, ConnectionResetError):
        return  # the command ended without reading its input
