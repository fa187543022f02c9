"""The ways to a stream of bytes into a provider's sandbox, and what shuts the network of providers that we know.

`exec` of the protocol is one-shot, and has no input: it is no stream. A provider without any of these ways is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from polar_gym.runtimes.relay.link import CHUNK, Stream
from polar_gym.runtimes.relay.tether import through
from polar_gym.runtimes.relay.websocket import TOKEN
from polar_gym.runtimes.remote.provider import (
    Handle,
    PtySession,
    SupportsEndpoint,
    SupportsPty,
    SupportsStream,
    pty_spec_of,
)

WEB_PORT = 8079
"""The port in a sandbox at which a provider's endpoint ends."""

CONNECT_SECONDS = 20.0
CLOSE = aiohttp.ClientWSTimeout(ws_close=2.0)  # pyright: ignore[reportCallIssue] - a class of attrs

RIGHTS = ("--add-caps", "CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_KILL,CAP_SETGID,CAP_SETUID")
"""Apptainer's option for what the relay needs as root; an Apptainer may be set to leave root no rights."""

COMMAND_LINES: dict[str, Callable[[str], Sequence[str]]] = {
    "docker": lambda name: ("docker", "exec", "-i", "--user", "0", name),
    "apptainer": lambda name: ("apptainer", "exec", *RIGHTS, f"instance://{name}"),
    "local": lambda _: (),
}
"""Provider of NeMo Gym -> the argv prefix that runs a program in its sandbox of this id."""

CONTAINED = ("--containall", "--writable-tmpfs", "--net", "--network", "none")

DEFAULTS: dict[str, dict[str, Any]] = {
    "docker": {"create": {"network": "none"}},
    "apptainer": {
        "create": {"extra_start_args": [*CONTAINED, *RIGHTS]},
        "exec": {"extra_exec_args": list(RIGHTS)},
    },
}
"""Provider -> arguments of its constructor, with which a sandbox has no network. Those of a config come before them."""


Connect = Callable[[Handle, str, str], Awaitable[Stream]]
"""(sandbox, shell command that is a stream, token) -> the stream. Raises `OSError`."""


def is_streamed(name: str, provider: type[Any]) -> bool:
    """Return whether a stream can be had from this provider, which is a class."""
    return name in COMMAND_LINES or issubclass(provider, SupportsStream | SupportsPty | SupportsEndpoint)


def stream(name: str, provider: object) -> tuple[Connect, int]:
    """Return what opens a stream into a sandbox of this provider, and the port on which the relay must listen for it.

    The port is 0 where the command is the stream; else the command is not used.
    """
    if isinstance(provider, SupportsStream):
        return lambda handle, command, _: through(provider.stream_argv(handle, command)), 0
    if (line := COMMAND_LINES.get(name)) is not None:
        return lambda handle, command, _: through([*line(handle.sandbox_id), "sh", "-c", command]), 0
    if isinstance(provider, SupportsPty):

        async def pipes(handle: Handle, command: str, _: str) -> Stream:
            with as_os_errors():
                return PtyStream(await provider.create_pty(handle, pty_spec_of(command)))

        return pipes, 0
    assert isinstance(provider, SupportsEndpoint)

    async def web(handle: Handle, _: str, token: str) -> Stream:
        with as_os_errors():
            endpoint = await provider.endpoint(handle, WEB_PORT)
        return await WebStream.connect(endpoint.endpoint, {**endpoint.headers, TOKEN: token})

    return web, WEB_PORT


class PtyStream:
    """A stream through a session of a provider, in pipe mode."""

    def __init__(self, session: PtySession) -> None:
        self._session = session

    async def read(self) -> bytes:
        with as_os_errors():
            return await self._session.read()

    async def write(self, data: bytes) -> None:
        with as_os_errors():
            await self._session.write(data)

    async def close(self) -> None:
        with as_os_errors():
            await self._session.close()


class WebStream:
    """A stream through a WebSocket."""

    def __init__(self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._session = session
        self._socket = socket

    @classmethod
    async def connect(cls, url: str, headers: Mapping[str, str]) -> WebStream:
        """Return the stream to a URL. Raises `OSError`."""
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS))
        try:
            with as_os_errors():
                connecting = session.ws_connect(url, headers=headers, max_msg_size=0, timeout=CLOSE)
                async with asyncio.timeout(CONNECT_SECONDS):
                    return cls(session, await connecting)
        except BaseException:
            await session.close()
            raise

    async def read(self) -> bytes:
        message = await self._socket.receive()
        if message.type is aiohttp.WSMsgType.ERROR:
            raise OSError(str(message.data))
        return message.data if message.type is aiohttp.WSMsgType.BINARY else b""

    async def write(self, data: bytes) -> None:
        with as_os_errors():
            for start in range(0, len(data), CHUNK):
                await self._socket.send_bytes(data[start : start + CHUNK])

    async def close(self) -> None:
        await self._socket.close()
        await self._session.close()


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Raise an `OSError` in place of any error of a provider, with its kind and text."""
    try:
        yield
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
