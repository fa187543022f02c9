"""The gateway's end of a relay: keeps a stream into a sandbox up, and serves the sandbox's connections."""

from __future__ import annotations

import asyncio
import logging
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from polar_gym.runtimes import SandboxError, processes
from polar_gym.runtimes.output import Output
from polar_gym.runtimes.relay.link import Connection, Link, SocketStream, Stream, join
from polar_gym.runtimes.relay.multiplex import MultiplexError

log = logging.getLogger(__name__)

LOST_SECONDS = 60.0
"""How long after a first failed attempt to reach a sandbox it is given up, where all that follow fail too. Silence
alone does not count: the gateway itself may have stood still."""

RETRY_SECONDS = 0.5
SAID_LIMIT = 2000
"""Bytes of a program's complaints that an error quotes."""


class ProcessStream(SocketStream):
    """A stream through the input and output of a program on this machine."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        super().__init__(process.stdout, process.stdin)
        self._process = process
        self._said = Output(SAID_LIMIT)
        self._listening = asyncio.create_task(self._said.read(process.stderr))

    async def read(self) -> bytes:
        """Return the next bytes; none where the program has ended. Raises `OSError` where it complained."""
        if data := await super().read():
            return data
        await self._process.wait()
        await self._listening
        if said := self._said.value().decode(errors="replace").strip():
            raise OSError(said)
        return b""

    async def close(self) -> None:
        if self._process.returncode is None:
            await processes.kill(self._process)
        await super().close()
        await self._listening


async def through(argv: Sequence[str]) -> ProcessStream:
    """Start a program, and return the stream through it. Raises `OSError`."""
    return ProcessStream(await processes.start(argv, **processes.PIPES))


class Tether:
    """A link to the relay of one sandbox, over streams that `connect` makes, one after another."""

    def __init__(self, connect: Callable[[], Awaitable[Stream]], gateway: Path | None) -> None:
        """`connect` raises `OSError` where it makes no stream now, and `SandboxError` where it never will. `gateway`:
        the Unix socket of the session's gateway, to which the sandbox's connections go; None: they are refused."""
        self.link = Link(self._serve, inside=False)
        self._connect = connect
        self._gateway = gateway
        self._keeping = asyncio.create_task(self._keep_up())
        self._lost = ""
        """Why the sandbox was given up."""

    def open(self) -> Connection:
        """Open a connection to the relay. Raises `SandboxError`."""
        if self._keeping.done():
            raise SandboxError(f"the sandbox {self._lost or 'is stopped'}")
        return self.link.open()

    def problem(self) -> SandboxError:
        """Return the reason why connections were reset."""
        return SandboxError(f"the sandbox {self._lost or 'reset a command'}")

    async def close(self) -> None:
        self._keeping.cancel()
        await asyncio.wait({self._keeping})
        await self.link.close()

    async def _keep_up(self) -> None:
        """Carry the link over one stream after another, until none can be had for long."""
        loop, failing_since = asyncio.get_running_loop(), None
        while True:
            heard = self.link.heard
            try:
                await self.link.carry(await self._connect())
                problem = "its stream ended"
            except OSError as error:
                problem = str(error)
            except MultiplexError as error:
                problem = f"its relay broke off: {error}"
                break
            except SandboxError as error:
                problem = str(error)
                break
            if self.link.heard != heard:
                failing_since = None
            elif failing_since is None:
                failing_since = loop.time()
            elif loop.time() - failing_since >= LOST_SECONDS:
                break
            await asyncio.sleep(RETRY_SECONDS)
        self._lost = f"cannot be reached any more: {problem}"
        await self.link.close()

    async def _serve(self, connection: Connection) -> None:
        """Pass a connection of the sandbox on to the gateway."""
        try:
            if self._gateway is not None:
                reader, writer = await asyncio.open_unix_connection(str(self._gateway))
                await join(connection, reader, writer)
        except OSError as error:
            log.warning("the gateway's socket cannot be reached: %s", error)
        finally:
            connection.reset()
