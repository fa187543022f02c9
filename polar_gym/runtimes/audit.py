"""Tries in real sandboxes what an attacker would try, and says which guarantees hold on this machine.

`in_sandbox/probe.py` runs in two sandboxes side by side, because some guarantees are about other sandboxes. The machine
holds out bait that no sandbox may reach: a file, a secret in the gateway's environment, and listening sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from polar_gym.runtimes import HOME, RUNTIMES, Command, Runtime, Sandbox, SandboxError, SandboxRequest
from polar_gym.runtimes.kernel.syscalls import AF_ALG, AF_VSOCK, DENIED, MACHINES
from polar_gym.schema import PluginSpec, RuntimeSpec

LIMITS = {"memory_mb": 192, "pids": 64, "disk_mb": 64, "file_mb": 64}
"""The options of a runtime for an audit: limits that a probe reaches quickly."""

PROBE = (Path(__file__).parent / "in_sandbox" / "probe.py").read_bytes()
PROBE_SECONDS = 120
ORPHAN, ORPHAN_SECONDS = "sleep 300; exit", 20
SECRET = "POLAR_GYM_AUDIT"
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
SYSTEM = ("/", "/etc", "/opt", "/usr", "/usr/bin", "/usr/lib", "/var")
CLONE_NEWUSER, ADDR_NO_RANDOMIZE = 0x10000000, 0x40000

Answer = tuple[Sequence[str], Sequence[str], str]
"""What breaks a guarantee, what weakens the guarantee, and the words for an unbroken one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """How far one guarantee holds, and what was found."""

    verdict: Literal["holds", "lower", "fails"]
    found: str


@dataclass(frozen=True, slots=True)
class Guarantee:
    """One promise of a sandbox. The probe has a function of its name, unless the machine's side checks it."""

    name: str
    why: str
    """The damage where the promise is broken."""
    docker: Finding
    """The promise in a container that `docker run` starts without any option, as root."""


GUARANTEES = (
    Guarantee(
        "system calls",
        "a hole in a rare call gives the machine",
        Finding("holds", "all but root's chroot and AF_PACKET"),
    ),
    Guarantee("namespaces", "a part of the machine is shared", Finding("holds", "shared with the machine: user")),
    Guarantee("user", "what the kernel keeps for a uid is everyone's", Finding("fails", "root on the machine")),
    Guarantee("rights", "a hole in the kernel or in a setuid program is enough", Finding("fails", "14 of root's")),
    Guarantee("other processes", "one without a filter makes calls for others", Finding("holds", "its own only")),
    Guarantee("leftovers", "a session gives hidden tests to a later one", Finding("holds", "none")),
    Guarantee("system files", "a session changes the tools that grade", Finding("lower", "writable copies")),
    Guarantee("machine secrets", "keys and passwords are read", Finding("holds", "not seen")),
    Guarantee("kernel secrets", "they tell of the machine and other sessions", Finding("holds", "hidden")),
    Guarantee("devices", "disks and the kernel's log are read", Finding("holds", "all harmless")),
    Guarantee(
        "kernel settings", "core_pattern alone makes a sandbox the machine's root", Finding("holds", "read-only")
    ),
    Guarantee("network", "solutions are looked up, machines attacked", Finding("fails", "a route to other machines")),
    Guarantee("memory", "one session kills others", Finding("fails", "no limit")),
    Guarantee("processes", "one session stops others", Finding("fails", "no limit")),
    Guarantee("disk", "one session stops others", Finding("fails", "no limit")),
    Guarantee("core dumps", "the machine's handler reads a forged crash", Finding("lower", "the machine's handler")),
    Guarantee("shared memory", "honest solutions fail", Finding("holds", "multiprocessing works; 64 MiB")),
    Guarantee("time limit", "what a command leaves behind changes the grading", Finding("fails", "there is none")),
)
"""Docker's are read in moby at 23f2c12 (`daemon/pkg/oci/defaults.go`) and moby/profiles at 3c28324."""


def judge(answer: Answer) -> Finding:
    broken, weakened, words = answer
    if broken:
        return Finding("fails", "; ".join(broken))
    return Finding("lower", "; ".join(weakened)) if weakened else Finding("holds", words)


def worse_than_docker(findings: Mapping[str, Finding]) -> list[Guarantee]:
    """Return the guarantees that fail here, and hold in Docker's default."""
    return [each for each in GUARANTEES if findings[each.name].verdict == "fails" and each.docker.verdict == "holds"]


def make(name: str) -> Runtime:
    """Return the runtime with those of `LIMITS` that it has as options. Raises `UnknownNameError`."""
    options = {key: value for key, value in LIMITS.items() if key in RUNTIMES.accepted(name).model_fields}
    return RUNTIMES.make(PluginSpec.model_validate({"name": name, **options}))


async def audit(runtime: Runtime) -> dict[str, Finding]:
    """Return guarantee -> finding, for a runtime that `make` made. Raises `SandboxError`."""
    mark = f"polar-gym-{secrets.token_hex(8)}"
    with _bait(mark) as bait:
        async with _started(runtime, f"{mark}-1") as first, _started(runtime, f"{mark}-2") as second:
            uids = [await _orphan(sandbox, mark) for sandbox in (first, second)]
            answers = {"user": _user(*uids), "time limit": _time_limit(mark)}
            await _probe(first, ["leftovers"], bait)
            answers |= await _probe(second, [each.name for each in GUARANTEES if each.name not in answers], bait)
    return {each.name: judge(answers[each.name]) for each in GUARANTEES}


def _user(other: int | None, own: int | None) -> Answer:
    if own is None:
        return [], ["its processes are not seen from here"], ""
    if own == 0:
        return ["root on the machine"], [], ""
    whose = "the gateway's" if own == os.geteuid() else "of all sandboxes" if own == other else "its own"
    return [], [f"uid {own}, {whose}"] if whose != "its own" else [], f"uid {own}, its own"


def _time_limit(mark: str) -> Answer:
    return ["a process outlives its command"] if _orphans(mark) else [], [], "it ends all processes"


async def _orphan(sandbox: Sandbox, mark: str) -> int | None:
    """Run a command whose child leaves its session, and end the command; return the child's uid on the machine."""
    end = asyncio.Event()
    argv = ["sh", "-c", f"setsid sh -c '{ORPHAN}' \"$0\" & wait", mark]
    running = asyncio.create_task(sandbox.exec(Command(argv=argv, end=end, timeout_seconds=ORPHAN_SECONDS)))
    uids: list[int] = []
    while not uids and not running.done():
        await asyncio.sleep(0.01)
        uids = _orphans(mark)
    end.set()
    await running
    return next(iter(uids), None)


def _orphans(mark: str) -> list[int]:
    """Return the uid on the machine of each child that `_orphan` left."""
    uids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (process / "cmdline").read_bytes() == "\0".join(("sh", "-c", ORPHAN, mark, "")).encode():
                uids.append(int((process / "status").read_text().partition("\nUid:")[2].split()[0]))
    return uids


async def _probe(sandbox: Sandbox, guarantees: Sequence[str], bait: dict[str, Any]) -> dict[str, Answer]:
    asked = {**bait, "guarantees": guarantees, "gateway": ["127.0.0.1", urlsplit(sandbox.base_url).port]}
    argv = ["python3", "-I", "-", json.dumps(asked)]
    done = await sandbox.exec(Command(argv=argv, stdin=PROBE, timeout_seconds=PROBE_SECONDS))
    if done.exit_code != 0:
        raise SandboxError(
            f"the probes, which need python3 in the sandbox, ended with {done.exit_code}: "
            f"{done.stderr.decode(errors='replace').strip()}"
        )
    return json.loads(done.stdout)


@contextlib.contextmanager
def _bait(mark: str) -> Iterator[dict[str, Any]]:
    """Hold out what no sandbox may reach; give the facts that the probe needs. Raises `SandboxError`."""
    numbers, calls = _calls()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polar-gym-")))
        directory.chmod(0o755)
        (directory / "bait").touch(0o644)
        network = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(f"\0{mark}")
        local.listen()
        os.environ[SECRET] = secret = secrets.token_hex(16)
        stack.callback(os.environ.pop, SECRET)
        yield {
            **{"mark": mark, "secret": secret, "file": str(directory / "bait"), "limits": LIMITS},
            **{"calls": calls, "numbers": numbers, "writable": ["/tmp", HOME], "system": SYSTEM},
            "targets": [["127.0.0.1", network.getsockname()[1]], ["169.254.169.254", 80], f"\0{mark}"],
            "namespaces": {name: str(Path("/proc/self/ns", name).readlink()) for name in NAMESPACES},
        }


def _calls() -> tuple[dict[str, int], list[tuple[str, int, list[int]]]]:
    """Return the numbers of the calls that Docker denies, and calls to try: label, number, arguments.

    Raises `SandboxError`.
    """
    if (machine := MACHINES.get(platform.machine())) is None:
        raise SandboxError(f"the probes know no system calls of {platform.machine()}, only of {', '.join(MACHINES)}")
    found = {name: numbers[machine.column] for name, numbers in DENIED.items()}
    denied = {name: number for name, number in found.items() if number is not None}
    return denied, [
        *((name, number, [2**64 - 1] * 6) for name, number in denied.items()),
        ("clone(CLONE_NEWUSER)", machine.clone, [CLONE_NEWUSER, 0, 0, 0, 0]),
        ("personality(ADDR_NO_RANDOMIZE)", machine.personality, [ADDR_NO_RANDOMIZE]),
        ("socket(AF_ALG)", machine.socket, [AF_ALG, socket.SOCK_SEQPACKET, 0]),
        ("socket(AF_PACKET)", machine.socket, [socket.AF_PACKET, socket.SOCK_RAW, 0]),
        ("socket(AF_VSOCK)", machine.socket, [AF_VSOCK, socket.SOCK_STREAM, 0]),
    ]


@contextlib.asynccontextmanager
async def _started(runtime: Runtime, session_id: str) -> AsyncIterator[Sandbox]:
    spec = RuntimeSpec(name="audit")
    sandbox = await runtime.start(SandboxRequest(session_id=session_id, spec=spec, workspace=None, serve=_serve))
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def _serve(listener: socket.socket) -> asyncio.Server:
    """Stand in for the gateway: take connections, and close them."""
    start = asyncio.start_unix_server if listener.family == socket.AF_UNIX else asyncio.start_server
    return await start(lambda _, writer: writer.close(), sock=listener)
