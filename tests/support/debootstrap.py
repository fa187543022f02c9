"""A root file system of Debian as an image, for Dockerfiles whose base image no registry gives."""

from __future__ import annotations

import subprocess
from pathlib import Path

from polar_gym.durable import make_once
from polar_gym.paths import cache_dir

PATH = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def debian(suite: str = "bookworm") -> Path:
    """Return the archive of the smallest Debian, made once for each cache by debootstrap. Needs root."""
    archive = cache_dir() / "debootstrap" / f"{suite}.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)

    def make(directory: Path) -> Path:
        root, made = directory / "root", directory / "made.tar"
        subprocess.run(["debootstrap", "--variant=minbase", suite, root], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["tar", "--create", "--file", made, "--directory", root, "."], check=True)
        return made

    make_once(archive, make)
    return archive


def import_debian(host: str, names: list[str]) -> None:
    """Have a Docker daemon know the smallest Debian under these names."""
    archive = debian()
    for name in names:
        command = ["docker", "--host", host, "import", "--change", PATH, str(archive), name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
