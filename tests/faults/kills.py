"""The kinds of kills with SIGKILL, each by name. A killed part of the service is started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import docker
from docker import errors

from polar_gym.runtimes.docker.sandbox import SESSION_LABEL
from polar_gym.schema import Status
from tests.faults.processes import NODE_HEADERS, Process, Service
from tests.faults.sessions import RECEIVED

STAGES = (Status.INITIALIZING, Status.READY, Status.RUNNING, Status.BUILDING, Status.EVALUATING)
CAUGHT_SECONDS = 60.0
"""How long is looked for a session in the wanted stage, or for a process in a sandbox."""

CONTAINER = re.compile("[0-9a-f]{64}")
"""A container's id, in the name of its control group."""


@dataclass
class Killer:
    """Kills parts of a service, and keeps the evidence that was visible at the moment of each kill."""

    service: Service
    mark: str
    dice: random.Random
    engine_away_seconds: float
    receiver_away_seconds: float
    gateway_away_seconds: Sequence[float] = (0.0,)
    """One of these is drawn each time: longer than the lease, and the server counts the node as dead."""
    docker_host: str | None = None
    """Of the daemon whose containers are the sandboxes; None: they are bubblewrap's."""
    done: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    """Kinds for which there was nothing to kill."""
    witnessed: set[str] = field(default_factory=set)
    """Nonces that harnesses had written down when their gateway was killed."""

    @property
    def kinds(self) -> dict[str, Callable[[], Awaitable[bool]]]:
        """Return the kinds of kills. Each kill returns whether there was something to kill."""
        gateways = {f"gateway in {stage}": self._gateway_in(stage) for stage in STAGES}
        return {
            **gateways,
            "server": lambda: self._restart(self.service.server),
            "server and gateways at once": self._all_of_ours,
            "harness": lambda: self._inside("python3"),
            "sandbox": lambda: self._inside("bwrap") if self.docker_host is None else self._container(),
            "engine": lambda: self._restart(self.service.engine, self.engine_away_seconds),
            "receiver": lambda: self._restart(self.service.receiver, self.receiver_away_seconds),
        }

    async def kill(self, kind: str) -> bool:
        found = await self.kinds[kind]()
        (self.done if found else self.missed)[kind] += 1
        return found

    async def _restart(self, process: Process, away_seconds: float = 0.0) -> bool:
        await process.kill()
        await asyncio.sleep(away_seconds)
        await process.start()
        return True

    async def _all_of_ours(self) -> bool:
        service = self.service
        await asyncio.gather(service.server.kill(), *(node.kill() for node in service.nodes))
        for node in service.nodes:
            self.witnessed |= witnessed(node, self.mark)
        await asyncio.gather(service.server.start(), *(node.start() for node in service.nodes))
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
                            self.witnessed |= witnessed(node, self.mark)
                            await asyncio.sleep(self.dice.choice(self.gateway_away_seconds))
                            await node.start()
                            return True
                    await asyncio.sleep(0.005)
            return False

        return kill

    async def _container(self) -> bool:
        """Kill the container in which something of ours runs."""
        deadline = time.monotonic() + CAUGHT_SECONDS
        while time.monotonic() < deadline:
            for pid, _ in marked(self.mark):
                with contextlib.suppress(OSError, errors.APIError, StopIteration):  # it has just ended
                    found = next(CONTAINER.finditer(Path(f"/proc/{pid}/cgroup").read_text()))
                    await asyncio.to_thread(_kill_container, str(self.docker_host), found[0])
                    return True
            await asyncio.sleep(0.02)
        return False

    async def _inside(self, program: str) -> bool:
        """Kill a harness, or the PID 1 of a sandbox."""
        deadline = time.monotonic() + CAUGHT_SECONDS
        while time.monotonic() < deadline:
            found = [pid for pid, argv in marked(self.mark) if Path(argv[0]).name == program and _is_inside(pid)]
            if found:
                try:
                    os.kill(self.dice.choice(found), signal.SIGKILL)
                    return True
                except ProcessLookupError:
                    continue  # it has just ended
            await asyncio.sleep(0.02)
        return False


def witnessed(node: Process, mark: str) -> set[str]:
    """Return the nonces that harnesses had received, as the sandboxes of a node that is not running hold them.

    Harnesses that have outlived the node in a container are read too.
    """
    files = [*node.scratch.glob(f"*/tmp/{RECEIVED}")]
    files += [Path(f"/proc/{pid}/root/tmp/{RECEIVED}") for pid, _ in marked(mark)]
    found = set[str]()
    for file in files:
        with contextlib.suppress(OSError):  # it was no harness, or has ended
            found |= {line.split()[1] for line in file.read_text().splitlines() if line.count(" ") == 1}
    return found


def containers(host: str | None, session_ids: Collection[str]) -> list[str]:
    """Return the containers of these sessions that a daemon has, running or not."""
    if host is None:
        return []
    with contextlib.closing(docker.DockerClient(base_url=host)) as client:
        found = client.api.containers(all=True, filters={"label": SESSION_LABEL})
    return [each["Id"] for each in found if each["Labels"][SESSION_LABEL].rpartition(".")[0] in session_ids]


def marked(mark: str) -> Iterator[tuple[int, list[str]]]:
    """Return the processes with this mark in their command line, except this process."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                argv = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # it has ended
                continue
            if any(mark in argument for argument in argv):
                yield int(path.name), argv


def _kill_container(host: str, container: str) -> None:
    with contextlib.closing(docker.DockerClient(base_url=host)) as client:
        client.api.kill(container, signal="SIGKILL")


def _is_inside(pid: int) -> bool:
    """Return whether a process is in a PID namespace of its own. `bwrap` runs outside and as the sandbox's PID 1."""
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
