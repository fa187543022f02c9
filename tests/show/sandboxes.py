"""Start and stop two hundred sandboxes of each runtime, and kill the gateways of some: `make show-sandboxes`.

Most sandboxes are started, run one command and are stopped, eight at a time. Two gateways are killed with SIGKILL: the
first when all of its sandboxes run a command, the second when half of them do. Their sandboxes are then reaped. Every
process, mount, control group, directory and container of a sandbox carries its session's id, so the program finds
by name each one that is left on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
from rich.console import Console
from rich.table import Table

from polar_gym.runtimes import Command, Runtime, Sandbox
from polar_gym.runtimes.docker.sandbox import SESSION_LABEL
from tests.lifecycle.runtime_kinds import gateway, make, started
from tests.show.result import Result, make_parser, parse
from tests.support import apptainer
from tests.support.docker_daemon import own_daemon, running_daemon

KINDS = ("docker", "apptainer", "bubblewrap")
(NOTHING_LEFT,) = LAWS = ("nothing of any sandbox is left",)
AT_ONCE = 8
HELD = 30
"""Sandboxes of each gateway that is killed."""
COLUMNS = ("runtime", "sandboxes", "per second", "start (s)", "stop (s)", "MiB each", "killed with", "reaped", "left")


@dataclass(kw_only=True)
class Shown:
    kind: str
    count: int
    seconds: float = 0.0
    starts: list[float] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)
    mebibytes: float = 0.0
    held: list[int] = field(default_factory=list)
    """How many sandboxes ran a command when their gateway was killed."""
    reaped: int = 0
    left: dict[str, list[str]] = field(default_factory=dict)

    def row(self) -> list[str]:
        left = "\n".join(f"{len(names)} {what}" for what, names in self.left.items() if names)
        return [
            self.kind,
            str(self.count + len(self.held) * HELD),
            f"{self.count / self.seconds:.1f}",
            f"{statistics.median(self.starts):.2f}",
            f"{statistics.median(self.stops):.2f}",
            f"{self.mebibytes:.1f}",
            ", ".join(f"{up} of {HELD} running" for up in self.held),
            str(self.reaped),
            left or "nothing",
        ]


async def show(kind: str, options: dict[str, Any], count: int) -> Shown:
    """Start `count` sandboxes in all, and look for what is left of them."""
    prefix = f"shown{secrets.token_hex(4)}"
    shown = Shown(kind=kind, count=count - 2 * HELD)
    runtime: Runtime = make(kind, **options)
    places, begun = asyncio.Semaphore(AT_ONCE), time.monotonic()
    await asyncio.gather(*(_come_and_go(runtime, f"{prefix}-{n}", places, shown) for n in range(shown.count)))
    shown.seconds = time.monotonic() - begun
    for number, enough in enumerate((HELD, HELD // 2)):
        sessions = [f"{prefix}-{number}-held{n}" for n in range(HELD)]
        await _kill_a_gateway(kind, options, sessions, enough, shown)
        while reaped := await runtime.reap(sessions):  # again, for containers that the daemon was still making
            shown.reaped += reaped
    shown.left = _left(prefix, options)
    await runtime.close()
    return shown


async def _come_and_go(runtime: Runtime, session_id: str, places: asyncio.Semaphore, shown: Shown) -> None:
    async with places:
        begun = time.monotonic()
        async with started(runtime, session_id=session_id, serve=gateway("hello")) as sandbox:
            shown.starts.append(time.monotonic() - begun)
            assert (await sandbox.exec(Command(argv=["true"]))).exit_code == 0
            begun = time.monotonic()
        shown.stops.append(time.monotonic() - begun)


async def _kill_a_gateway(
    kind: str, options: dict[str, Any], sessions: Sequence[str], enough: int, shown: Shown
) -> None:
    """Start a process with these sandboxes; once enough of them run their command, kill it."""
    seconds = f"{1000 + secrets.randbelow(1000)}.{secrets.randbelow(10**9):09}"
    argument = json.dumps([kind, options, sessions, seconds])
    victim = await asyncio.create_subprocess_exec(sys.executable, "-m", __spec__.name, "--hold", argument)
    try:
        while (up := await asyncio.to_thread(_running, seconds)) < enough:
            assert victim.returncode is None, "the gateway ended by itself"
            await asyncio.sleep(0.05)
        if enough == len(sessions):
            shown.mebibytes = await asyncio.to_thread(_memory, _marks(sessions[0].rpartition("-")[0], options)) / up
    finally:
        victim.kill()
        await victim.wait()
    shown.held.append(up)


async def hold(kind: str, options: dict[str, Any], sessions: Sequence[str], seconds: str) -> None:
    """Run the gateway that will be killed: start the sandboxes, and have each run a command."""
    runtime: Runtime = make(kind, **options)
    places = asyncio.Semaphore(AT_ONCE)

    async def one(session_id: str) -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with places:
                context = started(runtime, session_id=session_id, serve=gateway("hello"))
                sandbox: Sandbox = await stack.enter_async_context(context)
            await sandbox.exec(Command(argv=["sleep", seconds], timeout_seconds=3600))

    await asyncio.gather(*map(one, sessions))


def _running(seconds: str) -> int:
    """Return how many sandboxes run their command."""
    return sum(words[:2] == ["sleep", seconds] for words in (_words(process, "cmdline") for process in _processes()))


def _left(prefix: str, options: dict[str, Any]) -> dict[str, list[str]]:
    """Return everything that still carries the sessions' ids."""
    deadline = time.monotonic() + 10  # the kernel and containerd need a moment to remove dead processes
    while (found := _find(prefix, options)) and any(found.values()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _find(prefix: str, options: dict[str, Any]) -> dict[str, list[str]]:
    marks = _marks(prefix, options)
    mounts = Path("/proc/mounts").read_text().splitlines()
    return {
        "containers": marks[1:],
        "processes": [process.name for process in _processes() if _carries(process, marks)],
        "mounts": [mount for mount in mounts if any(mark in mount for mark in marks)],
        "control groups": [str(path) for mark in marks for path in Path("/sys/fs/cgroup").glob(f"*/*{mark}*")],
        "directories": [str(path) for path in Path(options["scratch"]).iterdir()],
    }


def _marks(prefix: str, options: dict[str, Any]) -> list[str]:
    """Return the text that sandboxes of these sessions carry: the prefix of the ids, and the containers' ids."""
    if "host" not in options:
        return [prefix]
    with contextlib.closing(docker.DockerClient(base_url=options["host"])) as client:
        containers = client.api.containers(all=True, filters={"label": SESSION_LABEL})
    return [prefix, *(each["Id"] for each in containers if each["Labels"][SESSION_LABEL].startswith(prefix))]


def _memory(marks: Sequence[str]) -> float:
    """Return the memory (PSS, in MiB) of the sandboxes' processes and of the processes that watch over them."""
    kibibytes = 0
    for process in _processes():
        if _carries(process, marks):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                lines = (process / "smaps_rollup").read_text().splitlines()
                kibibytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kibibytes / 1024


def _carries(process: Path, marks: Sequence[str]) -> bool:
    said = " ".join([*_words(process, "cmdline"), *_words(process, "environ"), *_words(process, "cgroup")])
    return "--hold" not in said and any(mark in said for mark in marks)


def _processes() -> Iterator[Path]:
    own = str(os.getpid())
    return (path for path in Path("/proc").iterdir() if path.name.isdigit() and path.name != own)


def _words(process: Path, file: str) -> list[str]:
    try:
        return (process / file).read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or the machine's own init
        return []


async def show_all(options: argparse.Namespace, result: Result) -> Table:
    """Show one runtime after the other."""
    table = Table(*COLUMNS, title="Sandboxes, and what is left of them", show_lines=True)
    with contextlib.ExitStack() as stack:
        for kind in options.runtime:
            scratch = tempfile.mkdtemp(prefix="pg-", dir="/tmp")
            stack.callback(shutil.rmtree, scratch)
            settings: dict[str, Any] = {"scratch": scratch}
            if kind == "docker":
                settings["host"] = running_daemon() or stack.enter_context(own_daemon())
            elif kind == "apptainer":
                settings["program"] = apptainer.program()
            shown = await show(kind, settings, options.count)
            table.add_row(*shown.row())
            result.figures[kind] = dict(zip(COLUMNS, shown.row(), strict=True))
            result.check(NOTHING_LEFT, [f"{kind}: {what}: {names}" for what, names in shown.left.items() if names])
    return table


def main() -> int:
    parser = make_parser("sandboxes", __doc__, quick="docker, apptainer, and most sandboxes whose gateway lives on")
    parser.add_argument("--runtime", action="append", choices=KINDS, help="only this one; may be given repeatedly")
    parser.add_argument("--count", type=int, default=200, help="sandboxes of each runtime")
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    parser.set_defaults(runtime=KINDS)
    options = parse(parser, quick={"runtime": ["bubblewrap"], "count": 80})
    if options.hold:
        asyncio.run(hold(*json.loads(options.hold)))
        return 0
    if options.count <= 2 * HELD:
        parser.error(f"--count={options.count}: {2 * HELD} of them belong to gateways that are killed; give more")
    result = Result("sandboxes", LAWS, options)
    Console(width=120).print(asyncio.run(show_all(options, result)))
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
