"""Runtimes: where a harness runs. A runtime starts sandboxes, which are kept apart from the machine and its network.

A plug-in is one module or package here that defines a class `RUNTIME`, a `Runtime`: `docker`, `apptainer`,
`bubblewrap`, `auto`, which chooses one of them, `remote`, whose sandboxes are a provider's, and `unconfined`, which
isolates nothing. `RUNTIME.Options` are its options, `limits.LimitOptions` or more; `RUNTIME(options)` makes the
runtime. A runtime starts a `Sandbox`, which runs commands and stops. Nothing else is asked of a runtime: files go in
and out through commands (`files`), and so does the difference that an agent made (`workspaces.diff`).

A sandbox reaches nothing but the gateway. It has a network namespace of its own, which holds one listening socket: the
runtime makes the socket, and the gateway serves it; in a remote sandbox a relay does both. A task may ask for less
(`network: none`) or for more (`full`).

Used by the runtimes:

- `kernel`: what Linux offers to keep a sandbox apart.
- `agent`: the user in a sandbox, and the parts of the machine that this user may see.
- `limits`: the options that every runtime takes.
- `sandbox_files`, `scratch_directory`: what a sandbox keeps on the gateway's machine.
- `glibc`, `skeleton`, `image_names`: what an image lacks, an image without a registry, and the names of images.
- `relay` (with `in_sandbox/`): the gateway's way into a sandbox on another machine, through a stream of bytes.
- `lasting`, `output`: a sandbox that outlives its commands and ends each of them; what a command printed.

`audit` (with `in_sandbox/`) tries which guarantees hold in real sandboxes: `polar-gym doctor --sandbox`. `conformance`
tries whether commands, files and network of a runtime's sandboxes are as promised here.

Used by other rooms too: `files`, `tar`, `processes` and `threads`. The room uses `registry`, `schema` and `paths`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from polar_gym.errors import ConfigError
from polar_gym.registry import Makers
from polar_gym.schema import RuntimeSpec

PROXY_PORT = 8080
"""The gateway's port on the sandbox's own 127.0.0.1."""

HOME = "/home/agent"
"""The agent's home directory inside a sandbox: writable, empty at the start, kept between commands."""

TOOLCHAIN = "/opt/polar-gym"
"""The directory inside a sandbox at which read-only harness toolchains are mounted."""

NODEJS = f"{TOOLCHAIN}/bin/node"
"""The toolchain's node, where the harness is a program for it."""

Serve = Callable[[socket.socket], Awaitable[asyncio.Server]]
"""(listening socket inside a sandbox's network namespace) -> the server of the session's gateway on that socket."""


class SandboxError(Exception):
    """A sandbox could not be started or used, through no fault of the agent. The message says what to do about it."""


class DiskFullError(SandboxError):
    """The disk of the machine is full, and not through this sandbox. Grading that meets it is masked."""


class LeftoverError(Exception):
    """The files that the agent left in its sandbox cannot be copied: the agent's doing, which is scored."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory or file of the gateway's machine, read-only inside the sandbox."""

    host: Path
    inside: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRequest:
    """The properties that one sandbox must have."""

    session_id: str
    """A label of the sandbox, by which orphans are found. A node gives one with the attempt's number (`Session.label`),
    because a later attempt may run on another node of this machine."""
    node: str = ""
    """The node that asks; a label too."""
    spec: RuntimeSpec
    workspace: Path | None
    """A directory on the gateway's machine. The sandbox sees a writable copy of it at `spec.workspace.path`. The
    directory must not change while the sandbox lives, because the copy may be made on write. None: what the image has
    at that path; an empty directory without an image, or where the image has nothing there."""
    own_files: bool = False
    """Whether all files of the workspace are this user's. They need not be given to the agent one by one then."""
    mounts: Sequence[Mount] = ()
    serve: Serve | None = None
    """None: no gateway (grading)."""
    lifetime_seconds: float = 24 * 3600.0
    """After so long nobody needs the sandbox: it may then end by itself, also where the gateway has died."""

    @property
    def served(self) -> Serve | None:
        """The server of the gateway in the sandbox; None where the sandbox has no gateway."""
        return None if self.spec.network == "none" else self.serve


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command inside a sandbox ended."""

    exit_code: int | None
    """None where the time limit killed the command."""
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
    """Standard input is always closed after these bytes: several harnesses never stop waiting on an open pipe."""
    timeout_seconds: float = 60.0
    end: asyncio.Event | None = None
    """Once this is set, the command ends as at its time limit: for callers with other reasons to end the command."""
    untrusted: bool = False
    """The command runs code of the policy's, which may have kept the sandbox from killing what the command left: all
    that is left is killed again, from outside of the command."""
    output_limit: int = 8 * 1024 * 1024
    """Bytes of stdout and of stderr that are kept. Of a longer output, the first and the last half of them are kept."""


class Sandbox(Protocol):
    """A running sandbox."""

    base_url: str
    """The address at which the harness reaches the gateway."""

    async def exec(self, command: Command) -> ExecResult:
        """Run a command to its end. At its time limit, kill every process that it started; cancelling does the same.

        Raises `SandboxError` when the sandbox is gone.
        """
        ...

    async def stop(self) -> None:
        """Kill all processes and remove every trace of the sandbox from the machine. May be called twice."""
        ...


@runtime_checkable
class WholeSandbox(Sandbox, Protocol):
    """A sandbox of the scope `container`."""

    async def keep(self) -> str:
        """End the sandbox, and return the name of an image of all files in it, which `stop` removes.

        Raises `LeftoverError` where the files cannot be copied, and `SandboxError` where the runtime fails or is not
        done within its limit.
        """
        ...


class Runtime(Protocol):
    """Starts sandboxes of one kind. One that can start a `WholeSandbox` has the attribute `whole = True`, one whose
    sandboxes isolate nothing has `confined = False`, one whose sandboxes without an image show the machine's /usr has
    `shows_usr = True`, and one that has no images `runs_images = False`."""

    def check(self) -> list[str]:
        """Return what is missing on this machine, each with the command that installs it. Blocks."""
        ...

    def caveats(self) -> list[str]:
        """Return the promises that the runtime cannot keep here, such as a limit or a copy on write. Blocks."""
        ...

    async def prepare(self, images: Collection[str]) -> None:
        """Get these images onto this machine before the first sandbox asks for one. Raises `SandboxError`."""
        ...

    async def start(self, request: SandboxRequest) -> Sandbox:
        """Start a sandbox. Raises `SandboxError`."""
        ...

    async def reap(self, session_ids: Collection[str]) -> int:
        """Remove what a killed gateway left of the sandboxes of these sessions, and return how many there were."""
        ...

    async def close(self) -> None: ...


RUNTIMES: Makers[Runtime] = Makers("runtime", __name__)


def is_confined(runtime: Runtime | Callable[..., Runtime]) -> bool:
    """Return whether sandboxes of this runtime, or class of runtimes, keep anything apart."""
    return getattr(runtime, "confined", True)


def no_images(runtime: str, image: str) -> str:
    """Return the error of a runtime without images."""
    return f"runtime.image={image!r}: {runtime} runs no images; set runtime=docker or runtime=apptainer"


def check_offered(spec: RuntimeSpec, runtime: Runtime | Callable[..., Runtime]) -> None:
    """Raise `ConfigError` where sandboxes of this runtime, or class of runtimes, cannot have the image or the scope, or
    where the scope leaves the hidden files of a workspace in sight."""
    if spec.image is not None and not getattr(runtime, "runs_images", True):
        raise ConfigError(no_images(spec.name, spec.image))
    if spec.scope == "container" and not getattr(runtime, "whole", False):
        raise ConfigError(
            f"runtime={spec.name}: gives no harness a whole container (runtime.scope=container); set runtime=docker"
        )
    if spec.scope == "container" and (spec.workspace.base_patch or spec.workspace.hidden_files):
        raise ConfigError(
            "runtime.scope=container: leaves the image's repository as it is, so that base_patch and hidden_files have "
            "no effect; set runtime.scope=workspace"
        )
