"""What users of the machine may do with files."""

from __future__ import annotations

from pathlib import Path


def closed(directory: Path) -> list[Path]:
    """Return what other users may not read of a directory, or of its programs and directories not run or enter."""
    return [path for path in (directory, *directory.rglob("*")) if not path.is_symlink() and not _open(path)]


def _open(path: Path) -> bool:
    mode = path.stat().st_mode
    needed = 0o005 if mode & 0o100 else 0o004
    return mode & needed == needed
