"""Sandboxes as containers: an image, limits by the kernel's control groups, and no network.

`daemon` makes the SDK's calls, `images` finds and pulls images, `builds` builds them, and `sandbox` is one container.
`streams` runs commands in a container, and `relay` is one way of the gateway into a container.

The gateway gets into the container's empty network by a socket made in its network namespace. Where the gateway may not
enter that (not root, or in a container itself), it uses a mounted Unix socket and a relay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from weakref import WeakValueDictionary

import docker
import requests
from docker import errors

from polar_gym.runtimes import SandboxError, SandboxRequest, agent, processes, scratch_directory
from polar_gym.runtimes.docker.builds import build
from polar_gym.runtimes.docker.daemon import Daemon, DockerOptions
from polar_gym.runtimes.docker.images import Image
from polar_gym.runtimes.docker.sandbox import SESSION_LABEL, DockerSandbox, remove_container, remove_image
from polar_gym.runtimes.image_names import DOCKERFILE
from polar_gym.runtimes.skeleton import import_skeleton, skeleton_tag


def _reason(error: BaseException) -> str:
    """Describe an error of the SDK by the operating system's error that it hides, or else by its own text."""
    first = error
    while (cause := first.__cause__ or first.__context__) is not None:
        first = cause
    return first.strerror if isinstance(first, OSError) and first.strerror else str(error)


class Docker:
    """Starts sandboxes as containers of a daemon on this machine."""

    Options = DockerOptions
    whole = True
    shows_usr = True

    def __init__(self, options: DockerOptions) -> None:
        self._daemon = Daemon(options)
        self._getting: WeakValueDictionary[str | None, asyncio.Lock] = WeakValueDictionary()

    def check(self) -> list[str]:
        try:
            self._daemon.connected().ping()
        except (errors.DockerException, requests.RequestException) as error:
            return [
                f"no Docker daemon answers at {self._daemon.host} ({_reason(error)}); install and start one with: "
                "apt-get install docker.io && (systemctl start docker || dockerd &)"
            ]
        if not self._daemon.options.host_usr:
            return []
        missing = processes.missing({"git": "git", "tar": "tar"})
        if "/bin" not in agent.host_root_links():
            missing.append("/bin is not a link into /usr; install with: apt-get install usrmerge, or set runtime.image")
        return missing

    def caveats(self) -> list[str]:
        client = self._daemon.connected()
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
        image = await self._get(request.spec.image)
        sandbox = DockerSandbox(self._daemon, request, image)
        try:
            await sandbox.start()
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def prepare(self, images: Collection[str]) -> None:
        """Get these images onto this machine before the first sandbox asks for one. Raises `SandboxError`."""
        for image in images:
            await self._get(image)

    async def reap(self, session_ids: Collection[str]) -> int:
        """Remove the containers that a killed gateway left of these sessions, and return how many there were."""

        def remove(client: docker.DockerClient) -> int:
            containers = client.api.containers(all=True, filters={"label": SESSION_LABEL})
            orphans = [each["Id"] for each in containers if each["Labels"][SESSION_LABEL] in session_ids]
            for orphan in orphans:
                remove_container(client, orphan)
            for image in client.images.list(filters={"label": SESSION_LABEL}):
                if image.labels[SESSION_LABEL] in session_ids:
                    remove_image(client, str(image.id))
            directories = scratch_directory.orphans(session_ids, self._daemon.options.scratch)
            for directory in directories:
                scratch_directory.remove(directory)
            return max(len(orphans), len(directories))

        return await self._daemon.call(remove)

    async def close(self) -> None:
        self._daemon.close()

    async def _get(self, name: str | None) -> Image:
        """Return the image to run. Of all who ask for one image, one alone holds a thread. Raises `SandboxError`."""
        async with self._getting.setdefault(name, asyncio.Lock()):
            return await self._daemon.fetch(lambda client: self._image(client, name))

    def _image(self, client: docker.DockerClient, name: str | None) -> Image:
        """Return the image to run, after it was brought onto this machine. Raises `SandboxError`."""
        if name is not None:
            return self._daemon.images.get(client, self._built(name))
        if not self._daemon.options.host_usr:
            raise SandboxError("runtime.image is not set: name an image, or set runtime.host_usr=true")
        tag = skeleton_tag()
        import_skeleton(client, tag)
        return Image(name=tag, id=tag, glibc=True, git=True)

    def _built(self, name: str) -> str:
        """Return the name of an image that the daemon may have, after it was built from a Dockerfile if it must be."""
        if not name.startswith(DOCKERFILE):
            return name
        options, directory = self._daemon.options, Path(name.removeprefix(DOCKERFILE))
        return build(
            self._daemon.host,
            directory,
            arguments=options.build_args,
            network=options.build_network,
            seconds=options.build_seconds,
        )


RUNTIME = Docker
