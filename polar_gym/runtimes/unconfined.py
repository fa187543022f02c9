"""Runs harnesses as plain processes of the gateway's user: for a machine on which no sandbox can be made.

Nothing is isolated. The harness reads and writes what the gateway may, its tokens and the tests of a task included, and
reaches the network. So the option `accept_no_isolation` is required, and every evaluation has low trust. Such machines
are containers without the right to make namespaces.

The paths that a sandbox has (`/home/agent`, `/opt/polar-gym`, the workspace's) become links into the scratch directory.
They can lead to one sandbox at a time, so the sandboxes of all gateways of the machine wait for one another: a lock on
a file, which the kernel drops when its holder dies. A link that its holder has left is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from polar_gym.registry import Names
from polar_gym.runtimes import (
    HOME,
    TOOLCHAIN,
    Command,
    SandboxError,
    SandboxRequest,
    agent,
    no_images,
    processes,
    sandbox_files,
    scratch_directory,
)
from polar_gym.runtimes.kernel import disk, uids
from polar_gym.runtimes.kernel.listener import serve_on_host
from polar_gym.runtimes.lasting import LastingSandbox
from polar_gym.runtimes.limits import LimitOptions
from polar_gym.runtimes.output import Output, communicate
from polar_gym.runtimes.threads import to_its_end

LOCK = Path("/run/polar-gym-unconfined")
LOOK_AGAIN_SECONDS = 0.05
LINKS = "links"
"""The file in the scratch directory with the paths of the machine that became links, a line each."""

SUBREAPER = Path(__file__).parent / "in_sandbox" / "subreaper.py"
NOTHING_IS_ISOLATED = (
    "runtime=unconfined isolates nothing: a harness may read and change all that this user may, tests and rewards "
    "included, and reaches the network; no limit of runtime holds"
)


class UnconfinedOptions(LimitOptions):
    accept_no_isolation: Annotated[bool, Names.OTHER] = Field(default=False, validate_default=True)
    """Must be true: nothing keeps the harness from the machine, nor from the tests that grade it."""
    scratch: Annotated[Path | None, Names.OTHER] = None
    """The directory of the sandboxes' files. Default: the system's temporary directory."""

    @field_validator("accept_no_isolation")
    @classmethod
    def _accepted(cls, value: bool) -> bool:
        if not value:
            raise ValueError(f"{NOTHING_IS_ISOLATED}; set runtime.accept_no_isolation=true to accept that")
        return value


class UnconfinedSandbox(LastingSandbox):
    """The processes and links of one sandbox."""

    def __init__(self, request: SandboxRequest, scratch: Path) -> None:
        super().__init__(request, uids.Claim(os.geteuid()))
        self.scratch = scratch
        self.links: list[Path] = []
        self.made: list[Path] = []
        """Directories of the machine that were made for the links."""
        self.lock: int | None = None
        """The descriptor of the locked file."""
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, command: Command, stdout: Output, stderr: Output) -> int | None:
        own = {**agent.ENVIRONMENT, "TMPDIR": str(self.scratch / "disk" / "tmp"), **command.environment}
        argv = [sys.executable, "-I", "-S", str(SUBREAPER), str(command.workdir), *command.argv]
        try:
            started = processes.start(argv, **processes.PIPES, env=own, start_new_session=True)
            self._process = process = await started
        except (OSError, ValueError) as error:  # too long, or a zero byte
            raise SandboxError(f"a command could not be started: {error}") from error
        await communicate(process, command.stdin, stdout, stderr)
        return None if self.stopped else process.returncode

    async def kill_agent(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def end(self) -> None:
        await self.kill_agent()
        if self._process is not None:
            await self._process.wait()

    async def remove(self) -> None:
        for link in self.links:
            link.unlink(missing_ok=True)
        self.links.clear()
        for directory in reversed(self.made):
            with contextlib.suppress(OSError):  # not empty: something else uses it by now
                directory.rmdir()
        self.made.clear()
        await to_its_end(scratch_directory.remove, self.scratch)
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    async def take_turn(self) -> None:
        """Wait until no other sandbox of the machine has the paths."""
        descriptor = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.lock = descriptor
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                await asyncio.sleep(LOOK_AGAIN_SECONDS)  # a thread that waits could not be cancelled
            else:
                return

    def link(self, inside: str, target: Path) -> None:
        """Let a path lead to the sandbox's own. Raises `SandboxError` where something of the machine is there."""
        path = Path(inside)
        if path.is_symlink() and f"/{scratch_directory.PREFIX}" in str(path.readlink()):  # its holder has died
            path.unlink()
        for parent in reversed([each for each in path.parents if not each.exists()]):
            parent.mkdir()
            self.made.append(parent)
        with (self.scratch / LINKS).open("a") as file:
            file.write(f"{path}\n")
        try:
            path.symlink_to(target)
        except FileExistsError as error:
            raise SandboxError(
                f"runtime=unconfined needs the path {path}, where this machine has something; move it away, or set "
                "runtime.workspace.path where the path is the workspace's"
            ) from error
        self.links.append(path)


class Unconfined:
    """Starts sandboxes that are none."""

    Options = UnconfinedOptions
    confined = False
    runs_images = False

    def __init__(self, options: UnconfinedOptions) -> None:
        self.options = options

    def check(self) -> list[str]:
        if os.geteuid() != 0:
            return [f"runtime=unconfined makes {HOME}, {TOOLCHAIN} and the workspace's path: run it as root"]
        return scratch_directory.problems(self.options.scratch)

    def caveats(self) -> list[str]:
        return [NOTHING_IS_ISOLATED]

    async def prepare(self, images: Collection[str]) -> None:
        """Do nothing: this runtime runs no images."""

    async def start(self, request: SandboxRequest) -> UnconfinedSandbox:
        if request.spec.image is not None:
            raise SandboxError(no_images("unconfined", request.spec.image))
        sandbox_files.say_once(NOTHING_IS_ISOLATED)
        try:
            sandbox = UnconfinedSandbox(request, scratch_directory.make(request.session_id, self.options.scratch))
        except OSError as error:
            raise SandboxError(f"no scratch directory could be made: {error}; set runtime.scratch") from error
        try:
            await sandbox.take_turn()
            await self._fill(sandbox, request)
            if request.served is not None:
                sandbox.base_url, sandbox.server = await serve_on_host(request.served)
        except OSError as error:
            await sandbox.stop()
            raise SandboxError(f"runtime=unconfined: {error}") from error
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def _fill(self, sandbox: UnconfinedSandbox, request: SandboxRequest) -> None:
        own = sandbox.scratch / "disk"
        for name in disk.AGENTS:
            (own / name).mkdir(parents=True)
        if request.workspace is not None:
            await sandbox_files.copy_workspace(request.workspace, disk.Disk(sandbox.scratch, 0), sandbox.claim)
        sandbox.link(HOME, own / "home")
        sandbox.link(request.spec.workspace.path, own / "workspace")
        for number, mount in enumerate(request.mounts):
            (way := own / f"mount-{number}").symlink_to(mount.host)  # each link on the machine leads to the scratch
            sandbox.link(mount.inside, way)

    async def reap(self, session_ids: Collection[str]) -> int:
        orphans = scratch_directory.orphans(session_ids, self.options.scratch)
        for scratch in orphans:
            for line in (scratch / LINKS).read_text().splitlines() if (scratch / LINKS).exists() else ():
                if (link := Path(line)).is_symlink() and link.readlink().is_relative_to(scratch):
                    link.unlink()
            await to_its_end(scratch_directory.remove, scratch)
        return len(orphans)

    async def close(self) -> None:
        """Do nothing: the runtime holds nothing between sandboxes."""


RUNTIME = Unconfined
