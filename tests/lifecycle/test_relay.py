"""The relay with real processes: connections and commands through a stream that is cut."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from polar_gym.runtimes import SandboxError, processes
from polar_gym.runtimes.output import Output
from polar_gym.runtimes.relay import commands, link, program, tether
from polar_gym.runtimes.relay.link import SocketStream
from polar_gym.runtimes.relay.tether import ProcessStream, Tether, through
from polar_gym.runtimes.unconfined import SUBREAPER
from tests.lifecycle.runtime_kinds import Marked
from tests.support.requirements import need

CHECKOUT = Path(__file__).parents[2]
MIB = 1 << 20
SIZE = 12 * MIB
PIECE = 100_003


class Box:
    """A relay on this machine, as if it were inside a sandbox, and the streams to it."""

    def __init__(self, directory: Path, python: str = "/usr/bin/python3") -> None:
        self.directory = directory / "relay"
        (directory / "relay.pyz").write_bytes(program())
        self.argv = [python, "-I", str(directory / "relay.pyz")]
        started = subprocess.run([*self.argv, "serve", self.directory, "8080"], check=True, capture_output=True)
        self.port, self.pid = map(int, started.stdout.split())
        self.streams: list[ProcessStream] = []

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    async def connect(self) -> SocketStream:
        self.streams.append(await through([*self.argv, "attach", str(self.directory)]))
        return self.streams[-1]

    async def cut(self) -> None:
        """Kill the process that carries the stream."""
        if self.streams and self.streams[-1]._process.returncode is None:
            await processes.kill(self.streams[-1]._process)


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    box = Box(tmp_path)
    yield box
    box.end()


async def gateway(path: Path, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
    await asyncio.start_unix_server(serve, path)


async def run(
    tethered: Tether, *argv: str, stdin: bytes = b"", limit: int = 100 * MIB, uid: int | None = None
) -> tuple[int, bytes, bytes]:
    stdout, stderr = Output(limit), Output(limit)
    code = await commands.run(
        tethered.open(),
        argv,
        environment={"PATH": "/usr/bin:/bin"},
        uid=uid,
        stdin=stdin,
        stdout=stdout.feed,
        stderr=stderr.feed,
    )
    return code, stdout.value(), stderr.value()


async def test_connections_go_through_a_stream_that_is_cut(box: Box, tmp_path: Path) -> None:
    """Each connection gets back what it sent, in order and whole, while streams die at any byte."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send all back, and two bytes more after the end of what came: a half-closed connection goes on."""
        while data := await reader.read(PIECE):
            writer.write(data)
            await writer.drain()
        writer.write(b"OK")
        writer.close()

    await gateway(tmp_path / "gateway", echo)
    tethered = Tether(box.connect, tmp_path / "gateway")
    passed = asyncio.Event()

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", box.port)
        content = hashlib.shake_128(str(number).encode()).digest(SIZE)

        async def send() -> None:
            for start in range(0, SIZE, PIECE):
                writer.write(content[start : start + PIECE])
                await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        came = bytearray()
        while data := await reader.read(PIECE):
            came += data
            passed.set()
        await sending
        assert came == content + b"OK"
        writer.close()

    clients = asyncio.gather(*(client(number) for number in range(4)))
    while not clients.done() and len(box.streams) < 6:
        passed.clear()
        await asyncio.wait({asyncio.ensure_future(passed.wait()), clients}, return_when=asyncio.FIRST_COMPLETED)
        if not clients.done():
            await box.cut()
    await clients
    assert len(box.streams) >= 3
    await tethered.close()


@pytest.mark.parametrize("gateway_is", ["closing", "absent", "none"])
async def test_a_connection_that_nobody_serves_ends(box: Box, tmp_path: Path, gateway_is: str) -> None:
    """Guards against harnesses that wait for ever for an answer."""

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    if gateway_is == "closing":
        await gateway(tmp_path / "gateway", close)
    tethered = Tether(box.connect, None if gateway_is == "none" else tmp_path / "gateway")
    reader, writer = await asyncio.open_connection("127.0.0.1", box.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()
    await tethered.close()


async def test_commands_are_exact_and_outlive_a_cut(box: Box) -> None:
    tethered = Tether(box.connect, None)
    data = hashlib.shake_128(b"").digest(3 * MIB)
    assert await run(tethered, "cat", stdin=data) == (0, data, b"")
    assert (await run(tethered, "true", stdin=data))[0] == 0
    assert await run(tethered, "sh", "-c", "echo out; echo err >&2; exit 7") == (7, b"out\n", b"err\n")
    assert (await run(tethered, "sh", "-c", "kill -9 $$"))[0] == 137
    assert (await run(tethered, "no-such-program")) == (
        126,
        b"",
        b"no-such-program: [Errno 2] No such file or directory: 'no-such-program'\n",
    )
    assert (await run(tethered, "cat", "a\0b"))[0] == 126
    long = asyncio.create_task(run(tethered, "sh", "-c", "head -c 20000000 /dev/urandom | tee /dev/stderr | sha256sum"))
    await box.cut()
    code, said, content = await long
    assert (code, said.split()[0].decode()) == (0, hashlib.sha256(content).hexdigest())
    assert len(box.streams) == 2
    await tethered.close()


async def test_output_and_errors_at_the_same_time_do_not_mix(box: Box) -> None:
    """Guards against a piece of one in the middle of the other, where both wait for room: the output was wrong, or the
    command without an end."""
    tethered = Tether(box.connect, None)
    for _ in range(4):
        code, said, content = await run(tethered, "sh", "-c", "head -c 8000000 /dev/urandom | tee /dev/stderr")
        assert (code, len(said), said == content) == (0, 8000000, True)
    await tethered.close()


@pytest.mark.parametrize("way", ["asked", "cancelled"])
async def test_a_killed_command_is_over(box: Box, way: str) -> None:
    tethered, marked = Tether(box.connect, None), Marked()
    argv = ["/usr/bin/python3", str(SUBREAPER), "/", "1000", "sh", "-c", f"setsid {marked.command} & wait"]
    running = asyncio.create_task(run(tethered, *argv))
    await marked.until(alive=True)
    if way == "asked":
        await commands.kill(tethered.open())
        assert (await running)[0] == 137
        assert not marked.alive()
    else:
        running.cancel()
        await asyncio.wait({running})
        await marked.until(alive=False)
    await tethered.close()


async def test_what_an_ended_command_left_is_killed(box: Box) -> None:
    """Guards against an agent that makes the shell end which was to kill the rest, and lives on while it is graded."""
    need(os.geteuid() == 0, "root", "run this as root")
    tethered, marked = Tether(box.connect, None), Marked()
    code, _, _ = await run(tethered, "sh", "-c", f"setsid {marked.command} >/dev/null 2>&1 & exit 0", uid=54321)
    assert code == 0
    await marked.until(alive=True)
    await commands.kill(tethered.open())
    await marked.until(alive=False)
    await tethered.close()


async def test_the_oldest_python(tmp_path: Path) -> None:
    code, python, _ = await processes.run([str(CHECKOUT / ".ci" / "find-python"), "3.9"])
    need(code == 0, "Python 3.9", "pyenv install 3.9")
    box = Box(tmp_path, python.decode().strip())
    tethered = Tether(box.connect, None)
    assert await run(tethered, "cat", stdin=b"a") == (0, b"a", b"")
    await tethered.close()
    box.end()


async def test_a_sandbox_that_is_gone_is_given_up(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tether, "LOST_SECONDS", 1.0)
    tethered = Tether(box.connect, None)
    running = asyncio.create_task(run(tethered, "sleep", "1000"))
    await run(tethered, "true")
    box.argv = ["sh", "-c", "echo no such sandbox >&2"]
    await box.cut()
    with pytest.raises(ConnectionResetError):
        await running
    with pytest.raises(SandboxError, match="cannot be reached any more: no such sandbox"):
        tethered.open()
    assert "cannot be reached any more" in str(tethered.problem())
    await tethered.close()


async def test_a_stream_without_a_sign_of_life_is_taken_for_cut(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against sessions that wait for ever behind a router that forgot the connection."""
    monkeypatch.setattr(link, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(link, "PING_SECONDS", 0.1)
    connect, silent = box.connect, [True]

    async def first_silent() -> SocketStream:
        if not silent:
            return await connect()
        silent.clear()
        ours, theirs = socket.socketpair()
        silent_ends.append(theirs)
        return SocketStream(*await asyncio.open_connection(sock=ours))

    silent_ends: list[socket.socket] = []
    tethered = Tether(first_silent, None)
    assert await asyncio.wait_for(run(tethered, "echo", "a"), 60) == (0, b"a\n", b"")
    await tethered.close()
    silent_ends[0].close()
