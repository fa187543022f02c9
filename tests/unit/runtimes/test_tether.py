"""The gateway's end of a relay keeps its stream up, and lets go of it, whatever happens to the stream or to time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from polar_gym.runtimes import SandboxError
from polar_gym.runtimes.relay import tether
from polar_gym.runtimes.relay.link import Connection, Link, SocketStream
from polar_gym.runtimes.relay.tether import Tether


class Unclosable(SocketStream):
    """A stream whose provider answers its end with an error."""

    async def close(self) -> None:
        await super().close()
        raise OSError("HTTP 502")


class Box:
    """The sandbox's end, which sends back what comes."""

    def __init__(self, first: type[SocketStream] = SocketStream) -> None:
        """`first`: the kind of the first stream."""
        self._first = first
        self._link = Link(self._echo, inside=True)
        self.carrying: list[asyncio.Task[None]] = []
        self.connected = asyncio.Event()
        self.gone = False

    async def connect(self) -> SocketStream:
        if self.gone:
            raise OSError("no such sandbox")
        theirs, ours = [await asyncio.open_connection(sock=end) for end in socket.socketpair()]
        kind = SocketStream if self.carrying else self._first
        self.carrying.append(asyncio.create_task(self._link.carry(SocketStream(*theirs))))
        self.connected.set()
        return kind(*ours)

    async def _echo(self, connection: Connection) -> None:
        while data := await connection.read():
            await connection.write(data)

    async def end(self) -> None:
        for task in self.carrying:
            task.cancel()
        await asyncio.gather(*self.carrying, return_exceptions=True)
        await self._link.close()


@pytest.fixture
async def box() -> AsyncIterator[Box]:
    box = Box()
    yield box
    await box.end()


async def echoed(connection: Connection) -> bool:
    await connection.write(b"a")
    return await connection.read() == b"a"


def stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an hour pass in which nothing ran, as after SIGSTOP and SIGCONT."""
    loop = asyncio.get_running_loop()
    before = loop.time
    monkeypatch.setattr(loop, "time", lambda: before() + 3600)


async def test_a_gateway_that_stood_still_reaches_its_sandbox_again(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a gateway that was stopped for a minute, and then gave up sandboxes that were alive without one
    attempt to reach them."""
    tethered = Tether(box.connect, None)
    connection = tethered.open()
    assert await echoed(connection)
    box.connected.clear()
    stand_still(monkeypatch)
    async with asyncio.timeout(10):
        await box.connected.wait()
        assert await echoed(connection)
    await tethered.close()


async def test_one_failed_attempt_after_standing_still_is_not_the_end(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a sandbox that is given up because the gateway stood still between two attempts."""
    tethered = Tether(box.connect, None)
    connection = tethered.open()
    assert await echoed(connection)
    box.connected.clear()
    failed = asyncio.Event()

    async def fail_once() -> SocketStream:
        monkeypatch.setattr(tethered, "_connect", box.connect)
        failed.set()
        raise OSError("no route to host")

    monkeypatch.setattr(tethered, "_connect", fail_once)
    box.carrying[0].cancel()
    async with asyncio.timeout(10):
        await failed.wait()
    stand_still(monkeypatch)
    async with asyncio.timeout(10):
        await box.connected.wait()
        assert await echoed(connection)
    await tethered.close()


async def test_a_sandbox_that_no_attempt_reaches_is_given_up(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tether, "LOST_SECONDS", 0.0)
    monkeypatch.setattr(tether, "RETRY_SECONDS", 0.0)
    tethered = Tether(box.connect, None)
    connection = tethered.open()
    assert await echoed(connection)
    box.gone = True
    box.carrying[0].cancel()
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(connection.read(), 10)
    with pytest.raises(SandboxError, match="cannot be reached any more: no such sandbox"):
        tethered.open()
    await tethered.close()


async def test_a_stream_that_cannot_be_closed_does_not_keep_the_gateway() -> None:
    """Guards against a provider's error at the end of a stream that swallowed the cancellation: another stream was
    opened, and the sandbox's removal waited for ever."""
    box = Box(Unclosable)
    tethered = Tether(box.connect, None)
    assert await echoed(tethered.open())
    async with asyncio.timeout(10):
        await tethered.close()
    assert len(box.carrying) == 1
    await box.end()
