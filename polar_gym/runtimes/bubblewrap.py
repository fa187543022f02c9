"""Sandboxes without a daemon: each command is one fresh `bwrap` around a scratch directory.

What must outlive a command (workspace, home, /tmp) lies in the scratch directory on the gateway's machine; everything
else is made anew in a few milliseconds: all namespaces, a read-only root on tmpfs with the host's /usr, a minimal
/etc, private /proc and /dev. No process outlives its command, so nothing has to be searched for and killed: the
sandbox's PID 1 dies with `bwrap`, the kernel kills the rest of the namespace before that PID 1 is gone, and `exec`
waits for that.

The command is held back until the gateway listens inside the new network namespace.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from pydantic import Field

from polar_gym.registry import Options
from polar_gym.runtimes import (
    GATEWAY_PORT,
    HOME,
    Command,
    ExecResult,
    SandboxError,
    SandboxRequest,
    agent,
    scratch_directory,
)
from polar_gym.runtimes.bwrap import BwrapProcess
from polar_gym.runtimes.listener import listen_inside
from polar_gym.runtimes.output import Output
from polar_gym.runtimes.threads import to_its_end

MEBIBYTE = 1024 * 1024

ISOLATION = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL", "--hostname", "sandbox"),
    *("--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"),
)

AS_USER = ("--unshare-user", "--uid", str(agent.UID), "--gid", str(agent.GID))
"""Without root the agent's uid exists in a user namespace, and is the gateway's own outside."""

AS_ROOT = tuple(
    part
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_DAC_READ_SEARCH")
    for part in ("--cap-add", capability)
)
"""As root there is no user namespace: in one, the agent would still be the host's uid 0 wherever the kernel asks for a
uid and not for a capability, as it does for /proc/sys (`core_pattern` alone would be the whole machine). These
capabilities are for `bwrap`, to enter the agent's directory, and for STEP_DOWN."""

STEP_DOWN = (
    *("/usr/bin/setpriv", f"--reuid={agent.UID}", f"--regid={agent.GID}", "--clear-groups"),
    *("--inh-caps=-all", "--bounding-set=-all", "--"),
)
"""What root's sandbox runs the command with: it leaves uid 0 and the last capabilities."""


class BubblewrapOptions(Options):
    scratch: Path | None = None
    """Where sandboxes keep their files on the gateway's machine. Default: the system's temporary directory."""
    memory_mb: int = Field(default=8192, gt=0)
    """What one process may allocate; there is no limit for a sandbox as a whole."""
    file_mb: int = Field(default=4096, gt=0)
    """What one file may grow to."""


class Bubblewrap:
    """Starts sandboxes as scratch directories; needs no root and no daemon."""

    Options = BubblewrapOptions

    def __init__(self, options: BubblewrapOptions) -> None:
        self._options = options

    def check(self) -> list[str]:
        packages = {"bwrap": "bubblewrap", "git": "git", "tar": "tar"}
        missing = [
            f"{program} is missing; install it with: apt-get install {package}"
            for program, package in packages.items()
            if not shutil.which(program)
        ]
        return missing or self._check_namespaces()

    async def start(self, request: SandboxRequest) -> BubblewrapSandbox:
        if not (bwrap := shutil.which("bwrap")):
            raise SandboxError("bwrap is missing; install it with: apt-get install bubblewrap")
        if request.spec.image is not None:
            raise SandboxError(f"runtime.image={request.spec.image!r}: bubblewrap runs no images; set runtime=docker")
        try:
            scratch = scratch_directory.make(request.session_id, self._options.scratch)
        except OSError as error:
            raise SandboxError(f"no scratch directory could be made: {error}; set runtime.scratch") from error
        try:
            await to_its_end(_fill, scratch, request.workspace)
        except BaseException:
            await asyncio.to_thread(scratch_directory.remove, scratch)
            raise
        return BubblewrapSandbox(bwrap=bwrap, scratch=scratch, request=request, limits=self._limits())

    async def reap(self, session_ids: Collection[str]) -> int:
        """Remove the scratch directories that a killed gateway left of these sessions; how many there were.

        Their processes are gone already: they died with the gateway.
        """
        orphans = scratch_directory.orphans(session_ids, self._options.scratch)
        for path in orphans:
            await asyncio.to_thread(scratch_directory.remove, path)
        return len(orphans)

    async def close(self) -> None:
        """Nothing is held between sandboxes."""

    def _check_namespaces(self) -> list[str]:
        links = [part for link, target in agent.host_root_links().items() for part in ("--symlink", target, link)]
        options, prefix = (AS_ROOT, STEP_DOWN) if os.geteuid() == 0 else (AS_USER, ())
        trial = ["bwrap", *ISOLATION, *options, *links, "--", *prefix, "/usr/bin/true"]
        done = subprocess.run(trial, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode == 0:
            return []
        return [
            f"bwrap cannot make a sandbox here ({done.stderr.strip()}); allow user namespaces with: "
            "sysctl kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000 "
            "kernel.apparmor_restrict_unprivileged_userns=0 (those of the three that exist)"
        ]

    def _limits(self) -> dict[int, int]:
        return {
            resource.RLIMIT_DATA: self._options.memory_mb * MEBIBYTE,
            resource.RLIMIT_FSIZE: self._options.file_mb * MEBIBYTE,
            resource.RLIMIT_CORE: 0,
        }


@dataclass(kw_only=True)
class BubblewrapSandbox:
    """A scratch directory, and the commands that are running on it."""

    bwrap: str
    scratch: Path
    request: SandboxRequest
    limits: Mapping[int, int]
    """Resource limit -> value, for every process."""
    base_url: str = f"http://127.0.0.1:{GATEWAY_PORT}"
    _running: dict[BwrapProcess, asyncio.Future[None]] = field(default_factory=dict)
    """Each running command with what is set when nothing of it is left."""
    _stopped: bool = False

    async def exec(self, command: Command) -> ExecResult:
        if self._stopped:
            raise SandboxError(f"the sandbox of session {self.request.session_id} is stopped")
        argv = [*(STEP_DOWN if os.geteuid() == 0 else ()), *command.argv]
        process = await BwrapProcess.spawn(self.bwrap, self._arguments(command), argv)
        gone = self._running[process] = asyncio.get_running_loop().create_future()
        stdout, stderr = Output(command.output_limit), Output(command.output_limit)
        server: asyncio.Server | None = None
        limit = asyncio.timeout(command.timeout_seconds)
        ending = asyncio.create_task(_expire(limit, command.end)) if command.end is not None else None
        try:
            async with limit:
                pid = await process.pid()
                for kind, value in self.limits.items():
                    resource.prlimit(pid, kind, (value, value))
                if self.request.serve is not None:
                    server = await self.request.serve(await listen_inside(pid, GATEWAY_PORT))
                process.release()
                await process.communicate(command.stdin, stdout, stderr)
        except TimeoutError:
            if not limit.expired():
                raise
        except OSError as error:
            raise SandboxError(f"bwrap started, but its sandbox could not be set up: {error}") from error
        finally:
            if ending is not None:
                ending.cancel()
            if server is not None:
                server.close()
            try:
                await process.end()
            finally:
                del self._running[process]
                gone.set_result(None)
        if self._stopped:
            raise SandboxError(f"the sandbox of session {self.request.session_id} was stopped during a command")
        await process.drain(stdout, stderr)
        return ExecResult(
            exit_code=None if limit.expired() else process.exit_code(stderr.value()),
            stdout=stdout.value(),
            stderr=stderr.value(),
            timed_out=limit.expired(),
        )

    async def stop(self) -> None:
        self._stopped = True
        running = list(self._running.items())
        for process, _ in running:
            process.kill()
        for _, gone in running:
            await gone
        await asyncio.to_thread(scratch_directory.remove, self.scratch)

    def _arguments(self, command: Command) -> list[str]:
        """The options of `bwrap`: later ones lie on top of earlier ones."""
        workspace = self.request.spec.workspace.path
        environment = {**agent.ENVIRONMENT, **self.request.spec.environment, **command.environment}
        arguments = [*ISOLATION, *(AS_ROOT if os.geteuid() == 0 else AS_USER)]
        for link, target in agent.host_root_links().items():
            arguments += ["--symlink", target, link]
        for name in agent.ETC:
            arguments += _mount("--ro-bind", self.scratch / "etc" / name, f"/etc/{name}")
        for path in agent.host_etc():
            arguments += _mount("--ro-bind", path, str(path))
        arguments += _mount("--bind", self.scratch / "tmp", "/tmp")
        arguments += _mount("--bind", self.scratch / "home", HOME)
        arguments += _mount("--bind", self.scratch / "workspace", workspace)
        for mount in self.request.mounts:
            arguments += _mount("--ro-bind", mount.host, mount.inside)
        for name, value in environment.items():
            arguments += ["--setenv", name, value]
        return [*arguments, "--remount-ro", "/", "--chdir", command.workdir or workspace]


async def _expire(limit: asyncio.Timeout, end: asyncio.Event) -> None:
    await end.wait()
    limit.reschedule(0)


def _mount(kind: str, host: Path, inside: str) -> list[str]:
    """A bind mount and the directories above it, which `bwrap` alone would make unreadable for all but their owner."""
    parents = [str(parent) for parent in reversed(PurePosixPath(inside).parents) if parent.name]
    return [*(part for parent in parents for part in ("--dir", parent)), kind, str(host), inside]


def _fill(scratch: Path, workspace: Path | None) -> None:
    """Put into the scratch directory what a sandbox needs, the workspace's copy included."""
    try:
        for name in ("home", "tmp", "etc"):
            (scratch / name).mkdir()
        for name, text in agent.ETC.items():
            (scratch / "etc" / name).write_text(text)
        if workspace is None:
            (scratch / "workspace").mkdir()
        else:
            shutil.copytree(workspace, scratch / "workspace", symlinks=True)
        if os.geteuid() == 0:
            _give_to_agent(scratch)
    except (OSError, shutil.Error) as error:
        raise SandboxError(f"the workspace {workspace} could not be copied: {error}") from error


def _give_to_agent(scratch: Path) -> None:
    """Make the agent's uid the owner of everything but the scratch directory itself, which stays closed to others."""
    for parent, directories, files in os.walk(scratch):
        for name in (*directories, *files):
            os.lchown(Path(parent, name), agent.UID, agent.GID)


RUNTIME = Bubblewrap
