"""Sandboxes as containers: an image, limits by the kernel's control groups, and no network.

A container's PID 1 belongs to root and does nothing but wait; commands are run beside it as the agent's uid. So one
`kill -9 -1` as that uid ends every process that the agent ever started, however it hid them, and not the container.
Docker has no time limit for a command: the runtime watches the clock itself, and `timeout` inside the container only
stands by for the day the gateway dies. Commands of one sandbox run one at a time.

The gateway gets into the container's empty network either by a socket made in its network namespace, or, where the
gateway may not enter that (not root, or in a container itself), by a mounted Unix socket and a relay.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import socket
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

import docker
import requests
from docker import errors
from docker import types as docker_types
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
    docker_exec,
    files,
    relay,
    scratch_directory,
)
from polar_gym.runtimes.listener import listen_inside
from polar_gym.runtimes.output import CHUNK, Output
from polar_gym.runtimes.skeleton import import_skeleton, skeleton_tag

T = TypeVar("T")

SESSION_LABEL = "polar-gym.session"
AGENT = f"{agent.UID}:{agent.GID}"

WAIT = "while :; do sleep 3600 & wait $!; done"
"""PID 1: a shell, because it also buries the orphans that come to it."""

PREPARE = """
set -e
mkdir -p "$1" "$2"
chown 1000:1000 "$1"
chown -R 1000:1000 "$2"
grep -q '^[^:]*:[^:]*:1000:' /etc/passwd || echo "agent:x:1000:1000:agent:$1:/bin/sh" >> /etc/passwd
"""

RUN = 'timeout -s KILL "$@"; code=$?; kill -9 -1 2> /dev/null; exit $code'
"""Around every command: when it ends, so does what it left behind."""

KILL_ATTEMPTS = 10
BACKSTOP_SECONDS = 30
EXIT_POLLS = 200
SDK_SECONDS = 120


class DockerOptions(Options):
    host: str | None = None
    """The daemon, on this machine. Default: DOCKER_HOST, else its usual socket."""
    host_usr: bool = True
    """Without an image: an empty one with this machine's /usr, read-only. False: an image is required."""
    gateway: Literal["auto", "namespace", "relay"] = "auto"
    """How the gateway gets into the sandbox's network: by joining it (root only), or by a relay inside."""
    scratch: Path | None = None
    """For the relay's socket; a gateway in a container needs one that is mounted at the same path as on the host.
    Default: the system's temporary directory."""
    cpus: float | None = Field(default=None, gt=0)
    """How many a sandbox may use; null: all."""
    memory_mb: int = Field(default=8192, gt=0)
    """What a sandbox may use."""
    pids: int = Field(default=1024, gt=0)
    """Processes and threads of a sandbox."""


class Docker:
    """Starts sandboxes as containers of a daemon on this machine."""

    Options = DockerOptions

    def __init__(self, options: DockerOptions) -> None:
        self.options = options
        self.host = options.host or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        # The event loop's default pool is shared with everything else and small.
        self._executor = ThreadPoolExecutor(max_workers=16, thread_name_prefix="polar-gym-docker")
        self._connecting = threading.Lock()
        self._client: docker.DockerClient | None = None

    def check(self) -> list[str]:
        try:
            self._connected().ping()
        except (errors.DockerException, requests.RequestException) as error:
            return [
                f"no Docker daemon answers at {self.host} ({error}); install and start one with: "
                "apt-get install docker.io && (systemctl start docker || dockerd &)"
            ]
        if not self.options.host_usr:
            return []
        missing = [
            f"{program} is missing; install it with: apt-get install {program}"
            for program in ("git", "tar")
            if not shutil.which(program)
        ]
        if "/bin" not in agent.host_root_links():
            missing.append("/bin is no link into /usr; install with: apt-get install usrmerge, or set runtime.image")
        return missing

    async def start(self, request: SandboxRequest) -> DockerSandbox:
        image = await self.call(lambda client: self._image(client, request.spec.image))
        sandbox = DockerSandbox(self, request, image)
        try:
            await sandbox.start()
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def reap(self, session_ids: Collection[str]) -> int:
        """Remove the containers that a killed gateway left of these sessions; how many there were."""

        def remove(client: docker.DockerClient) -> int:
            containers = client.api.containers(all=True, filters={"label": SESSION_LABEL})
            orphans = [each["Id"] for each in containers if each["Labels"][SESSION_LABEL] in session_ids]
            for orphan in orphans:
                _remove(client, orphan)
            for directory in scratch_directory.orphans(session_ids, self.options.scratch):
                scratch_directory.remove(directory)
            return len(orphans)

        return await self.call(remove)

    async def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._executor.shutdown(wait=False)

    async def call(self, function: Callable[[docker.DockerClient], T]) -> T:
        """Run SDK calls off the event loop. Cancelling waits for the call to end, so that nothing is made behind the
        back of who cleans up. Raises `SandboxError`.
        """
        running = asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(self._connected()))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise
        except (errors.DockerException, requests.RequestException) as error:
            raise SandboxError(f"Docker at {self.host}: {error}") from error

    def _connected(self) -> docker.DockerClient:
        with self._connecting:
            if self._client is None:
                self._client = docker.DockerClient(base_url=self.host, timeout=SDK_SECONDS)
            return self._client

    def _image(self, client: docker.DockerClient, image: str | None) -> str:
        """The image to run, which is on this machine. Raises `SandboxError`."""
        if image is None:
            if not self.options.host_usr:
                raise SandboxError("runtime.image is not set: name an image, or set runtime.host_usr=true")
            image = skeleton_tag()
            import_skeleton(client, image)
        try:
            client.images.get(image)
        except errors.ImageNotFound as error:
            raise SandboxError(
                f"runtime.image: {image!r} is not on this machine; get it with: docker pull {image}"
            ) from error
        return image


class DockerSandbox:
    """A running container."""

    base_url: str = f"http://127.0.0.1:{GATEWAY_PORT}"

    def __init__(self, runtime: Docker, request: SandboxRequest, image: str) -> None:
        self._runtime = runtime
        self._request = request
        self._image = image
        self._name = f"polar-gym-{uuid.uuid4().hex[:16]}"
        self._relay_directory: Path | None = None
        self._relay: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None
        self._one_at_a_time = asyncio.Lock()
        self._stopped = False

    async def start(self) -> None:
        workspace = self._request.spec.workspace.path
        if self._request.serve is not None and self._runtime.options.gateway != "namespace":
            self._relay_directory = scratch_directory.make(self._request.session_id, self._runtime.options.scratch)
            (self._relay_directory / "socket").mkdir()
            (self._relay_directory / "socket").chmod(0o755)
        pid = await self._runtime.call(self._create)
        prepared = await self._run(["/bin/sh", "-c", PREPARE, "sh", HOME, workspace], user="0")
        if prepared.exit_code != 0:
            raise SandboxError(
                f"the image {self._image} could not be prepared: {prepared.stderr.decode(errors='replace').strip()}"
            )
        if self._request.workspace is not None:
            archive = await asyncio.to_thread(files.pack, self._request.workspace)
            await files.unpack(self, archive, workspace)
        if self._request.serve is not None:
            self._server = await self._request.serve(await self._listen(pid))

    async def exec(self, command: Command) -> ExecResult:
        environment = {**agent.IDENTITY, **self._request.spec.environment, **command.environment}
        backstop = str(math.ceil(command.timeout_seconds) + BACKSTOP_SECONDS)
        argv = ["/bin/sh", "-c", RUN, "sh", backstop, *command.argv]
        workdir = command.workdir or self._request.spec.workspace.path
        stdout, stderr = Output(command.output_limit), Output(command.output_limit)
        async with self._one_at_a_time:
            exec_id = await self._create_exec(argv, AGENT, workdir, environment)
            streams = asyncio.create_task(
                docker_exec.communicate(self._runtime.host, exec_id, command.stdin, stdout, stderr)
            )
            ending = asyncio.create_task((command.end or asyncio.Event()).wait())
            try:
                limit = command.timeout_seconds
                await asyncio.wait({streams, ending}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ending.cancel()
                # Also when this task is cancelled.
                timed_out = not streams.done()
                if timed_out:
                    await self._kill(streams)
            await streams
            if self._stopped:
                raise SandboxError(f"the sandbox of session {self._request.session_id} was stopped during a command")
            exit_code = None if timed_out else await self._exit_code(exec_id)
        return ExecResult(exit_code=exit_code, stdout=stdout.value(), stderr=stderr.value(), timed_out=timed_out)

    async def stop(self) -> None:
        self._stopped = True
        if self._server is not None:
            self._server.close()
        await self._runtime.call(lambda client: _remove(client, self._name))
        if self._relay is not None:
            self._relay.close()
        if self._relay_directory is not None:
            scratch_directory.remove(self._relay_directory)

    def _create(self, client: docker.DockerClient) -> int:
        """Create and start the container; its PID 1 as the daemon counts."""
        options = self._runtime.options
        memory = f"{options.memory_mb}m"
        container = client.containers.create(
            self._image,
            entrypoint=["/bin/sh", "-c", WAIT, self._name],
            command=[],
            name=self._name,
            user="0:0",
            hostname="sandbox",
            labels={SESSION_LABEL: self._request.session_id},
            network_mode="none",
            cap_drop=["ALL"],
            cap_add=["CHOWN"],  # for PREPARE; agents, not being root, never hold it
            security_opt=["no-new-privileges"],
            mounts=self._mounts(),
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=options.pids,
            nano_cpus=None if options.cpus is None else int(options.cpus * 1e9),
            log_config=docker_types.LogConfig(type="none"),
        )
        container.start()
        container.reload()
        return container.attrs["State"]["Pid"]

    def _mounts(self) -> list[docker_types.Mount]:
        mounts = [(str(mount.host), mount.inside) for mount in self._request.mounts]
        if self._request.spec.image is None:
            mounts += [("/usr", "/usr"), *((str(path.resolve()), str(path)) for path in agent.host_etc())]
        if self._relay_directory is not None:
            mounts.append((str(self._relay_directory / "socket"), relay.INSIDE))
        return [docker_types.Mount(inside, host, type="bind", read_only=True) for host, inside in mounts]

    async def _listen(self, pid: int) -> socket.socket:
        """The gateway's listening socket, in the container's network namespace or on this side of the relay."""
        gateway = self._runtime.options.gateway
        if gateway != "relay":
            try:
                # Daemon and gateway may count processes differently: then that number is something else's here.
                if self._name.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    raise ProcessLookupError(f"process {pid} is not the container's: is the gateway in one itself?")
                return await listen_inside(pid, GATEWAY_PORT)
            except OSError as error:
                if gateway == "namespace":
                    raise SandboxError(
                        f"the gateway may not enter the container's network ({error}); set runtime.gateway=relay"
                    ) from error
        assert self._relay_directory is not None
        listener = relay.listen(self._relay_directory / "socket")
        try:
            exec_id = await self._create_exec(relay.argv(GATEWAY_PORT), "0", "/", {})
            self._relay = await relay.begin(self._runtime.host, exec_id)
        except BaseException:
            listener.close()
            raise
        return listener

    async def _create_exec(self, argv: Sequence[str], user: str, workdir: str, environment: Mapping[str, str]) -> str:
        if self._stopped:
            raise SandboxError(f"the sandbox of session {self._request.session_id} is stopped")

        def create(client: docker.DockerClient) -> str:
            created = client.api.exec_create(
                self._name, list(argv), stdin=True, user=user, workdir=workdir, environment=dict(environment)
            )
            return created["Id"]

        return await self._runtime.call(create)

    async def _exit_code(self, exec_id: str) -> int:
        """What a command whose streams have ended exited with: the daemon may learn it a moment later."""
        for _ in range(EXIT_POLLS):
            state = await self._runtime.call(lambda client: client.api.exec_inspect(exec_id))
            if not state["Running"] and state["ExitCode"] is not None:
                return state["ExitCode"]
            await asyncio.sleep(0.05)
        raise SandboxError("a command closed its output, but Docker does not see it end")

    async def _run(self, argv: Sequence[str], *, user: str) -> ExecResult:
        """One of the runtime's own short commands."""
        stdout, stderr = Output(CHUNK), Output(CHUNK)
        exec_id = await self._create_exec(argv, user, "/", {})
        await docker_exec.communicate(self._runtime.host, exec_id, b"", stdout, stderr)
        return ExecResult(
            exit_code=await self._exit_code(exec_id), stdout=stdout.value(), stderr=stderr.value(), timed_out=False
        )

    async def _kill(self, streams: asyncio.Task[None]) -> None:
        """Kill every process of the agent, until the running command's streams end.

        More than once, because the command may only be about to start. Raises `SandboxError` when it does not help, and
        removes the container: no process of an agent outlives its limit.
        """
        for _ in range(KILL_ATTEMPTS):
            if self._stopped:  # the container is being removed, and everything in it
                await asyncio.wait({streams})
                return
            await self._run(["/bin/sh", "-c", "kill -9 -1"], user=AGENT)
            await asyncio.wait({streams}, timeout=1)
            if streams.done():
                return
        await self._runtime.call(lambda client: _remove(client, self._name))
        raise SandboxError("a command could not be killed at its time limit; its sandbox was removed")


def _remove(client: docker.DockerClient, container: str) -> None:
    try:
        client.api.remove_container(container, force=True, v=True)
    except errors.NotFound:
        return


RUNTIME = Docker
