"""Names of images: of a registry, of a daemon, or of files of the gateway's machine."""

from __future__ import annotations

import re
from pathlib import Path

ARCHIVE = "docker-archive:"
"""Before the path of an image that `docker save` wrote."""

_NAME = re.compile(r"((docker|oras|library|https?)://)?(?!.*://)[A-Za-z0-9][A-Za-z0-9._/:@+-]*")


def image_file(image: str) -> Path | None:
    """Return the file or directory that an image is; None where it has a name. Raises `ValueError`."""
    if image.startswith(("/", ARCHIVE)):
        return Path(image.removeprefix(ARCHIVE))
    if not _NAME.fullmatch(image):
        raise ValueError("it is neither an image's name nor an absolute path")
    return None
