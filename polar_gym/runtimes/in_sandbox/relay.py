"""The inner end of a stream into a sandbox: passes connections to the gateway on, and runs commands.

    relay.pyz serve DIRECTORY PORT [WEB TOKEN]
                                     goes into the background once it listens on 127.0.0.1:PORT, and prints the port
                                     and its process; the port is another one where PORT is taken,
                                     and 0 is none
    relay.pyz attach DIRECTORY       is a stream to that process: its input and output are the stream's bytes

A connection to the port becomes one of the stream, which the gateway serves. A connection that the gateway opens is a
command. DIRECTORY is the user's alone. A WebSocket to the port WEB, at any address of the sandbox, is a stream too,
where its request has the token that is the content of the file TOKEN. A newer stream takes the place of an older one.
When there has been none for ABANDONED_SECONDS, all commands end, and so does the program.

The sandbox's own Python runs this, from 3.9 on, with the standard library only.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import socket
import sys
import threading
from asyncio import StreamReader, StreamWriter

from polar_gym.runtimes.relay.commands import Commands
from polar_gym.runtimes.relay.link import CHUNK, Link, SocketStream, Stream, join, within
from polar_gym.runtimes.relay.multiplex import MultiplexError
from polar_gym.runtimes.relay.websocket import accept

ABANDONED_SECONDS = 600.0
SOCKET = "stream"
SET_NO_NEW_PRIVS = 38  # linux/prctl.h


class Relay:
    def __init__(self) -> None:
        self._link = Link(Commands().serve, inside=True)
        self._streams = 0
        self._came = asyncio.Event()

    async def listen(self, directory: str, port: int) -> int:
        """Listen for streams, and for connections unless `port` is 0; return their port."""
        await asyncio.start_unix_server(self._attach, os.path.join(directory, SOCKET))
        if not port:
            return 0
        try:
            server = await asyncio.start_server(self._connect, "127.0.0.1", port)
        except OSError:
            server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return server.sockets[0].getsockname()[1]

    async def listen_to_the_web(self, port: int, token: bytes) -> None:
        """Listen for streams that are WebSockets."""

        async def attach(reader: StreamReader, writer: StreamWriter) -> None:
            stream = await accept(reader, writer, token)
            if stream is not None:
                await self._carry(stream)

        await asyncio.start_server(attach, None, port)

    async def serve(self) -> None:
        """Serve until no stream has been there for long."""
        abandoned = False
        while not abandoned:
            self._came.clear()
            try:
                await within(ABANDONED_SECONDS, self._came.wait())
            except asyncio.TimeoutError:
                abandoned = not self._streams
        await self._link.close()

    async def _attach(self, reader: StreamReader, writer: StreamWriter) -> None:
        await self._carry(SocketStream(reader, writer))

    async def _carry(self, stream: Stream) -> None:
        self._streams += 1
        try:
            await self._link.carry(stream)
        except (OSError, MultiplexError):
            return  # the gateway makes another stream, or gives this sandbox up
        finally:
            self._streams -= 1
            self._came.set()

    async def _connect(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            connection = self._link.open()
        except ConnectionResetError:
            writer.transport.abort()
        else:
            await join(connection, reader, writer)


def serve(directory: str, port: int, web: int = 0, token: str = "") -> None:
    """Start the relay in the background, and print its port and its process once it listens."""
    os.makedirs(directory, mode=0o700)
    reading, writing = os.pipe()
    if process := os.fork():
        os.close(writing)
        listens = os.read(reading, 10).decode()
        if not listens:
            sys.exit("the relay did not start")
        sys.stdout.write(f"{listens} {process}")
        return
    os.setsid()
    ctypes.CDLL(None).prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    secret = b""
    if web:
        with open(token, "rb") as file:
            secret = file.read()

    async def main() -> None:
        relay = Relay()
        listens = await relay.listen(directory, port)
        if web:
            await relay.listen_to_the_web(web, secret)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # the program that started this one waits for the end of its output
            os.dup2(nothing, descriptor)
        os.write(writing, str(listens).encode())
        os.close(writing)
        await relay.serve()

    asyncio.run(main())


def attach(directory: str) -> None:
    """Pass on bytes between a stream of this process and the relay, until either ends."""
    relay = socket.socket(socket.AF_UNIX)
    relay.connect(os.path.join(directory, SOCKET))

    def inwards() -> None:
        while data := os.read(0, CHUNK):
            relay.sendall(data)
        relay.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=inwards, daemon=True).start()
    while data := relay.recv(CHUNK):
        while data:
            data = data[os.write(1, data) :]
    os._exit(0)  # the thread may be in a read


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]), *([int(sys.argv[4]), sys.argv[5]] if sys.argv[4:] else []))
    else:
        attach(sys.argv[2])
