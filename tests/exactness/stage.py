"""Starts what is audited, an engine behind the recorder and a gateway process before it, and reads the books."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.exactness import laws
from tests.exactness.books import Books, read_books
from tests.exactness.recorder import Recorder
from tests.exactness.recording import Answer, read_recording

START_SECONDS = 120.0
CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Opened:
    """A session of the gateway, whose harness is a client of the auditor."""

    session_id: str
    key: str


class GatewayDiedError(RuntimeError):
    """The gateway ended while something was asked of it."""


class Gateway:
    """The audited process: orders go in and answers come out, by number."""

    def __init__(self, engine: str, state: Path, **options: Any) -> None:
        self.state = state
        self.options = options
        self.url = ""
        self._command = [sys.executable, "-m", "tests.exactness.gateway", "--engine", engine, "--state", str(state)]
        for name, value in options.items():
            self._command += [f"--{name}", str(value)]
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._alive = asyncio.Event()

    async def start(self) -> None:
        self.state.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, cwd=CHECKOUT
            )
        assert self._process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            line = await self._process.stdout.readline()
        if not line:
            raise GatewayDiedError(f"the gateway does not start: {self.log.read_text()[-2000:]}")
        self.url = json.loads(line)["url"]
        self._reading = asyncio.create_task(self._read())
        self._alive.set()

    @property
    def log(self) -> Path:
        return self.state / "gateway.log"

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer = json.loads(line)
            waiting = self._waiting.pop(answer["number"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(GatewayDiedError("the gateway died"))
        self._waiting.clear()

    async def order(self, **what: Any) -> dict[str, Any]:
        """Return the answer to an order. Waits for a new gateway where one was killed; raises `GatewayDiedError`."""
        await self._alive.wait()
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"number": number, **what}).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError as error:
            self._waiting.pop(number, None)
            raise GatewayDiedError("the gateway died") from error
        return await future

    async def open(self, harness: str = "pi") -> Opened:
        answer = await self.order(open=harness)
        return Opened(answer["session"], answer["key"])

    async def kill(self) -> None:
        self._alive.clear()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading

    async def end(self) -> None:
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), 30)
            except TimeoutError:
                self._process.send_signal(signal.SIGKILL)
                await self._process.wait()
        await self._reading


@dataclass
class Stage:
    """An audit under way."""

    recorder: Recorder
    gateway: Gateway
    http: aiohttp.ClientSession
    """The connection of the clients to the gateway; each request has its own."""
    metrics: str
    """Where the engine tells its counters."""
    owners: dict[str, str] = field(default_factory=dict)
    """What clients asked -> their session."""
    opened: list[Opened] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    async def open(self, harness: str = "pi") -> Opened:
        session = await self.gateway.open(harness)
        self.opened.append(session)
        return session

    def asks(self, session: Opened) -> str:
        """Return a word that no other request has, to be put into a request of the session."""
        word = f"asked-{next(self._numbers)}-{session.session_id[:6]}"
        self.owners[word] = session.session_id
        return word

    async def close(self, *sessions: Opened) -> None:
        """End sessions, so that their episodes are written."""
        for session in sessions or tuple(self.opened):
            if session in self.opened:
                self.opened.remove(session)
                await self.gateway.order(close=session.session_id)

    async def kill(self) -> None:
        """Kill the gateway, and start another on its directory, which salvages the sessions."""
        self.recorder.kind = True  # the next gateway must be able to start
        killed = time.time()
        await self.gateway.kill()
        await asyncio.sleep(0)
        self.recorder.note(killed=round(killed, 4))
        self.opened.clear()
        await self.gateway.start()
        self.recorder.kind = False

    async def sampled(self) -> int:
        """Return how many tokens the engine says that it sampled since its start."""
        return await counter(self.http, self.metrics)

    def answers(self) -> list[Answer]:
        return read_recording(self.recorder.recording)

    def books(self) -> list[Books]:
        """Return the books of all sessions of the state directory."""
        found = []
        for directory in sorted((self.gateway.state / "sessions").iterdir()):
            episode = directory / "episode.json"
            told = json.loads(episode.read_text()) if episode.exists() else None
            found.append(read_books(directory / "calls.jsonl", told))
        return found

    def check(self) -> tuple[laws.Breaches, Counter[str]]:
        return laws.check(self.answers(), self.books(), self.owners)


async def counter(http: aiohttp.ClientSession, engine: str) -> int:
    """Return the engine's counter of sampled tokens."""
    async with http.get(f"{engine}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:generation_tokens_total"))


@asynccontextmanager
async def staged(engine: str, directory: Path, **options: Any) -> AsyncIterator[Stage]:
    """Run a recorder before the engine at this URL, and a gateway before the recorder."""
    directory.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(engine, directory / "recording.jsonl")
    await recorder.start()
    gateway = Gateway(recorder.url, directory / "state", **options)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    try:
        await gateway.start()
        try:
            async with aiohttp.ClientSession(connector=connector) as http:
                yield Stage(recorder, gateway, http, engine)
        finally:
            await gateway.end()
    finally:
        await recorder.close()
