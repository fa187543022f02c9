"""The whole service as processes: server, gateway nodes, engine, receiver of callbacks; each may be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from polar_gym.http.keys import CALLBACK_KEY, NODE_KEY, SERVICE_KEY
from tests.support.processes import POLAR_GYM, free_port

KEYS = {SERVICE_KEY: "service-key-0123456789", NODE_KEY: "node-key-0123456789", CALLBACK_KEY: "callback-key-0123456789"}
NODE_HEADERS = {"Authorization": f"Bearer {KEYS[NODE_KEY]}"}
READY_SECONDS = 120.0


@dataclass
class Process:
    """One of the service's processes; `start` returns when its port answers."""

    name: str
    argv: list[str]
    port: int
    probe: str
    directory: Path
    kills: list[float] = field(default_factory=list)
    """When it was killed, Unix time."""
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.directory / f"{self.name}.log"

    @property
    def scratch(self) -> Path:
        return self.directory / f"{self.name}.tmp"

    async def start(self) -> None:
        """Start the process, again whenever it ends, as a supervisor would: a gateway ends while the engine is away."""
        self.scratch.mkdir(exist_ok=True)
        async with asyncio.timeout(READY_SECONDS), aiohttp.ClientSession() as http:
            while not await self._answers(http):
                if self.process is None or self.process.returncode is not None:
                    await self._spawn()
                await asyncio.sleep(0.05)

    async def _spawn(self) -> None:
        environment = {**os.environ, **KEYS, "TMPDIR": str(self.scratch), "COLUMNS": "300"}
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.argv, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )

    async def _answers(self, http: aiohttp.ClientSession) -> bool:
        try:
            async with http.get(self.url + self.probe):
                return True
        except aiohttp.ClientError:
            return False

    async def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            self.kills.append(time.time())
            process.send_signal(signal.SIGKILL)
            await process.wait()

    def memory(self) -> int:
        """Return the resident bytes."""
        assert self.process is not None
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


@dataclass
class Service:
    """`async with Service(...)`: everything runs, and is killed at the end."""

    directory: Path
    node_count: int
    delay_seconds: float
    pools: dict[str, int]
    lease_seconds: float = 5.0

    def __post_init__(self) -> None:
        self.answers, self.results = self.directory / "answers.jsonl", self.directory / "results.sqlite"
        self.answers.touch()
        self.engine = self._module("engine", "/v1/models", "--log", self.answers, "--delay", self.delay_seconds)
        self.receiver = self._module("receiver", "/", "--store", self.results)
        settings = [f"state={self.directory / 'server'}", "cluster=none", f"lease_seconds={self.lease_seconds}"]
        self.server = self._polar_gym("serve", "server", "/healthz", settings)
        self.nodes = [self._node(f"node{number}") for number in range(self.node_count)]

    @property
    def callback_url(self) -> str:
        return f"{self.receiver.url}/results"

    async def __aenter__(self) -> Service:
        async with AsyncExitStack() as stack:
            for process in (self.engine, self.receiver, self.server, *self.nodes):
                stack.push_async_callback(process.kill)
            await asyncio.gather(self.engine.start(), self.receiver.start(), self.server.start())
            await asyncio.gather(*(node.start() for node in self.nodes))
            self._running = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._running.aclose()

    def _node(self, name: str) -> Process:
        settings = ["engine=vllm", f"engine.url={self.engine.url}", "runtime=bubblewrap", f"server={self.server.url}"]
        settings += [f"pools.{pool}={size}" for pool, size in self.pools.items()]
        settings += [f"name={name}", f"state={self.directory / name}"]
        return self._polar_gym("gateway", name, "/readyz", settings)

    def _module(self, name: str, probe: str, *arguments: object) -> Process:
        port = free_port()
        argv = [sys.executable, "-m", f"tests.faults.{name}", "--port", str(port), *map(str, arguments)]
        return Process(name, argv, port, probe, self.directory)

    def _polar_gym(self, command: str, name: str, probe: str, settings: list[str]) -> Process:
        port = free_port()
        return Process(name, [*POLAR_GYM, command, f"listen=127.0.0.1:{port}", *settings], port, probe, self.directory)
