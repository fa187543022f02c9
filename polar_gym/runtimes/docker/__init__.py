"""Sandboxes as containers: an image, limits by the kernel's control groups, and no network.

The SDK blocks, so all its calls run in threads of the runtime's own; containers are begun in fewer threads still and
not faster than a daemon can, whatever the number of sessions that ask for one. What happens in a container is told in
`docker_sandbox`.

The gateway gets into the container's empty network either by a socket made in its network namespace, or, where the
gateway may not enter that (not root, or in a container itself), by a mounted Unix socket and a relay.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import docker
import requests
from docker import errors
from docker import types as docker_types
from pydantic import Field

from polar_gym.registry import Names
from polar_gym.runtimes import SandboxError, SandboxRequest, agent, scratch_directory
from polar_gym.runtimes.docker.images import Image, Images, PullPolicy
from polar_gym.runtimes.docker.sandbox import SESSION_LABEL, DockerSandbox, remove_container
from polar_gym.runtimes.limits import MEBIBYTE, LimitOptions
from polar_gym.runtimes.skeleton import import_skeleton, skeleton_tag

log = logging.getLogger(__name__)

T = TypeVar("T")

SDK_SECONDS = 120
CALL_THREADS = 16
START_THREADS = 4


class Starts:
    """The beginnings of containers on one daemon, by all runtimes of this process: few at once, and paced."""

    _of_daemons: ClassVar[dict[str, Starts]] = {}

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(max_workers=START_THREADS, thread_name_prefix="polar-gym-docker-start")
        self._pacing = threading.Lock()
        self._next = 0.0

    @classmethod
    def of(cls, host: str) -> Starts:
        return cls._of_daemons.setdefault(host, cls())

    def wait(self, per_second: float) -> None:
        """Wait for this start's turn."""
        with self._pacing:
            turn = max(self._next, time.monotonic())
            self._next = turn + 1 / per_second
        time.sleep(max(0.0, turn - time.monotonic()))


class DockerOptions(LimitOptions):
    host: Annotated[str | None, Names.OTHER] = None
    """The daemon, on this machine. Default: DOCKER_HOST, else its usual socket."""
    host_usr: bool = True
    """Without an image: an empty one with this machine's /usr, read-only. False: an image is required."""
    gateway: Literal["auto", "namespace", "relay"] = "auto"
    """How the gateway gets into the sandbox's network: by joining it (root only), or by a relay inside."""
    scratch: Annotated[Path | None, Names.OTHER] = None
    """For the relay's socket; a gateway in a container needs one that is mounted at the same path as on the host.
    Default: the system's temporary directory."""
    disk_mb: int | None = Field(default=16384, gt=0)
    """What a sandbox may write. Only some storage drivers keep it (overlay2 on XFS with quotas, btrfs, zfs); elsewhere
    it limits each file alone. null: no limit."""
    pull: PullPolicy = "missing"
    """When an image is fetched from its registry: `never`, when it is `missing`, or `always` once by each gateway."""
    bridge: Annotated[str, Names.OTHER] = "bridge"
    """The Docker network that sandboxes with `network: full` join."""
    starts_per_second: float = Field(default=10.0, ge=0.1)
    """How many containers the daemon is asked to begin; it does about five a second on a small machine."""

    def shares_network(self) -> bool:
        return self.bridge == "host" or self.bridge.startswith("container:")


class Docker:
    """Starts sandboxes as containers of a daemon on this machine."""

    Options = DockerOptions

    def __init__(self, options: DockerOptions) -> None:
        self.options = options
        self.host = options.host or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        # The event loop's default pool is shared with everything else and small.
        self._executor = ThreadPoolExecutor(max_workers=CALL_THREADS, thread_name_prefix="polar-gym-docker")
        self._starts = Starts.of(self.host)
        self.images = Images(options.pull)
        self._deciding = threading.Lock()
        self._client: docker.DockerClient | None = None
        self._whole_disk = True
        """Whether the daemon limits what a container writes; until it has refused to."""

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

    def caveats(self) -> list[str]:
        client = self._connected()
        info = client.info()
        limits = {"MemoryLimit": "memory", "PidsLimit": "processes", "CpuCfsQuota": "cores"}
        found = [f"the daemon does not limit {what}" for key, what in limits.items() if not info.get(key)]
        backing = dict(info.get("DriverStatus") or []).get("Backing Filesystem", "")
        if info["Driver"] not in ("btrfs", "zfs") and not (info["Driver"] == "overlay2" and backing == "xfs"):
            found.append(
                f"the storage driver {info['Driver']} on {backing or 'this disk'} limits the size of each file alone, "
                "not what a sandbox writes"
            )
        return found

    async def start(self, request: SandboxRequest) -> DockerSandbox:
        image = await self.call(lambda client: self._image(client, request.spec.image))
        sandbox = DockerSandbox(self, request, image)
        try:
            await sandbox.start()
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def prepare(self, images: Collection[str]) -> None:
        """Have these images on this machine before the first sandbox asks for one. Raises `SandboxError`."""
        for image in images:
            await self.call(lambda client, name=image: self._image(client, name))

    async def reap(self, session_ids: Collection[str]) -> int:
        """Remove the containers that a killed gateway left of these sessions; how many there were."""

        def remove(client: docker.DockerClient) -> int:
            containers = client.api.containers(all=True, filters={"label": SESSION_LABEL})
            orphans = [each["Id"] for each in containers if each["Labels"][SESSION_LABEL] in session_ids]
            for orphan in orphans:
                remove_container(client, orphan)
            directories = scratch_directory.orphans(session_ids, self.options.scratch)
            for directory in directories:
                scratch_directory.remove(directory)
            return max(len(orphans), len(directories))

        return await self.call(remove)

    async def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._executor.shutdown(wait=False)

    async def call(self, function: Callable[[docker.DockerClient], T]) -> T:
        """Run SDK calls off the event loop. Cancelling waits for the call to end, so that nothing is made behind the
        back of who cleans up. Raises `SandboxError`.
        """
        return await self._run(self._executor, function)

    async def begin(self, function: Callable[[docker.DockerClient], T]) -> T:
        """Like `call`, for what begins a container: in its turn."""

        def in_turn(client: docker.DockerClient) -> T:
            self._starts.wait(self.options.starts_per_second)
            try:
                return function(client)
            except errors.APIError as error:
                if "storage-opt" not in str(error.explanation):
                    raise
                self._refuse_disk_limit(str(error.explanation))
                return function(client)

        return await self._run(self._starts.executor, in_turn)

    def _refuse_disk_limit(self, reason: str) -> None:
        with self._deciding:
            if self._whole_disk:
                self._whole_disk = False
                log.warning("docker: runtime.disk_mb limits each file alone: %s", reason)

    def disk_limit(self) -> dict[str, Any]:
        """What a new container is told about the disk."""
        limit = self.options.disk_mb
        if limit is None:
            return {}
        if self._whole_disk:
            return {"storage_opt": {"size": f"{limit}m"}}
        size = limit * MEBIBYTE
        return {"ulimits": [docker_types.Ulimit(name="fsize", soft=size, hard=size)]}

    async def _run(self, executor: ThreadPoolExecutor, function: Callable[[docker.DockerClient], T]) -> T:
        running = asyncio.get_running_loop().run_in_executor(executor, lambda: function(self._connected()))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise
        except (errors.DockerException, requests.RequestException) as error:
            raise SandboxError(f"Docker at {self.host}: {error}") from error

    def _connected(self) -> docker.DockerClient:
        with self._deciding:
            if self._client is None:
                self._client = docker.DockerClient(base_url=self.host, timeout=SDK_SECONDS)
            return self._client

    def _image(self, client: docker.DockerClient, name: str | None) -> Image:
        """The image to run, which is on this machine. Raises `SandboxError`."""
        if name is not None:
            return self.images.get(client, name)
        if not self.options.host_usr:
            raise SandboxError("runtime.image is not set: name an image, or set runtime.host_usr=true")
        tag = skeleton_tag()
        import_skeleton(client, tag)
        return Image(name=tag, id=tag, glibc=True, git=True)


RUNTIME = Docker
