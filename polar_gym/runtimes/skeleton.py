"""A container image without a registry: empty directories, to be run with the host's /usr mounted read-only.

The image gives a sandbox the gateway machine's own python, node and git in a tenth of a second. Its tag holds a digest
of its content, so that a newer version of this package never uses an older image.
"""

from __future__ import annotations

import hashlib
import io
import tarfile

import docker

from polar_gym.runtimes import HOME, agent

_DIRECTORIES = {
    **dict.fromkeys(("dev", "etc", "etc/ssl", "home", HOME[1:], "opt", "proc", "run", "sys", "usr", "var"), 0o755),
    "root": 0o700,
    "tmp": 0o1777,
    "var/tmp": 0o1777,
}


def skeleton() -> bytes:
    """Return the image's root filesystem as a tar; the bytes are the same every time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, mode in _DIRECTORIES.items():
            tar.addfile(_entry(name, tarfile.DIRTYPE, mode))
        for path, target in agent.host_root_links().items():
            link = _entry(path.lstrip("/"), tarfile.SYMTYPE, 0o777)
            link.linkname = target
            tar.addfile(link)
        for name, text in agent.ETC.items():
            file = _entry(f"etc/{name}", tarfile.REGTYPE, 0o644)
            file.size = len(text)
            tar.addfile(file, io.BytesIO(text.encode()))
    return buffer.getvalue()


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = kind, mode
    return entry


def skeleton_tag() -> str:
    return f"polar-gym/skeleton:{hashlib.sha256(skeleton()).hexdigest()[:12]}"


def import_skeleton(client: docker.DockerClient, tag: str) -> None:
    """Make the image, unless the daemon has it. Raises `docker.errors.DockerException`."""
    if client.images.list(tag):
        return
    repository, _, version = tag.partition(":")
    environment = [f"ENV {name}={value}" for name, value in agent.ENVIRONMENT.items()]
    client.api.import_image_from_data(skeleton(), repository=repository, tag=version, changes=environment)
