"""One Apptainer instance: its namespaces, from their start until they are gone."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from asyncio.subprocess import DEVNULL
from collections.abc import Sequence
from pathlib import Path

from polar_gym.runtimes import HOME, PROXY_PORT, Mount, SandboxError, SandboxRequest, agent, glibc, processes
from polar_gym.runtimes.apptainer.images import CONTAINED, Image, as_nobody, environment
from polar_gym.runtimes.apptainer.seccomp import launcher
from polar_gym.runtimes.kernel import seccomp
from polar_gym.runtimes.kernel.listener import listen_inside
from polar_gym.runtimes.kernel.uids import Claim
from polar_gym.runtimes.threads import finish

NAME = "sandbox"
END_SECONDS = 30

ISOLATION = (
    *(*CONTAINED, "--uts", "--hostname", "sandbox"),
    *("--no-mount", "/etc/localtime,/etc/hosts,bind-paths,home,tmp,hostfs"),
)


class Instance:
    """An instance, not yet started. `end` may be called at any time, and twice."""

    def __init__(self, program: str, scratch: Path, cache: Path, claim: Claim) -> None:
        self.scratch = scratch
        self.claim = claim
        self._program = program
        self._environment = environment(str(scratch / "apptainer"), cache)
        self._pid = 0
        self._init: int | None = None
        """A pidfd of the instance's PID 1."""

    async def start(self, image: Image, request: SandboxRequest, through: Sequence[str]) -> None:
        """Start the instance; `through` is an argv prefix of the command that does. Raises `SandboxError`."""
        (self.scratch / "apptainer").mkdir()
        for name, line in agent.accounts(self.claim.uid).items():
            (self.scratch / "etc" / name).write_text(_with_account(image.accounts[name], line))
        # Without root, the agent has the uid of PID 1, and could make calls through that process. Apptainer answers all
        # with EPERM; after that answer of `clone3`, no thread starts.
        (profile := self.scratch / "apptainer" / "seccomp.json").write_text(seccomp.profile(("clone3",)))
        network = () if request.spec.network == "full" else ("--net", "--network", "none")
        overlay = ("--overlay", str(self.scratch / "disk" / "overlay"))
        calls = ("--security", f"seccomp:{profile}")
        binds = [part for bind in self._binds(image, request) for part in ("--bind", bind)]
        await self._apptainer(
            *("instance", "start", *ISOLATION, *as_nobody(), *calls, *network, *overlay, *binds, str(image.path), NAME),
            through=through,
        )
        (self._pid,) = _pids(self.scratch)
        try:
            self._init = os.pidfd_open(self._pid)
        except ProcessLookupError as error:
            raise SandboxError("the instance was killed from outside before its first command") from error

    def enter(self) -> list[str]:
        """Return the argv prefix that runs a command inside, as the agent and under the filter.

        It leaves the command no way to more rights. Raises `SandboxError` when the instance is gone.
        """
        if self._init is None or _readable(self._init, 0):
            raise SandboxError("the sandbox is gone: its instance has ended")
        root = os.geteuid() == 0
        uid = str(self.claim.uid)
        identity = ("--setuid", uid, "--setgid", uid) if root else _OWN_USER_NAMESPACE
        spaces = ("--mount", "--net", "--pid", "--ipc", "--uts", "--root")
        return [*launcher(), "nsenter", "--target", str(self._pid), *spaces, *identity, "--"]

    async def listen(self) -> socket.socket:
        """Return the gateway's listening socket in the instance's network namespace. Raises `SandboxError`."""
        try:
            return await listen_inside(self._pid, PROXY_PORT)
        except OSError as error:
            raise SandboxError(f"the gateway may not enter the sandbox's network: {error}") from error

    def end(self) -> None:
        """Kill all processes inside, and wait until the instance is gone. Blocks."""
        if self._init is not None:
            os.close(self._init)
            self._init = None
        end_instances(self.scratch)

    def _binds(self, image: Image, request: SandboxRequest) -> list[str]:
        """Return `source:destination:mode` of each mount; later ones lie on top of earlier ones.

        Raises `SandboxError`.
        """
        mounts = glibc.mounts_of(request, has_glibc=image.glibc, has_git=image.git)
        mounts += [Mount(self.scratch / "etc" / name, f"/etc/{name}") for name in agent.accounts(self.claim.uid)]
        own = {"tmp": "/tmp", "home": HOME, "workspace": request.spec.workspace.path}
        writable = [(self.scratch / "disk" / name, inside, "rw") for name, inside in own.items()]
        (nothing := self.scratch / "apptainer" / "nothing").mkdir()
        unseen = [*agent.hidden(""), *(agent.hidden_in_usr() if request.spec.image is None else ())]
        hidden = [(nothing if path.is_dir() else Path("/dev/null"), path, "ro") for path in unseen]
        binds = [*writable, *((mount.host, mount.inside, "ro") for mount in mounts), *hidden]
        for host, inside, _ in binds:
            if any(character in f"{host}{inside}" for character in ",:"):
                raise SandboxError(
                    f"{host} cannot be mounted at {inside}: Apptainer takes no commas and colons in paths"
                )
        return [f"{host}:{inside}:{mode}" for host, inside, mode in binds]

    async def _apptainer(self, *arguments: str, through: Sequence[str]) -> None:
        argv = [*through, self._program, "--quiet", *arguments]
        # Run to the end also when cancelled: a half-started instance could not be found again.
        code, _, stderr = await finish(processes.run(argv, stdout=DEVNULL, env=self._environment, cwd="/"))
        if code != 0:
            raise SandboxError(f"apptainer instance start failed: {stderr.decode(errors='replace').strip()[-2000:]}")


_OWN_USER_NAMESPACE = ("--user", "--preserve-credentials")


def end_instances(scratch: Path) -> None:
    """Kill the instances that are registered in a scratch directory, and wait until they are gone. Blocks.

    Raises `SandboxError`.
    """
    for pid in _pids(scratch):
        if not _mounts(pid, scratch):
            continue
        with contextlib.ExitStack() as stack:
            try:
                keeper = os.pidfd_open(_parent(pid))
                stack.callback(os.close, keeper)
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, FileNotFoundError, PermissionError):  # of another user
                continue
            # The process that started PID 1 removes its control groups and mounts, and ends.
            if not _readable(keeper, END_SECONDS):
                raise SandboxError(f"the instance in {scratch} was killed, but does not end")


def _pids(scratch: Path) -> list[int]:
    """Return PID 1 of each instance that is registered in a scratch directory."""
    files = (scratch / "apptainer" / "instances" / "app").glob("*/*/*/*.json")
    return [int(json.loads(file.read_text())["pid"]) for file in files]


def _mounts(pid: int, scratch: Path) -> bool:
    """Return whether a process sees files of a scratch directory, as far as this user may know. After the machine has
    started anew, the number in an old file is that of another process."""
    try:
        return scratch.name in Path(f"/proc/{pid}/mountinfo").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # it has ended, and its parent is yet to know; or it has rights of its own
        return True


def _parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("PPid:")).split()[1])


def _readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def _with_account(text: str, account: str) -> str:
    """Return an image's file of users or groups with this line, which is added where no other has its number."""
    if any(line.split(":")[2:3] == account.split(":")[2:3] for line in text.splitlines()):
        return text
    return f"{text.rstrip()}\n{account}"
