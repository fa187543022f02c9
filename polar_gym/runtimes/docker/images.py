"""Images of one Docker daemon: each is pulled once before a container starts, however many sessions ask for it.

All functions block: they run in the threads of `daemon`, for each name one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import docker
from docker import errors

from polar_gym.runtimes import SandboxError
from polar_gym.runtimes.glibc import GIT, LOADERS

BUILT = "polar-gym/built"
"""The repository of images that were built from directories."""
KEPT = "polar-gym/kept"
"""The repository of images of the files that agents left."""

GITS = (GIT, "/usr/local/bin/git", "/bin/git")

PullPolicy = Literal["never", "missing", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that the daemon has."""

    name: str
    id: str
    glibc: bool
    """Whether programs that were built for glibc find their loader in it."""
    git: bool
    own_user: bool = False
    """Whether the image was made for another user than root, whose files no other uid may read or change."""
    volumes: tuple[str, ...] = ()
    """The directories whose files no copy of a container has."""


class Images:
    """Finds and pulls the images of a daemon, and knows what was found in them."""

    def __init__(self, policy: PullPolicy) -> None:
        self._policy: PullPolicy = policy
        self._pulled: set[str] = set()
        self._known: dict[str, Image] = {}

    def get(self, client: docker.DockerClient, name: str) -> Image:
        """Return the image called `name`, pulled if the policy says so. Raises `SandboxError`."""
        made_here = name.startswith((f"{BUILT}:", f"{KEPT}:"))  # no registry has it
        if self._policy == "always" and name not in self._pulled and not made_here:
            self._pull(client, name)
        found = self._find(client, name)
        if found is None and self._policy == "missing":
            self._pull(client, name)
            found = self._find(client, name)
        if found is None:
            raise SandboxError(
                f"runtime.image: {name!r} is not on this machine; get it with: docker pull {name}, or set "
                "runtime.pull=missing"
            )
        if name.startswith(f"{KEPT}:"):
            return _look_into(client, name, found)  # of one session, and soon removed
        if found not in self._known:
            self._known[found] = _look_into(client, name, found)
        return replace(self._known[found], name=name)

    def _pull(self, client: docker.DockerClient, name: str) -> None:
        try:
            client.images.pull(name)
        except errors.APIError as error:
            raise SandboxError(
                f"runtime.image: {name!r} could not be pulled ({error.explanation or error}); correct its name, or get "
                f"it onto this machine yourself (docker pull {name}, docker load) and set runtime.pull=never"
            ) from error
        self._pulled.add(name)

    def _find(self, client: docker.DockerClient, name: str) -> str | None:
        try:
            return client.images.get(name).id
        except errors.ImageNotFound:
            return None


def _look_into(client: docker.DockerClient, name: str, image: str) -> Image:
    """Return the image of this id. Its files are looked for in a container that is never started."""
    config = client.api.inspect_image(image)["Config"]
    user, volumes = config.get("User") or "root", tuple(config.get("Volumes") or ())
    container = client.api.create_container(image, entrypoint=["/bin/sh"], network_disabled=True)["Id"]
    try:
        glibc, git = (any(_has_file(client, container, path) for path in paths) for paths in (LOADERS, GITS))
        own_user = user.split(":")[0] not in ("root", "0")
        return Image(name=name, id=image, glibc=glibc, git=git, own_user=own_user, volumes=volumes)
    finally:
        client.api.remove_container(container, force=True, v=True)


def _has_file(client: docker.DockerClient, container: str, path: str) -> bool:
    try:
        stream, _ = client.api.get_archive(container, path)
    except errors.NotFound:
        return False
    stream.close()
    return True
