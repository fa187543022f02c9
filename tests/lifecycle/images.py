"""Container images for tests, made without a registry."""

import contextlib
import io
import os
import subprocess
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import docker

from tests.support.requirements import need

BUSYBOX = Path("/bin/busybox")

BUSYBOX_FILES: Mapping[str, str] = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/group": "root:x:0:\n",
    "testbed/code.txt": "of the image\n",
    "usr/.keep": "",
}


@contextlib.contextmanager
def imported(
    host: str, files: Mapping[str, str], *, busybox: bool = True, changes: list[str] | None = None
) -> Iterator[str]:
    """An image of these files, and of one static busybox with all of its commands; its tag."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        if busybox:
            _add_busybox(tar)
        for name, text in files.items():
            _add(tar, name, text.encode(), 0o755 if "/ld-linux" in name else 0o644)
    version = uuid.uuid4().hex
    with contextlib.closing(docker.DockerClient(base_url=host)) as client:
        client.api.import_image_from_data(
            buffer.getvalue(), repository="polar-gym/test", tag=version, changes=changes or []
        )
        try:
            yield f"polar-gym/test:{version}"
        finally:
            client.images.remove(f"polar-gym/test:{version}", force=True)


def archive(host: str, image: str, path: Path) -> str:
    """The image as `docker save` writes it; what a config calls it."""
    with contextlib.closing(docker.DockerClient(base_url=host)) as client, path.open("wb") as file:
        for chunk in client.images.get(image).save(named=True):
            file.write(chunk)
    return f"docker-archive:{path}"


def _add_busybox(tar: tarfile.TarFile) -> None:
    need(os.access(BUSYBOX, os.X_OK), "a static busybox", "apt-get install busybox-static")
    _add(tar, "bin/busybox", BUSYBOX.read_bytes(), 0o755)
    for command in subprocess.check_output([BUSYBOX, "--list"], text=True).split():
        link = tarfile.TarInfo(f"bin/{command}")
        link.type, link.linkname = tarfile.SYMTYPE, "busybox"
        if command != "busybox":
            tar.addfile(link)


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))
