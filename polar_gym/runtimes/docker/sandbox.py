"""One container: how it is made, how commands run in it, and how it ends.

A container's PID 1 belongs to root and only waits; commands run beside it as the agent's uid. So one `kill -9 -1` as
that uid ends every process that the agent ever started, however the agent hid it, and the container stays. Docker has
no time limit for a command, so the runtime watches the clock (`lasting`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import docker
import requests
from docker import errors
from docker import types as docker_types

from polar_gym.runtimes import (
    HOME,
    PROXY_PORT,
    Command,
    DiskFullError,
    ExecResult,
    LeftoverError,
    Mount,
    SandboxError,
    SandboxRequest,
    agent,
    files,
    glibc,
    scratch_directory,
)
from polar_gym.runtimes.docker import relay, streams
from polar_gym.runtimes.docker.daemon import Daemon
from polar_gym.runtimes.docker.images import KEPT, Image
from polar_gym.runtimes.kernel import disk, seccomp, uids
from polar_gym.runtimes.kernel.listener import listen_at, listen_inside
from polar_gym.runtimes.lasting import LastingSandbox
from polar_gym.runtimes.limits import MEBIBYTE
from polar_gym.runtimes.output import CHUNK, Output
from polar_gym.runtimes.threads import to_its_end

SESSION_LABEL = "polar-gym.session"
NODE_LABEL = "polar-gym.node"

WAIT = """
read -r up _ < /proc/uptime
end=$((${up%.*} + $1))
while [ "${up%.*}" -lt $end ]; do
    sleep $((end - ${up%.*})) & wait $!
    read -r up _ < /proc/uptime
done
"""
"""The script of PID 1, which ends after so many seconds, and the container with it, where no gateway is left to end it.
It is a shell, because a shell also reaps the orphans that it inherits. It starts one process, at once: later the agent
may have used up the limit of processes. Only an agent that is root can end it, and has the shell start another."""

PREPARE_WHOLE = """
set -e
mkdir -p "$(dirname "$1")" "$2"
[ -e "$1" ] || ln -s /root "$1"
[ -d /tmp ] || mkdir -m 1777 /tmp
"""
"""The same where the agent is root, whose home is then the agent's. It changes no owner."""

ROOT = ("DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_CHROOT")
"""The capabilities beside CHOWN of an agent that is root: Docker's own, without those for devices, raw sockets, the
audit log, and the capabilities of files and processes."""

SECURITY = ("no-new-privileges", f"seccomp={seccomp.profile()}")
"""The profile is ours, because an older daemon's own allows io_uring and AF_ALG."""

MEASURE_SECONDS = 600
"""How long the daemon may take to count the bytes that an agent left."""
COPY_SECONDS, COPY_RATE = 600, 16 * MEBIBYTE
"""A copy of the files that an agent left may take so many seconds, and one more for each so many bytes."""
POLLS = 200
"""How often the daemon is asked, each 0.05 s, for an end that it may learn of a moment later."""
DYING = (126, 137)
"""The exit codes that Docker gives a command in a container that is dying, until its daemon learns of the death."""
REMOVE_SECONDS = 30


class OutOfMemoryError(SandboxError):
    """The container's PID 1 was killed for lack of memory: where a command ran, that is the command's doing."""


class DockerSandbox(LastingSandbox):
    """A running container."""

    def __init__(self, daemon: Daemon, request: SandboxRequest, image: Image) -> None:
        self._whole = request.spec.scope == "container"
        super().__init__(request, _claim(image, whole=self._whole))
        self._daemon = daemon
        self._image = image
        self._agent = f"{self.claim.uid}:{self.claim.uid}"
        self._name = f"polar-gym-{uuid.uuid4().hex[:16]}"
        self._relay_directory: Path | None = None
        self._relay: asyncio.StreamWriter | None = None
        self._labels = {SESSION_LABEL: request.session_id, NODE_LABEL: request.node}
        """By which a node removes the containers of a process that died."""
        self._free: int | None = None
        """The bytes that were free on the daemon's disk at the start."""
        self._kept = ""
        """The image of all files that the agent left, once `keep` makes it."""

    async def start(self) -> None:
        workspace = self._request.spec.workspace.path
        if self._request.served is not None and self._gateway() != "namespace":
            self._relay_directory = await to_its_end(self._make_relay_directory)
        self._free = await self._daemon.call(self._daemon.free)
        pid = await self._daemon.begin(self._create)
        arguments = [HOME, workspace, str(self.claim.uid), *agent.accounts(self.claim.uid).values()]
        script = PREPARE_WHOLE if self._whole else agent.PREPARE
        prepared = await self._run(["/bin/sh", "-c", script, "sh", *arguments], user="0")
        if prepared.exit_code != 0:
            raise SandboxError(
                f"runtime.image: {self._image.name!r} could not be prepared ({_said(prepared)}); an image needs sh, "
                "tar, timeout, mkdir, chown and grep (busybox has them all)"
            )
        await self._daemon.node_check.check(
            self._request, self._image.name, self._image.id, lambda argv: self._run(argv, user=self._agent)
        )
        if self._request.workspace is not None:
            archive = await asyncio.to_thread(files.pack, self._request.workspace)
            await files.unpack(self, archive, workspace)
        if self._request.served is not None:
            self.server = await self._request.served(await self._listen(pid))

    async def run(self, command: Command, stdout: Output, stderr: Output) -> int | None:
        argv = ["/bin/sh", "-c", agent.RUN, "sh", *command.argv]
        exec_id = await self._create_exec(argv, self._agent, str(command.workdir), command.environment)
        try:
            code = await self._communicate(exec_id, command.stdin, stdout, stderr)
        except OutOfMemoryError:
            if not self._whole:  # `keep` needs no container that runs, and an agent that is root can prevent its start
                await self._daemon.call(lambda client: client.api.start(self._name))
            code = 128 + signal.SIGKILL
        if code is not None:  # else the sandbox is stopped
            await self._daemon.call(self._check_disk)
        return code

    async def _communicate(self, exec_id: str, stdin: bytes, stdout: Output, stderr: Output) -> int | None:
        """Return the exit code of a command; None where the sandbox was stopped. Raises as `_check_life` does."""
        try:
            await streams.communicate(self._daemon.host, exec_id, stdin, stdout, stderr)
            code = await self._exit_code(exec_id)
        except SandboxError:
            await self._check_life()
            raise
        if code in DYING:
            await self._check_life()
        return code

    async def kill_agent(self) -> None:
        with contextlib.suppress(OutOfMemoryError):  # then nothing runs
            killing = await self._run(agent.KILL, user=self._agent)
            if not self._whole and (killing.exit_code or 0) > 128:  # an agent that is root can prevent it anyway
                raise SandboxError("the agent killed what was to kill its processes")

    async def keep(self) -> str:
        """End the container, and return the name of an image of all its files. See `runtimes.WholeSandbox`."""
        self._kept = f"{KEPT}:{self._name}"
        await self._daemon.fetch(self._commit)
        await self.end()
        return self._kept

    def _commit(self, client: docker.DockerClient) -> None:
        """Copy the files into the image. The files are to blame where the daemon refuses, and where it takes long but
        does not for a container without them."""
        limit = self._daemon.options.disk_mb
        size = self._measure()
        if limit is not None and size > limit * MEBIBYTE:
            raise LeftoverError(f"the harness left {size} bytes, more than runtime.disk_mb={limit}")
        seconds = COPY_SECONDS + size / COPY_RATE
        try:
            self._copy(self._name, self._kept, seconds)
        except TimeoutError as error:
            left = f"the {size / MEBIBYTE:.0f} MiB that the harness left"
            problem = f"docker commit of {left} is not done within {seconds:.0f} s"
            raise (SandboxError if self._is_slow(client, seconds) else LeftoverError)(problem) from error
        except errors.APIError as error:
            if error.status_code == 404 or "no space left" in str(error.explanation):
                raise
            raise LeftoverError(f"the files that the harness left cannot be copied: {error.explanation}") from error

    def _is_slow(self, client: docker.DockerClient, seconds: float) -> bool:
        """Return whether the daemon does not even copy a container without files of the harness in time."""
        container = f"{self._name}-control"
        client.api.create_container(self._image.id, ["true"], name=container, labels=self._labels)
        try:
            self._copy(container, f"{KEPT}:{container}", seconds)
            remove_image(client, f"{KEPT}:{container}")
        except TimeoutError:
            return True
        finally:
            remove_container(client, container)
        return False

    def _measure(self) -> int:
        """Return the bytes that the container has written."""
        with contextlib.closing(docker.DockerClient(base_url=self._daemon.host, timeout=MEASURE_SECONDS)) as client:
            try:
                found = client.api.containers(all=True, size=True, filters={"name": self._name})
            except requests.Timeout as error:
                raise SandboxError(
                    f"docker ps --size of the files that the harness left is not done within {MEASURE_SECONDS:g} s"
                ) from error
        if not found:
            raise SandboxError("the sandbox is gone: it was evicted: somebody removed its container")
        return found[0].get("SizeRw", 0)

    def _copy(self, container: str, image: str, seconds: float) -> None:
        """Make the image. Raises what the SDK raises, and `TimeoutError`: an image that comes later is removed."""
        copied = Future[None]()

        def commit() -> None:
            with contextlib.closing(docker.DockerClient(base_url=self._daemon.host, timeout=None)) as client:
                try:
                    repository, tag = image.split(":")
                    client.api.commit(container, repository=repository, tag=tag)
                    error = None
                except (errors.DockerException, requests.RequestException) as refused:
                    error = refused
                if not copied.set_running_or_notify_cancel():
                    remove_image(client, image)
                elif error is None:
                    copied.set_result(None)
                else:
                    copied.set_exception(error)

        threading.Thread(target=commit, name=image, daemon=True).start()
        try:
            copied.result(seconds)
        except TimeoutError:
            if copied.cancel():
                raise
            copied.result()

    def _check_disk(self, client: docker.DockerClient) -> None:
        """Raise `DiskFullError` where the daemon's disk is full, and this container wrote less than a sixteenth of the
        space that was free when it started. Do nothing where this process does not see the disk."""
        free = self._daemon.free(client)
        if self._free is None or free is None or free >= disk.LEAST_FREE:
            return
        if self._measure() < self._free // disk.SHARE // 2:
            raise DiskFullError("the disk of the Docker daemon is full, and this sandbox did not fill it; free space")

    async def end(self) -> None:
        await self._daemon.call(lambda client: remove_container(client, self._name))

    async def remove(self) -> None:
        if self._relay is not None:
            self._relay.close()
        if self._relay_directory is not None:
            await to_its_end(scratch_directory.remove, self._relay_directory)
        if self._kept:
            await self._daemon.call(lambda client: remove_image(client, self._kept))

    def _gateway(self) -> str:
        """Return how the gateway gets in. A relay is a process in the container, which an agent that is root ends."""
        return "namespace" if self._whole else self._daemon.options.gateway

    def _make_relay_directory(self) -> Path:
        directory = scratch_directory.make(self._request.session_id, self._daemon.options.scratch)
        (directory / "socket").mkdir()
        (directory / "socket").chmod(0o755)
        return directory

    def _create(self, client: docker.DockerClient) -> int:
        """Create and start the container; return its PID 1 as the daemon counts."""
        options = self._daemon.options
        memory = f"{options.memory_mb}m"
        container = client.containers.create(
            self._image.id,
            entrypoint=["/bin/sh", "-c", WAIT, self._name, str(math.ceil(self._request.lifetime_seconds))],
            command=[],
            healthcheck={"test": ["NONE"]},  # the image's own would run as root, on the agent's files
            name=self._name,
            user="0:0",
            hostname="sandbox",
            labels=self._labels,
            network_mode=options.bridge if self._request.spec.network == "full" else "none",
            cap_drop=["ALL"],
            cap_add=[
                "CHOWN",
                *(ROOT if self._whole else ()),
            ],  # CHOWN is for PREPARE; only an agent that is root holds it
            security_opt=list(SECURITY),
            mounts=self._mounts(),
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=options.pids,
            nano_cpus=None if options.cpus is None else int(min(options.cpus, os.cpu_count() or 1) * 1e9),
            log_config=docker_types.LogConfig(type="none"),
            **self._daemon.limits(),
        )
        try:
            container.start()
        except errors.APIError as error:
            hidden = agent.hidden_in_usr() if self._request.spec.image is None else []
            if any(str(path) in str(error.explanation) for path in hidden):
                raise SandboxError(
                    f"runtime.image is not set, and the daemon's /usr is not the gateway's, as where the gateway is in "
                    f"a container: name an image ({error.explanation})"
                ) from error
            if "/bin/sh" not in str(error.explanation):
                raise
            raise SandboxError(f"runtime.image: {self._image.name!r} has no /bin/sh: {error.explanation}") from error
        container.reload()
        return container.attrs["State"]["Pid"]

    def _mounts(self) -> list[docker_types.Mount]:
        mounts = glibc.mounts_of(self._request, has_glibc=self._image.glibc, has_git=self._image.git)
        if self._relay_directory is not None:
            mounts.append(Mount(self._relay_directory / "socket", relay.INSIDE))
        shown = [docker_types.Mount(each.inside, str(each.host), type="bind", read_only=True) for each in mounts]
        hidden = agent.hidden_in_usr() if self._request.spec.image is None else []
        return [*shown, *(docker_types.Mount(str(path), None, type="tmpfs", read_only=True) for path in hidden)]

    async def _listen(self, pid: int) -> socket.socket:
        """Return the gateway's listening socket, in the container's network namespace or on this side of the relay."""
        gateway = self._gateway()
        if gateway != "relay":
            try:
                # Daemon and gateway may count processes differently: then this number means another process here.
                if self._name.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    raise ProcessLookupError(f"process {pid} is not the container's: is the gateway in one itself?")
                return await listen_inside(pid, PROXY_PORT)
            except OSError as error:
                if gateway == "namespace":
                    raise SandboxError(
                        f"the gateway may not enter the container's network ({error}); set runtime.gateway=relay"
                    ) from error
        assert self._relay_directory is not None
        listener = listen_at(self._relay_directory / "socket")
        try:
            exec_id = await self._create_exec(relay.argv(PROXY_PORT), "0", "/", {})
            self._relay = await relay.begin(self._daemon.host, exec_id)
        except BaseException:
            listener.close()
            raise
        return listener

    async def _create_exec(self, argv: Sequence[str], user: str, workdir: str, environment: Mapping[str, str]) -> str:
        self.check("is stopped")

        def create(client: docker.DockerClient) -> str:
            try:
                created = client.api.exec_create(
                    self._name, list(argv), stdin=True, user=user, workdir=workdir, environment=dict(environment)
                )
            except errors.APIError as error:
                if error.status_code in (404, 409):  # 409: it does not run
                    self._check_runs(client)
                raise
            return created["Id"]

        return await self._daemon.call(create)

    def _check_runs(self, client: docker.DockerClient) -> None:
        """Raise `SandboxError`, with the reason, where the daemon knows that the container does not run."""
        try:
            state = client.api.inspect_container(self._name)["State"]
        except errors.NotFound as error:
            raise SandboxError("the sandbox is gone: it was evicted: somebody removed its container") from error
        if state["Running"]:
            return
        if state["ExitCode"] == 0:
            why = f"it expired after {self._request.lifetime_seconds:g} s, the sum of its session's budgets"
        elif state["OOMKilled"]:
            raise OutOfMemoryError(
                f"the sandbox is gone: out of memory (runtime.memory_mb={self._daemon.options.memory_mb})"
            )
        else:
            why = f"it was evicted: its container was ended with exit code {state['ExitCode']} {state['Error']}".strip()
        raise SandboxError(f"the sandbox is gone: {why}")

    async def _exit_code(self, exec_id: str) -> int | None:
        """Return the exit code of a command whose streams have ended; the daemon may learn it a moment later."""
        for _ in range(POLLS):
            if self.stopped:
                return None
            state = await self._daemon.call(lambda client: client.api.exec_inspect(exec_id))
            if not state["Running"] and state["ExitCode"] is not None:
                return state["ExitCode"]
            await asyncio.sleep(0.05)
        raise SandboxError("a command closed its output, but Docker does not see it end")

    async def _check_life(self) -> None:
        """Raise `SandboxError`, with the reason, where the container is dead.

        Return where a command succeeds; also where none does for a while and the container lives, as where its files
        in memory leave no memory for processes.
        """
        for _ in range(POLLS):
            if self.stopped:
                return
            await self._daemon.call(self._check_runs)
            with contextlib.suppress(SandboxError):  # the daemon knows of the death by the next turn
                if (await self._run(["/bin/sh", "-c", ":"], user="0")).exit_code == 0:
                    return
            await asyncio.sleep(0.05)

    async def _run(self, argv: Sequence[str], *, user: str) -> ExecResult:
        """Run one of the runtime's own short commands."""
        stdout, stderr = Output(CHUNK), Output(CHUNK)
        exec_id = await self._create_exec(argv, user, "/", {})
        await streams.communicate(self._daemon.host, exec_id, b"", stdout, stderr)
        return ExecResult(exit_code=await self._exit_code(exec_id), stdout=stdout.value(), stderr=stderr.value())


def _claim(image: Image, *, whole: bool) -> uids.Claim:
    """Return the agent's uid. Raises `SandboxError`."""
    if whole and image.own_user:
        raise SandboxError(f"runtime.image: {image.name!r} is made for another user than root; set USER root in it")
    if whole and image.volumes:
        raise SandboxError(
            f"runtime.image: {image.name!r} has VOLUME {', '.join(image.volumes)}, whose files would not be graded; "
            "make it without VOLUME"
        )
    if whole:
        return uids.Claim(0)
    return uids.Claim(agent.UID) if image.own_user else uids.claim()


def _said(result: ExecResult) -> str:
    return (result.stderr or result.stdout).decode(errors="replace").strip()


def remove_image(client: docker.DockerClient, image: str) -> None:
    """Remove an image. Do nothing where it does not exist."""
    with contextlib.suppress(errors.ImageNotFound):
        client.images.remove(image, force=True)


def remove_container(client: docker.DockerClient, container: str) -> None:
    """Remove a container, running or not, and wait until it is gone. Do nothing where it does not exist."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while True:
        try:
            client.api.remove_container(container, force=True, v=True)
        except errors.NotFound:
            return
        except errors.APIError as error:
            if error.status_code != 409 or time.monotonic() > deadline:  # 409: it is being removed already
                raise
            time.sleep(0.05)
