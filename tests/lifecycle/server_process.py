"""A rollout server as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.lifecycle.service_fixtures import CALLBACK_KEY, NODE_KEY, SERVICE_KEY
from tests.support.processes import POLAR_GYM, free_port

ENVIRONMENT = {
    **os.environ,
    "POLAR_GYM_SERVICE_KEY": SERVICE_KEY,
    "POLAR_GYM_NODE_KEY": NODE_KEY,
    "POLAR_GYM_CALLBACK_KEY": CALLBACK_KEY,
}


class ServerProcess:
    def __init__(self, state: Path, *settings: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = [f"listen=127.0.0.1:{self.port}", f"state={state}", *settings]
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *POLAR_GYM, "serve", *self._arguments, env=ENVIRONMENT, stderr=asyncio.subprocess.PIPE
        )
        assert self.process.stderr is not None
        line = await asyncio.wait_for(self.process.stderr.readline(), 60)
        assert b"the rollout server listens on" in line, line + await self.process.stderr.read()

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.returncode is None:
            self.process.send_signal(number)
        assert self.process.stderr is not None
        await self.process.stderr.read()
        return await self.process.wait()


@asynccontextmanager
async def server_process(state: Path, *settings: str) -> AsyncIterator[ServerProcess]:
    server = ServerProcess(state, *settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(signal.SIGKILL)
