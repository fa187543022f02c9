"""The ways in which a part of the service is killed with SIGKILL, each by name; what was killed is started again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from polar_gym.schema import Status
from tests.faults.processes import NODE_HEADERS, Process, Service
from tests.faults.sessions import RECEIVED

STAGES = (Status.INITIALIZING, Status.READY, Status.RUNNING, Status.BUILDING, Status.EVALUATING)
CAUGHT_SECONDS = 10.0
"""How long is looked for a session in the wanted stage, or for a process in a sandbox."""


@dataclass
class Killer:
    """Kills parts of a service, and keeps what there was to see when it did."""

    service: Service
    mark: str
    dice: random.Random
    engine_away_seconds: float
    receiver_away_seconds: float = 2.0
    done: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    """Kinds for which there was nothing to kill."""
    inside: list[float] = field(default_factory=list)
    """When something in a sandbox was killed, Unix time."""
    witnessed: set[str] = field(default_factory=set)
    """Nonces that harnesses had written down when their gateway was killed."""

    @property
    def kinds(self) -> dict[str, Callable[[], Awaitable[bool]]]:
        """Each returns whether there was something to kill."""
        gateways = {f"gateway in {stage}": self._gateway_in(stage) for stage in STAGES}
        return {
            **gateways,
            "server": lambda: self._restart(self.service.server),
            "harness": lambda: self._inside("python3"),
            "sandbox": lambda: self._inside("bwrap"),
            "engine": lambda: self._restart(self.service.engine, self.engine_away_seconds),
            "receiver": lambda: self._restart(self.service.receiver, self.receiver_away_seconds),
        }

    async def kill(self, kind: str) -> None:
        counted = self.done if await self.kinds[kind]() else self.missed
        counted[kind] += 1

    async def _restart(self, process: Process, away_seconds: float = 0.0) -> bool:
        await process.kill()
        await asyncio.sleep(away_seconds)
        await process.start()
        return True

    def _gateway_in(self, stage: Status) -> Callable[[], Awaitable[bool]]:
        async def kill() -> bool:
            nodes = self.dice.sample(self.service.nodes, len(self.service.nodes))
            deadline = time.monotonic() + CAUGHT_SECONDS
            async with aiohttp.ClientSession(headers=NODE_HEADERS) as http:
                while time.monotonic() < deadline:
                    for node in nodes:
                        if await _has(http, node, stage):
                            await node.kill()
                            self.witnessed |= witnessed(node)
                            await node.start()
                            return True
                    await asyncio.sleep(0.005)
            return False

        return kill

    async def _inside(self, program: str) -> bool:
        """Kill a harness, or the PID 1 of a sandbox."""
        deadline = time.monotonic() + CAUGHT_SECONDS
        while time.monotonic() < deadline:
            found = [pid for pid, argv in marked(self.mark) if Path(argv[0]).name == program and _is_inside(pid)]
            if found:
                self.inside.append(time.time())
                try:
                    os.kill(self.dice.choice(found), signal.SIGKILL)
                    return True
                except ProcessLookupError:
                    continue  # it has just ended
            await asyncio.sleep(0.02)
        return False


def witnessed(node: Process) -> set[str]:
    """What harnesses had received, as the sandboxes of a node that is not running hold it."""
    lines = [line for file in node.scratch.glob(f"*/tmp/{RECEIVED}") for line in file.read_text().splitlines()]
    return {line.split()[1] for line in lines}


def marked(mark: str) -> Iterator[tuple[int, list[str]]]:
    """Processes with this in their command line, but for this one's own."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                argv = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # it has ended
                continue
            if any(mark in argument for argument in argv):
                yield int(path.name), argv


def _is_inside(pid: int) -> bool:
    """Whether it is in a PID namespace of its own: `bwrap` is there twice, outside and as the sandbox's PID 1."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    depth = next((len(line.split()) - 1 for line in lines if line.startswith("NSpid:")), 1)
    return depth > _own_depth()


def _own_depth() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(len(line.split()) - 1 for line in lines if line.startswith("NSpid:"))


async def _has(http: aiohttp.ClientSession, node: Process, stage: Status) -> bool:
    try:
        async with http.get(f"{node.url}/v1/sessions") as response:
            return any(session["status"] == stage for session in await response.json())
    except aiohttp.ClientError:
        return False
