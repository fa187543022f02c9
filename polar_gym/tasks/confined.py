"""Keeps the files that data may name on the gateway's machine below the directories that the operator has named.

A name may lead elsewhere by a symbolic link. A git repository may also lead elsewhere by a `.git` file that names
another repository, or by objects in another repository (`objects/info/alternates`). All of these are followed first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path


def confined(path: Path, directories: Sequence[Path]) -> Path:
    """Return the path with all links resolved. Raises `ValueError` if the result is in none of the directories."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a ring of links, or a NUL
        raise ValueError(f"{str(path)!r} leads nowhere: {error}") from error
    if not any(real.is_relative_to(directory.resolve()) for directory in directories):
        raise ValueError(f"{real} is in none of {', '.join(map(str, directories)) or 'the allowed directories: none'}")
    return real


def confined_workspace(path: Path, directories: Sequence[Path]) -> Path:
    """Return the resolved path of a workspace.

    Raises `ValueError` if the workspace or a part of its `.git` is outside of the directories.
    """
    source = confined(path, directories)
    git = source / ".git"
    if git.is_symlink() or git.is_file():
        raise ValueError(f"{git} leads to a repository elsewhere; put a clone of it there")
    if git.is_dir():
        _check_git(git, directories)
    return source


def _check_git(git: Path, directories: Sequence[Path]) -> None:
    if (git / "commondir").exists():
        raise ValueError(f"{git} is a part of a repository elsewhere; put a clone of it there")
    pending, seen = [git], set[Path]()
    while pending:
        place = confined(pending.pop(), directories)
        if place in seen:
            continue
        seen.add(place)
        for parent, names, files in os.walk(place):
            pending += [path for name in (*names, *files) if (path := Path(parent, name)).is_symlink()]
            if "alternates" in files and parent.endswith("/info"):
                pending += _alternates(Path(parent))


def _alternates(info: Path) -> Iterable[Path]:
    for line in (info / "alternates").read_text(errors="surrogateescape").splitlines():
        if line.startswith('"'):
            raise ValueError(f"{info / 'alternates'} quotes a name; write it without quotation marks")
        if line and not line.startswith("#"):
            yield info.parent / line
