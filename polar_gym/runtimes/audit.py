"""Tries in real sandboxes what an attacker would try, and says which guarantees hold on this machine.

`in_sandbox/probe.py` runs in two sandboxes side by side, because some guarantees are about other sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import secrets
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polar_gym.runtimes import HOME, RUNTIMES, Command, Runtime, Sandbox, SandboxError, SandboxRequest, agent
from polar_gym.runtimes.kernel.syscalls import AF_ALG, AF_VSOCK, DENIED, MACHINES
from polar_gym.schema import PluginSpec, RuntimeSpec

LIMITS = {"memory_mb": 192, "pids": 64, "disk_mb": 64, "file_mb": 64}
"""The options of a runtime for an audit: limits that a probe reaches quickly."""

PROBE = (Path(__file__).parent / "in_sandbox" / "probe.py").read_bytes()
PROBE_SECONDS = 120
SECRET = "POLAR_GYM_AUDIT"
PLACES = ("/tmp", HOME, "/", "/etc", "/opt", "/usr", "/var", "/var/tmp", "/run/lock", "/dev/shm", "/dev/mqueue")
CLONE_NEWUSER, ADDR_NO_RANDOMIZE = 0x10000000, 0x40000


@dataclass(frozen=True, slots=True)
class Finding:
    """How far one guarantee holds, and what was found."""

    verdict: Literal["holds", "lower", "fails"]
    found: str = ""


@dataclass(frozen=True, slots=True)
class Guarantee:
    """One promise of a sandbox, for which the probe has a function of its name."""

    name: str
    why: str
    """The damage where the promise is broken."""
    docker: Finding = Finding("holds")
    """The promise in a container that `docker run` starts without any option, as root."""
    weaker: Collection[str] = ()
    """What may be found and only weakens the promise; all else breaks the promise."""

    def judge(self, found: Collection[str]) -> Finding:
        broken = {*found} - {*self.weaker}
        return Finding("fails" if broken else "lower" if found else "holds", "; ".join(found))


NO_LIMIT = Finding("fails", "no limit")
ONE_UID = "one for all sandboxes"
ONE_USER = "limits are one user's"
"""Outside of the machine's own user namespace, the kernel counts what each uid uses for the owner too."""

GUARANTEES = (
    Guarantee("system calls", "a hole in a rare call gives the machine", Finding("holds", "all but chroot, AF_PACKET")),
    Guarantee("namespaces", "a part of the machine is shared"),
    Guarantee("uid", "the kernel keeps keys and limits for a uid", Finding("fails", "0"), [ONE_UID, ONE_USER]),
    Guarantee("rights", "a hole in a setuid program is enough", Finding("fails", "14 of root's")),
    Guarantee("leftovers", "a session gives hidden tests to a later one"),
    Guarantee("secrets", "keys and other sessions are seen", weaker={*agent.HIDDEN} - {"/proc/kcore"}),
    Guarantee("devices", "disks and the kernel's log are read"),
    Guarantee("kernel settings", "core_pattern alone makes a sandbox the machine's root"),
    Guarantee("network", "solutions are looked up, machines attacked", Finding("fails", "other machines")),
    Guarantee("memory", "one session kills others", NO_LIMIT, ["each process alone"]),
    Guarantee("processes", "one session stops others", NO_LIMIT),
    Guarantee("disk", "one session stops others", NO_LIMIT, ["each file alone"]),
    Guarantee("shared memory", "honest solutions fail"),
)
"""Docker's are read in moby at 23f2c12 (`daemon/pkg/oci/defaults.go`) and moby/profiles at 3c28324."""


def worse_than_docker(findings: Mapping[str, Finding]) -> list[Guarantee]:
    """Return the guarantees that fail here, and hold in Docker's default."""
    return [each for each in GUARANTEES if findings[each.name].verdict == "fails" and each.docker.verdict == "holds"]


def make(name: str) -> Runtime:
    """Return the runtime with those of `LIMITS` that it has as options. Raises `UnknownNameError`."""
    options = {key: value for key, value in LIMITS.items() if key in RUNTIMES.accepted(name).model_fields}
    return RUNTIMES.make(PluginSpec.model_validate({"name": name, **options}))


async def audit(runtime: Runtime) -> dict[str, Finding]:
    """Return guarantee -> finding, for a runtime that `make` made, and close the runtime. Raises `SandboxError`."""
    request = SandboxRequest(session_id="audit", spec=RuntimeSpec(name="audit"), workspace=None, serve=_serve)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runtime.close)
        if missing := await asyncio.to_thread(runtime.check):
            raise SandboxError(", ".join(missing))
        os.environ[SECRET] = mark = f"polar-gym-{secrets.token_hex(8)}"
        stack.callback(os.environ.pop, SECRET)
        links = {name: str(Path("/proc/self/ns", name).readlink()) for name in ("ipc", "mnt", "net", "pid", "uts")}
        facts = {"mark": mark, "namespaces": links, "calls": _calls()}
        facts |= {"limits": LIMITS, "hidden": agent.HIDDEN, "places": PLACES}
        first = await runtime.start(request)
        stack.push_async_callback(first.stop)
        second = await runtime.start(request)
        stack.push_async_callback(second.stop)
        other = await _probe(first, facts | {"guarantees": ["leftovers", "uid"]})
        found = await _probe(second, facts | {"guarantees": [each.name for each in GUARANTEES]})
    uid, uid_map = found["uid"]
    shared = [ONE_UID] if found["uid"] == other["uid"] else [ONE_USER] if uid_map != f"0 0 {2**32 - 1}" else []
    found["uid"] = ["0"] if uid == "0" else shared
    return {each.name: each.judge(found[each.name]) for each in GUARANTEES}


async def _probe(sandbox: Sandbox, asked: Mapping[str, Any]) -> dict[str, list[str]]:
    argv = ["python3", "-I", "-", json.dumps(asked)]
    done = await sandbox.exec(Command(argv=argv, stdin=PROBE, timeout_seconds=PROBE_SECONDS))
    if done.exit_code != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise SandboxError(f"the probes, which need python3 in the sandbox, ended with {done.exit_code}: {said}")
    return json.loads(done.stdout)


def _calls() -> list[tuple[str, int, list[int]]]:
    """Return the calls that Docker denies, with arguments to try them with. Raises `SandboxError`."""
    if (machine := MACHINES.get(platform.machine())) is None:
        raise SandboxError(f"the probes know no system calls of {platform.machine()}, only of {', '.join(MACHINES)}")
    numbers = {name: each[machine.column] for name, each in DENIED.items()}
    return [
        *((name, number, [2**64 - 1] * 6) for name, number in numbers.items() if number is not None),
        ("clone(CLONE_NEWUSER)", machine.clone, [CLONE_NEWUSER, 0, 0, 0, 0]),
        ("personality(ADDR_NO_RANDOMIZE)", machine.personality, [ADDR_NO_RANDOMIZE]),
        ("socket(AF_ALG)", machine.socket, [AF_ALG, socket.SOCK_SEQPACKET, 0]),
        ("socket(AF_PACKET)", machine.socket, [socket.AF_PACKET, socket.SOCK_RAW, 0]),
        ("socket(AF_VSOCK)", machine.socket, [AF_VSOCK, socket.SOCK_STREAM, 0]),
    ]


async def _serve(listener: socket.socket) -> asyncio.Server:
    """Stand in for the gateway: take connections, and close them."""
    start = asyncio.start_unix_server if listener.family == socket.AF_UNIX else asyncio.start_server
    return await start(lambda _, writer: writer.close(), sock=listener)
