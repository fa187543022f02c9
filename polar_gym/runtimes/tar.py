"""Unpacks archives that are not trusted, also on a Python (before 3.11.4) whose `tarfile` has no filters."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Literal


def unpack(tar: tarfile.TarFile, directory: Path | str, trust: Literal["data", "tar", "fully_trusted"]) -> None:
    """Extract all, as `TarFile.extractall(directory, filter=trust)` does.

    Where `tarfile` has no filters, `data` refuses all links. Raises `tarfile.TarError` and `OSError`.
    """
    if hasattr(tarfile, "data_filter"):
        tar.extractall(directory, filter=trust)
    elif trust == "fully_trusted":
        tar.extractall(directory)
    else:
        _unpack_checked(tar, os.path.realpath(directory), links=trust == "tar")


def _unpack_checked(tar: tarfile.TarFile, root: str, *, links: bool) -> None:
    """Check and extract the members one by one: an earlier link may lead a later name out of the directory."""
    for member in tar:
        member.name = member.name.lstrip("/")
        place = os.path.realpath(os.path.join(root, member.name))  # noqa: PTH118
        if os.path.commonpath([root, place]) != root:
            raise tarfile.ExtractError(f"{member.name!r} lies outside of the archive's directory")
        if not (member.isfile() or member.isdir() or (links and (member.issym() or member.islnk()))):
            raise tarfile.ExtractError(f"{member.name!r} is neither a file nor a directory")
        tar.extract(member, root)
