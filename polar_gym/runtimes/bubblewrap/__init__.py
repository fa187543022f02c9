"""Sandboxes without a daemon: each command is one fresh `bwrap` around a scratch directory.

The workspace, home and /tmp must outlive a command: they lie in the scratch directory on the gateway's machine.
Everything else is made for each command in a few milliseconds: all namespaces, a read-only root on tmpfs with the
host's /usr, a minimal /etc, private /proc, /dev and /dev/shm. No process outlives its command, so none has to be
searched for and killed. The sandbox's PID 1 dies with `bwrap`, the kernel kills the rest of the namespace before that
PID 1 is gone, and `exec` waits for that. As root, no user namespace stands between a command and the kernel. As root,
and with subordinate uids, the agent has a uid that no other sandbox has. The filter of system calls keeps
commands from what the kernel holds for a uid beyond a sandbox's end, such as keyrings.

Sandboxes see the same files of the machine, such as /usr. One of them can lock such a file (`flock`), and another one
can see that. Only a filter that breaks honest programs would stop this slow channel.

The command is held back until the gateway listens inside the new network namespace. With `network: full`, the sandbox
has no network namespace: it shares the machine's network, its loopback included.

The workspace is copied on write and the sandbox is limited as a whole, where the machine allows both. Elsewhere the
workspace is copied, each process is limited alone, and the log says so once.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import Field

from polar_gym.registry import Names
from polar_gym.runtimes import (
    HOME,
    PROXY_PORT,
    Command,
    ExecResult,
    Mount,
    SandboxError,
    SandboxRequest,
    agent,
    no_images,
    processes,
    sandbox_files,
    scratch_directory,
)
from polar_gym.runtimes.bubblewrap.bwrap import BwrapProcess, system_call_filter
from polar_gym.runtimes.kernel import cgroups, copy_on_write, disk, uids
from polar_gym.runtimes.kernel.listener import listen_inside, serve_on_host
from polar_gym.runtimes.limits import MEBIBYTE, LimitOptions
from polar_gym.runtimes.output import Output
from polar_gym.runtimes.threads import finish, to_its_end

ISOLATION = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL", "--hostname", "sandbox"),
    *("--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"),
    *("--perms", "1777", "--size", str(64 * MEBIBYTE), "--tmpfs", "/dev/shm"),
)

AS_USER = ("--unshare-user", "--uid", str(agent.UID), "--gid", str(agent.UID))
"""Where no uid was claimed, the agent's exists in a user namespace; outside, it is the gateway's own uid."""

AS_ROOT = tuple(
    part
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_DAC_READ_SEARCH")
    for part in ("--cap-add", capability)
)
"""Where a uid was claimed, the sandbox has no user namespace of its own. In one, root's agent would still be the host's
uid 0 wherever the kernel asks for a uid and not for a capability. It does so for /proc/sys: `core_pattern` alone would
give the whole machine. These capabilities are for `bwrap`, to enter the agent's directory, and for `step_down`."""

START = f'{agent.SET_ENVIRONMENT}; exec "$@"'
"""The script of `sh -c` that starts the command, after `step_down`: its dynamic loader must see nothing of a task."""


class BubblewrapOptions(LimitOptions):
    scratch: Annotated[Path | None, Names.OTHER] = None
    """The directory of the sandboxes' files on the gateway's machine. Default: the system's temporary directory."""
    file_mb: int = Field(default=4096, gt=0)
    """The largest size of one file."""


class Bubblewrap:
    """Starts sandboxes as scratch directories; needs no root and no daemon."""

    Options = BubblewrapOptions
    shows_usr = True
    runs_images = False

    def __init__(self, options: BubblewrapOptions) -> None:
        self._options = options

    def check(self) -> list[str]:
        missing = processes.missing({"bwrap": "bubblewrap", "git": "git", "tar": "tar"})
        return missing or scratch_directory.problems(self._options.scratch) or self._check_namespaces()

    def caveats(self) -> list[str]:
        return sandbox_files.caveats(self._options, own_uid=True)

    async def prepare(self, images: Collection[str]) -> None:
        """Do nothing: this runtime runs no images."""

    async def start(self, request: SandboxRequest) -> BubblewrapSandbox:
        if not (bwrap := shutil.which("bwrap")):
            raise SandboxError("bwrap is missing; install it with: apt-get install bubblewrap")
        if request.spec.image is not None:  # `runtime=auto` finds only now that nothing here runs images
            raise SandboxError(no_images("bubblewrap", request.spec.image))
        own_uid = _open_to_all(request.mounts)
        scratch, claim = await sandbox_files.make(request.session_id, self._options.scratch, own_uid=own_uid)
        sandbox = BubblewrapSandbox(bwrap=bwrap, scratch=scratch, claim=claim, request=request, limits=self._limits())
        try:
            sandbox.disk = own = await sandbox_files.own_disk(scratch, self._options, claim)
            if request.workspace is not None:
                sandbox.view = await sandbox_files.show_workspace(request.workspace, own, claim, request.own_files)
            sandbox.cgroup = await to_its_end(sandbox_files.limit, scratch, self._options)
            if request.spec.network == "full" and request.served is not None:
                sandbox.base_url, sandbox.server = await serve_on_host(request.served)
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def reap(self, session_ids: Collection[str]) -> int:
        """Remove the scratch directories that a killed gateway left of these sessions, and return how many there were.

        The processes of the sandboxes died with the gateway.
        """
        orphans = scratch_directory.orphans(session_ids, self._options.scratch)
        for path in orphans:
            await asyncio.to_thread(sandbox_files.remove, path)
        return len(orphans)

    async def close(self) -> None:
        """Do nothing: the runtime holds nothing between sandboxes."""

    def _check_namespaces(self) -> list[str]:
        links = [part for link, target in agent.host_root_links().items() for part in ("--symlink", target, link)]
        options, before = (AS_ROOT, step_down(agent.UID)) if os.geteuid() == 0 else (AS_USER, ())
        bwrap = ["bwrap", *ISOLATION, "--unshare-net", *options, *links]
        try:
            with system_call_filter() as calls:
                trial = [*bwrap, "--seccomp", str(calls), "--", *before, "/usr/bin/true"]
                done = subprocess.run(trial, pass_fds=[calls], capture_output=True, text=True, timeout=20, check=False)
        except SandboxError as error:
            return [str(error)]
        if done.returncode == 0:
            return []
        reason = " ".join(done.stderr.split())
        if "SECCOMP" in reason:
            return [
                f"the kernel takes no system call filter ({reason}); use one that was built with "
                "CONFIG_SECCOMP_FILTER, or set runtime=docker"
            ]
        if "--size" in reason:
            return [f"bwrap is too old, or setuid ({reason}); install bubblewrap >= 0.7, or set runtime=docker"]
        return [
            f"bwrap cannot make a sandbox here ({reason}); allow user namespaces with: "
            "sysctl kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000. Where AppArmor "
            "restricts them (Ubuntu 24.04), `.ci/needs demo` prints a profile for bwrap alone"
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
    claim: uids.Claim
    request: SandboxRequest
    limits: Mapping[int, int]
    """Resource limit -> value, for every process."""
    base_url: str = f"http://127.0.0.1:{PROXY_PORT}"
    disk: disk.Disk | None = None
    """The sandbox's disk; None before `start` has made it."""
    view: copy_on_write.View | None = None
    """The view of the workspace, where the workspace is copied on write."""
    cgroup: cgroups.Cgroup | None = None
    server: asyncio.Server | None = None
    """The gateway, where one server serves the whole sandbox, and not one each command's own network."""
    _running: dict[BwrapProcess, asyncio.Future[None]] = field(default_factory=dict)
    """Running command -> a future that is done when nothing of the command is left."""
    _stopped: bool = False

    async def exec(self, command: Command) -> ExecResult:
        if self._stopped:
            raise SandboxError(f"the sandbox of session {self.request.session_id} is stopped")
        before = () if self.claim.owner is None else step_down(self.claim.uid)
        argv = [*before, "/bin/sh", "-c", START, "sh", *command.argv]
        space = self.view or self.disk  # the view's namespace has the disk's mounts too
        through = [part for each in (self.cgroup, space) if each is not None for part in each.enter]
        memory_ends = self._memory_ends()
        process = await BwrapProcess.spawn([*through, self.bwrap], self._arguments(command), argv)
        gone = self._running[process] = asyncio.get_running_loop().create_future()
        stdout, stderr = Output(command.output_limit), Output(command.output_limit)
        server: asyncio.Server | None = None
        limit = asyncio.timeout(command.timeout_seconds)
        ending = asyncio.create_task(_expire(limit, command.end)) if command.end is not None else None
        broken: OSError | None = None
        try:
            async with limit:
                pid = await process.pid()
                for kind, value in self.limits.items():
                    resource.prlimit(pid, kind, (value, value))
                if self.request.served is not None and self.server is None:
                    server = await self.request.served(await listen_inside(pid, PROXY_PORT))
                process.release()
                await process.communicate(command.stdin, stdout, stderr)
        except TimeoutError:
            if not limit.expired():
                raise
        except OSError as error:
            broken = error
        finally:
            if ending is not None:
                ending.cancel()
            if server is not None:
                server.close()
            try:
                await finish(process.end())
            finally:
                del self._running[process]
                gone.set_result(None)
        if self._stopped:
            raise SandboxError(f"the sandbox of session {self.request.session_id} was stopped during a command")
        out_of_memory = self._memory_ends() > memory_ends
        await process.drain(stdout, stderr)
        if broken is not None:  # bwrap may have ended meanwhile, and says why
            said = stderr.value().decode(errors="replace").strip()
            reason = f"bwrap failed: {said}" if said else f"bwrap's sandbox could not be set up: {broken}"
            raise SandboxError(reason) from broken
        if self.disk is not None:
            await sandbox_files.settle(self.disk)
        return ExecResult(
            exit_code=None if limit.expired() else process.exit_code(stderr.value(), out_of_memory=out_of_memory),
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
        if self.server is not None:
            self.server.close()
        for view in (self.view, self.disk and self.disk.view):
            if view is not None:
                await view.close()
        await to_its_end(sandbox_files.remove, self.scratch)
        self.claim.release()

    def _memory_ends(self) -> int:
        return 0 if self.cgroup is None else self.cgroup.memory_ends()

    def _arguments(self, command: Command) -> list[str]:
        """Return the options of `bwrap` for a command; a later mount lies on top of an earlier one."""
        workspace = self.request.spec.workspace.path
        environment = {**agent.ENVIRONMENT, **self.request.spec.environment, **command.environment}
        arguments = [*ISOLATION, *(AS_USER if self.claim.owner is None else AS_ROOT)]
        if self.request.spec.network != "full":
            arguments.append("--unshare-net")
        elif (names := Path("/etc/resolv.conf")).exists():
            arguments += _mount("--ro-bind", names.resolve(), str(names))
        for path in (*agent.hidden("/proc"), *agent.hidden_in_usr()):
            hide = ("--tmpfs", str(path), "--remount-ro", str(path))
            arguments += hide if path.is_dir() else ("--dev-bind", "/dev/null", str(path))
        for link, target in agent.host_root_links().items():
            arguments += ["--symlink", target, link]
        for name in agent.ETC:
            arguments += _mount("--ro-bind", self.scratch / "etc" / name, f"/etc/{name}")
        for path in agent.host_etc():
            arguments += _mount("--ro-bind", path, str(path))
        own = {"/tmp": "tmp", HOME: "home", workspace: "workspace"}
        mounts = [("--bind", self.scratch / "disk" / name, inside) for inside, name in own.items()]
        mounts += [("--ro-bind", mount.host, mount.inside) for mount in self.request.mounts]
        ways: list[str] = []
        for kind, host, inside in mounts:
            new = [way for way in _ways(inside, own) if way not in ways]
            arguments += [*(part for way in new for part in ("--tmpfs", way)), *_mount(kind, host, inside)]
            ways += new
        arguments += [part for way in ways for part in ("--remount-ro", way)]
        arguments += ["--setenv", "PATH", agent.PATH, "--setenv", agent.EXPORTS, agent.exports(environment)]
        return [*arguments, "--remount-ro", "/", "--chdir", command.workdir or workspace]


def step_down(uid: int) -> tuple[str, ...]:
    """Return the argv prefix of a command with a claimed uid, which leaves uid 0 and the last capabilities."""
    identity = ("/usr/bin/setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    return (*identity, "--inh-caps=-all", "--bounding-set=-all", "--")


async def _expire(limit: asyncio.Timeout, end: asyncio.Event) -> None:
    await end.wait()
    limit.reschedule(0)


def _open_to_all(mounts: Sequence[Mount]) -> bool:
    """Return whether an agent of another uid than the gateway's may read these mounts.

    Raises `SandboxError` where it may not and the gateway is root, whose agents always have another uid.
    """
    closed = [each.host for each in mounts if each.host.exists() and not each.host.stat().st_mode & 0o004]
    for path in closed:
        if os.geteuid() == 0:
            raise SandboxError(f"the agent may not read {path}, because only its owner or group may: chmod -R o+rX it")
        sandbox_files.say_once(
            f"sandboxes with {path} share a uid, because only its owner may read it: chmod -R o+rX it"
        )
    return not closed


def _ways(inside: str, own: Collection[str]) -> list[str]:
    """Return the directories right below the agent's `own` ones that lead to a mount point further down.

    The agent could put a link in place of such a directory. The next `bwrap` would follow the link, as root, outside of
    the sandbox. A mount point cannot be moved, so something must be mounted there too.
    """
    point = PurePosixPath(inside)
    below = [(place, point.relative_to(place).parts) for place in own if point.is_relative_to(place)]
    return [f"{place}/{parts[0]}" for place, parts in below if len(parts) > 1]


def _mount(kind: str, host: Path, inside: str) -> list[str]:
    """Return the options of a bind mount and of the directories above it.

    If `bwrap` made these directories by itself, only their owner could read them.
    """
    parents = [str(parent) for parent in reversed(PurePosixPath(inside).parents) if parent.name]
    return [*(part for parent in parents for part in ("--dir", parent)), kind, str(host), inside]


RUNTIME = Bubblewrap
