"""Directories on the gateway's machine that belong to one session; their name tells the session to a later gateway."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path

from polar_gym.runtimes import SandboxError, agent
from polar_gym.runtimes.kernel import subordinate

PREFIX = "polar-gym-"
"""Of the directories' names."""


def problems(root: Path | None) -> list[str]:
    """Return why no directory can be made in `root` (None: the system's directory of temporary files), if so."""
    if root is None or root.is_dir():
        return []
    return [f"runtime.scratch={str(root)!r}: there is no such directory; make it, or name another"]


def make(session_id: str, root: Path | None) -> Path:
    """Make a directory that only the gateway may enter. Raises `OSError`."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{_slug(session_id)}-", dir=root))


def orphans(session_ids: Collection[str], root: Path | None) -> list[Path]:
    """Return the directories that `make` made for these sessions and that were not removed."""
    slugs = "|".join(re.escape(_slug(session_id)) for session_id in session_ids)
    name = re.compile(f"{PREFIX}(?:{slugs})-[a-z0-9_]{{8}}")
    return [path for path in (root or Path(tempfile.gettempdir())).iterdir() if name.fullmatch(path.name)]


def remove(directory: Path) -> None:
    """Remove such a directory, whatever the agent did to it. Raises `OSError`."""
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):  # the agent took permissions away, or nested deeper than Python can follow
        _remove_by_force(directory)


def _remove_by_force(directory: Path) -> None:
    try:
        through = () if os.geteuid() == 0 else subordinate.namespace().enter
    except SandboxError:
        through = ()  # all files are the gateway's own
    open_up = ["find", str(directory), "-type", "d", "!", "-perm", "-700", "-execdir", "chmod", "u+rwx", "{}", ";"]
    for command in (open_up, ["rm", "-rf", "--", str(directory)]):
        done = subprocess.run([*through, *command], capture_output=True, check=False, env={"PATH": agent.PATH})
    if directory.exists():
        raise OSError(f"{directory} could not be removed: {done.stderr.decode(errors='replace').strip()[-1000:]}")


def _slug(session_id: str) -> str:
    """Return the session's id as part of a file name; it is short, because a socket's path must be short."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", session_id)
    if name == session_id and len(name) <= 40:
        return name
    return f"{name[:27]}-{hashlib.sha256(session_id.encode()).hexdigest()[:12]}"
