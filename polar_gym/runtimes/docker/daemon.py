"""One Docker daemon, as the runtime and its sandboxes use it: SDK calls off the event loop.

The SDK blocks, so all its calls run in threads of the daemon's own. Images, which may take minutes, have other threads
than running sandboxes. Containers are started in fewer threads still, and not faster than a daemon can start them,
whatever the number of sessions that ask for one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import docker
import requests
from docker import errors
from docker import types as docker_types
from pydantic import Field

from polar_gym.registry import Names
from polar_gym.runtimes import SandboxError
from polar_gym.runtimes.docker.images import Images, PullPolicy
from polar_gym.runtimes.glibc import NodeCheck
from polar_gym.runtimes.kernel import disk
from polar_gym.runtimes.limits import MEBIBYTE, LimitOptions
from polar_gym.runtimes.threads import finish

log = logging.getLogger(__name__)

T = TypeVar("T")

SDK_SECONDS = 120
CALL_THREADS = 16
IMAGE_THREADS = 16
START_THREADS = 4


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
    pull: PullPolicy = "missing"
    """When an image is fetched from its registry: `never`, when it is `missing`, or `always` once by each gateway."""
    bridge: Annotated[str, Names.OTHER] = "bridge"
    """The Docker network that sandboxes with `network: full` join."""
    starts_per_second: float = Field(default=10.0, ge=0.1)
    """How many containers the daemon is asked to begin; it does about five a second on a small machine."""

    build_seconds: float = Field(default=600.0, gt=0)
    """Time for the build of an image whose name is `dockerfile:DIRECTORY`."""
    build_network: Annotated[str, Names.OTHER] = "default"
    """The Docker network in which such an image is built, e.g. `host`."""
    build_args: Annotated[dict[str, str], Names.OTHER] = Field(default_factory=dict)
    """The arguments of such a build (`ARG` in the Dockerfile)."""

    def shares_network(self) -> bool:
        return self.bridge == "host" or self.bridge.startswith("container:")


class Starts:
    """The starts of containers on one daemon, by all runtimes of this process: few at once, and paced."""

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


class Daemon:
    """The daemon on this machine that the options name."""

    def __init__(self, options: DockerOptions) -> None:
        self.options = options
        self.host = options.host or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        self.images = Images(options.pull)
        self.node_check = NodeCheck()
        # The event loop's default pool is shared with everything else and small.
        self._executor = ThreadPoolExecutor(max_workers=CALL_THREADS, thread_name_prefix="polar-gym-docker")
        self._fetching = ThreadPoolExecutor(max_workers=IMAGE_THREADS, thread_name_prefix="polar-gym-docker-image")
        self._starts = Starts.of(self.host)
        self._deciding = threading.Lock()
        self._client: docker.DockerClient | None = None
        self._whole_disk = True
        """Whether the daemon limits what a container writes: true until the daemon has refused to."""
        self._root: Path | None = None

    def connected(self) -> docker.DockerClient:
        """Return the SDK's client. Blocks the first time. Raises `docker.errors.DockerException`."""
        with self._deciding:
            if self._client is None:
                self._client = docker.DockerClient(base_url=self.host, timeout=SDK_SECONDS)
            return self._client

    def free(self, client: docker.DockerClient) -> int | None:
        """Return the bytes that are free on the disk of the daemon's containers; None where this process does not see
        the disk, because the daemon is on another machine or the gateway is in a container. Blocks the first time."""
        if not self.host.startswith("unix://"):
            return None
        if self._root is None:
            self._root = Path(client.info()["DockerRootDir"])
        try:
            return disk.free(self._root / "containers")
        except OSError:
            return None

    async def call(self, function: Callable[[docker.DockerClient], T]) -> T:
        """Run SDK calls off the event loop. Raises `SandboxError`.

        Cancelling waits for the call to end, so that nothing is made after the caller has cleaned up.
        """
        return await self._run(self._executor, function)

    async def fetch(self, function: Callable[[docker.DockerClient], T]) -> T:
        """Run SDK calls that pull or build an image, as `call` does."""
        return await self._run(self._fetching, function)

    async def begin(self, function: Callable[[docker.DockerClient], T]) -> T:
        """Run SDK calls that start a container, in their turn, as `call` does."""

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

    def limits(self) -> dict[str, Any]:
        """Return the options of a new container that limit its disk and its dumps of core.

        Each file is limited too: a daemon with containerd's image store takes `storage_opt` and ignores it.
        """
        limits = {"core": 0}
        if self.options.disk_mb is not None:
            limits["fsize"] = self.options.disk_mb * MEBIBYTE
        ulimits = [docker_types.Ulimit(name=name, soft=size, hard=size) for name, size in limits.items()]
        if self.options.disk_mb is None or not self._whole_disk:
            return {"ulimits": ulimits}
        return {"ulimits": ulimits, "storage_opt": {"size": f"{self.options.disk_mb}m"}}

    async def _run(self, executor: ThreadPoolExecutor, function: Callable[[docker.DockerClient], T]) -> T:
        try:
            loop = asyncio.get_running_loop()
            return await finish(loop.run_in_executor(executor, lambda: function(self.connected())))
        except (errors.DockerException, requests.RequestException) as error:
            raise SandboxError(f"Docker at {self.host}: {error}") from error

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._executor.shutdown(wait=False)
        self._fetching.shutdown(wait=False)
