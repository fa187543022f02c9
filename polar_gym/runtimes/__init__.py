"""Runtimes: where a harness runs. A runtime starts sandboxes, which are kept apart from the machine and its network.

A plug-in is one module or package here that defines a class `RUNTIME`, a `Runtime`: `docker`, `apptainer`,
`bubblewrap`, and `auto`, which chooses one of them. `RUNTIME.Options` are its options, `limits.LimitOptions` or more;
`RUNTIME(options)` makes the runtime. A runtime starts a `Sandbox`, which runs commands and stops. Nothing else is asked
of a runtime: files go in and out through commands (`files`), and so does the difference that an agent made
(`workspaces.diff`).

A sandbox reaches nothing but the gateway: it has a network namespace of its own, in which one listening socket, made by
the runtime and served by the gateway, is all that there is. A task may ask for less (`network: none`) or for more
(`full`).

Used by the runtimes:

- `kernel`: what Linux offers to keep a sandbox apart.
- `agent`: the user in a sandbox, and the parts of the machine that this user may see.
- `limits`: the options that every runtime takes.
- `sandbox_files`, `scratch_directory`: what a sandbox keeps on the gateway's machine.
- `glibc`, `skeleton`, `image_names`: what an image lacks, an image without a registry, and the names of images.
- `time_limit`, `output`: the end of a command, and what it printed.

Used by other rooms too: `files`, `tar`, `processes` and `threads`. The room uses `registry`, `schema` and `paths`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from polar_gym.registry import Makers
from polar_gym.schema import RuntimeSpec

GATEWAY_PORT = 8080
"""The gateway's port on the sandbox's own 127.0.0.1."""

HOME = "/home/agent"
"""The agent's home directory inside a sandbox: writable, empty at the start, kept between commands."""

TOOLCHAIN = "/opt/polar-gym"
"""Where read-only harness toolchains are mounted inside a sandbox."""

NODE = f"{TOOLCHAIN}/bin/node"
"""The toolchain's node, where the harness is a program for it."""

Serve = Callable[[socket.socket], Awaitable[asyncio.Server]]
"""Given a listening socket inside a sandbox's network namespace, start to serve the session's gateway on it."""


class SandboxError(Exception):
    """A sandbox could not be started or used, through no fault of the agent. The message says what to do about it."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory or file of the gateway's machine, read-only inside the sandbox."""

    host: Path
    inside: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRequest:
    """What one sandbox must offer."""

    session_id: str
    """Labels the sandbox, so that orphans can be found."""
    node: str = ""
    """The gateway node that asks; a label too."""
    spec: RuntimeSpec
    workspace: Path | None
    """A directory on the gateway's machine that the sandbox sees a writable copy of, at `spec.workspace.path`. It must
    not change while the sandbox lives, because the copy may be made on write. None: what the image has there, if there
    is an image and it has something there, else an empty directory."""
    mounts: Sequence[Mount] = ()
    serve: Serve | None = None
    """None: no gateway (grading)."""

    @property
    def served(self) -> Serve | None:
        """How the gateway comes in; None where the sandbox has none."""
        return None if self.spec.network == "none" else self.serve


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command inside a sandbox ended."""

    exit_code: int | None
    """None when it was killed by its time limit."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to run inside a sandbox."""

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    """Default: the workspace."""
    stdin: bytes = b""
    """Always closed after these bytes: several harnesses wait for ever on an open pipe."""
    timeout_seconds: float = 60.0
    end: asyncio.Event | None = None
    """Once it is set, the command ends as at its time limit: for who has more reasons to end it than the time."""
    output_limit: int = 8 * 1024 * 1024
    """Bytes of stdout and of stderr that are kept: the first half and the last half of what is longer."""


class Sandbox(Protocol):
    """A running sandbox."""

    base_url: str
    """Where the harness reaches the gateway."""

    async def exec(self, command: Command) -> ExecResult:
        """Run a command to its end. At its time limit every process that it started is killed. Cancelling does the
        same. Raises `SandboxError` when the sandbox is gone."""
        ...

    async def stop(self) -> None:
        """Kill all processes and remove every trace of the sandbox from the machine. May be called twice."""
        ...


class Runtime(Protocol):
    """Starts sandboxes of one kind."""

    def check(self) -> list[str]:
        """What is missing on this machine, each with the command that installs it; empty when all is there. Blocks."""
        ...

    def caveats(self) -> list[str]:
        """What this machine does not let the runtime keep of its promises (a limit, a copy on write). Blocks."""
        ...

    async def prepare(self, images: Collection[str]) -> None:
        """Have these images on this machine before the first sandbox asks for one. Raises `SandboxError`."""
        ...

    async def start(self, request: SandboxRequest) -> Sandbox:
        """Raises `SandboxError`."""
        ...

    async def reap(self, session_ids: Collection[str]) -> int:
        """Remove what a killed gateway left of these sessions' sandboxes; how many there were."""
        ...

    async def close(self) -> None: ...


RUNTIMES: Makers[Runtime] = Makers("runtime", __name__)
