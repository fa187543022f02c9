"""Nodes in this process and in processes of their own, and sessions for them, for the tests of a serving node."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from polar_gym.config.loading import load_config
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.node.process import Gateway, serving
from polar_gym.gateway.node.settings import gateway_settings
from polar_gym.gateway.proxy.capture import SessionCapture
from polar_gym.http.keys import NODE_KEY
from polar_gym.protocol import Dispatch
from polar_gym.schema import Episode, TaskRequest
from tests.support.sessions import task

KEY = "node-key-of-this-test-0123456789"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@asynccontextmanager
async def session_on_node(tmp_path: Path) -> AsyncIterator[tuple[Node, SessionCapture]]:
    """Run a node with one session whose harness seems to run."""
    engine = EmbeddedEngine(EmbeddedOptions(scripts=[Script(final_message="Done.")]))
    async with Node(engine, cache=tmp_path / "cache", state=tmp_path / "state") as node, node.session(task()) as life:
        life.capture.running = True
        yield node, life.capture


def order(session_id: str = "s", attempt: int = 0, request: TaskRequest | None = None, **fields: Any) -> Dispatch:
    request = request or task(**fields)
    return Dispatch(session_id=session_id, attempt=attempt, sample_index=0, request=request)


def engine_settings(delay_seconds: float = 0.0) -> dict[str, Any]:
    return {
        "name": "embedded",
        "scripts": [{"commands": [], "final_message": "All done."}],
        "delay_seconds": delay_seconds,
    }


@dataclass
class Client:
    """The server's side of a node's control port."""

    http: aiohttp.ClientSession

    async def put(self, order: Dispatch) -> tuple[int, dict[str, Any]]:
        return await self.ask("PUT", f"/v1/sessions/{order.session_id}/{order.attempt}", order.to_json())

    async def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        async with self.http.request(method, path, data=body) as response:
            return response.status, await response.json(content_type=None)

    async def status(self, session_id: str, attempt: int = 0) -> str:
        return (await self.ask("GET", f"/v1/sessions/{session_id}/{attempt}"))[1]["status"]

    async def until(self, status: str, session_id: str = "s", attempt: int = 0) -> None:
        async with asyncio.timeout(60):
            while await self.status(session_id, attempt) != status:  # noqa: ASYNC110 - HTTP tells no events
                await asyncio.sleep(0.02)

    async def episode(self, session_id: str = "s", attempt: int = 0) -> Episode:
        path = f"/v1/sessions/{session_id}/{attempt}/episode"
        async with asyncio.timeout(60):
            while True:
                async with self.http.get(path) as response:
                    if response.status == 200:
                        return Episode.from_json(await response.read())
                await asyncio.sleep(0.02)


@asynccontextmanager
async def client(url: str, headers: dict[str, str] = HEADERS) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(url, headers=headers) as http:
        yield Client(http)


@asynccontextmanager
async def node_here(
    tmp_path: Path,
    *,
    delay_seconds: float = 0.0,
    pools: dict[str, int] | None = None,
    config: dict[str, Any] | None = None,
    key: str | None = KEY,
    **settings: Any,
) -> AsyncIterator[tuple[Gateway, Client]]:
    """Run a node in this process, and give it and its client. `config`: parts of its run."""
    run = {"engine": engine_settings(delay_seconds), "runtime": "bubblewrap", "pools": pools or {}, **(config or {})}
    own = gateway_settings({"listen": "127.0.0.1:0", "name": "here", "state": tmp_path / "state", **settings})
    async with serving(load_config(settings=run), own, key) as gateway, client(gateway.url) as speaker:
        yield gateway, speaker


@dataclass
class NodeProcess:
    """`polar-gym gateway` as a process of its own, from `start` to `kill` or `terminate`."""

    directory: Path
    port: int
    settings: tuple[str, ...] = ()
    delay_seconds: float = 0.0
    environment: Mapping[str, str] = field(default_factory=lambda: {NODE_KEY: KEY})
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    async def spawn(self) -> asyncio.subprocess.Process:
        scratch = self.directory / "tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        scripts = "[{commands: [], final_message: All done.}]"
        with self.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", "from polar_gym.cli import main; main()", "gateway"),
                *("engine=embedded", "runtime=bubblewrap"),
                *(f"engine.scripts={scripts}", f"engine.delay_seconds={self.delay_seconds}"),
                *(f"listen=127.0.0.1:{self.port}", f"state={self.directory / 'state'}", *self.settings),
                env={**os.environ, **self.environment, "TMPDIR": str(scratch), "COLUMNS": "300"},
                stdout=log,
                stderr=log,
            )

    async def start(self) -> None:
        """Start the process, and wait until it is ready."""
        self.process = await self.spawn()
        async with asyncio.timeout(120), aiohttp.ClientSession() as http:
            while True:
                try:
                    async with http.get(f"{self.url}/readyz") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientConnectionError:
                    assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.05)

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def terminate(self) -> None:
        await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            process.send_signal(number)
            await process.wait()
