"""The names of images: a name in a registry or a daemon, or a file of the gateway's machine."""

from __future__ import annotations

import re
from pathlib import Path

ARCHIVE = "docker-archive:"
"""The prefix before the path of an image that `docker save` wrote."""

DOCKERFILE = "dockerfile:"
"""The prefix before the path of a directory with a Dockerfile, from which docker builds the image."""

_NAME = re.compile(r"((docker|oras|library|https?)://)?(?!.*://)[A-Za-z0-9][A-Za-z0-9._/:@+-]*")


def image_file(image: str) -> Path | None:
    """Return the file or directory that `image` names; None where it is a name. Raises `ValueError`."""
    if image.startswith(("/", ARCHIVE, DOCKERFILE)):
        return Path(image.removeprefix(ARCHIVE).removeprefix(DOCKERFILE))
    if not _NAME.fullmatch(image):
        raise ValueError("it is neither an image's name nor an absolute path")
    return None
