"""The repositories that a node's sandboxes are made from: one for all sessions that begin from the same files.

The samples of a group differ in what their agents do, not in where they begin. So their files are copied, committed and
packed once, and every sandbox of theirs, for the harness or for grading, is made from that.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from polar_gym.runtimes.scratch_directory import remove
from polar_gym.runtimes.threads import to_its_end
from polar_gym.workspaces.repository import make_repository, pack_git_dir

KEEP_BYTES = 2 * 2**30
"""How much of repositories that no session uses is kept for sessions that come later."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository at its base commit, which nothing changes."""

    directory: Path
    size: int

    @property
    def path(self) -> Path:
        return self.directory / "repository"

    @property
    def base(self) -> Path:
        """The file with the tar of its `.git`, which later diffs are made against."""
        return self.directory / "git.tar"


@dataclass(slots=True)
class _Entry:
    making: asyncio.Task[Repository]
    users: set[str] = field(default_factory=set)


class Repositories:
    """Makes repositories, and removes them when no session uses them and others are newer."""

    def __init__(self, directory: Path, keep_bytes: int = KEEP_BYTES) -> None:
        self._directory = directory
        self._keep_bytes = keep_bytes
        self._entries: dict[str, _Entry] = {}
        """State of the files -> their repository; the one that was asked for last comes last."""

    async def take(self, source: Path | None, user: str) -> Repository:
        """Return the repository of these files as they are now, for this user until `give_back`; None: of no files.

        Raises `WorkspaceError` and `OSError`.
        """
        state = await asyncio.to_thread(_state, source)
        entry = self._entries.pop(state, None) or _Entry(asyncio.create_task(self._make(source, state)))
        self._entries[state] = entry
        entry.users.add(user)
        return await asyncio.shield(entry.making)

    async def give_back(self, user: str) -> None:
        """Note that a user needs its repositories no longer. May be called twice."""
        for entry in self._entries.values():
            entry.users.discard(user)
        unused = {state: each for state, each in self._entries.items() if each.making.done() and not each.users}
        size = sum(each.making.result().size for each in unused.values())
        removed = []
        for state in unused:
            if size <= self._keep_bytes:
                break
            removed.append(self._entries.pop(state).making.result())  # before another session can take it
            size -= removed[-1].size
        for repository in removed:
            await to_its_end(remove, repository.directory)

    async def close(self) -> None:
        """Wait for repositories that are being made: nothing is written afterwards."""
        await asyncio.gather(*(each.making for each in self._entries.values()), return_exceptions=True)

    async def _make(self, source: Path | None, state: str) -> Repository:
        try:
            return await to_its_end(_make, source, self._directory)
        except BaseException:
            del self._entries[state]
            raise


def _make(source: Path | None, parent: Path) -> Repository:
    made = Repository(Path(tempfile.mkdtemp(prefix="repository-", dir=parent)), 0)
    try:
        os.chown(made.directory, -1, os.getegid())  # a setgid parent has given its group: one group owns all in it
        made.directory.chmod(0o700)
        if source is None:
            (source := made.directory / "empty").mkdir()
        make_repository(source, made.path)
        made.base.write_bytes(pack_git_dir(made.path))
    except BaseException:
        remove(made.directory)
        raise
    return Repository(made.directory, sum(about.st_size for _, about in _entries(made.directory)))


def _state(source: Path | None) -> str:
    """Return a hash of what the files of a task are; their content is not read: who writes a file changes its times."""
    if source is None:
        return "empty"
    git = source / ".git"
    if git.is_file():  # its HEAD is elsewhere
        return uuid.uuid4().hex
    found = hashlib.sha256(os.fsencode(source.resolve()))
    for name, about in _entries(git if git.is_dir() else source):
        times = about.st_mtime_ns, about.st_ctime_ns
        found.update(repr((name, about.st_mode, about.st_size, about.st_ino, times)).encode())
    return found.hexdigest()


def _entries(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all files and directories below a directory, each with its path from there, and `lstat`."""
    pending = [""]
    while pending:
        within = pending.pop()
        if not (directory / within).is_dir():
            return
        with os.scandir(directory / within) as entries:
            for each in sorted(entries, key=lambda entry: entry.name):
                name = f"{within}{each.name}"
                yield name, each.stat(follow_symlinks=False)
                if each.is_dir(follow_symlinks=False):
                    pending.append(f"{name}/")
