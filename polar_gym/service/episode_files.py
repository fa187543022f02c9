"""Keeps the episodes in full: one gzip file each, which is whole or does not exist."""

from __future__ import annotations

from pathlib import Path

from isal import igzip, isal_zlib

from polar_gym import durable


class DamagedError(Exception):
    """The file of an episode is gone, or is no episode: no later try reads it."""


class EpisodeFiles:
    """The files, named by (session id, attempt). Methods block: call them in a thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._made: set[Path] = set()
        """Directories that are on the disk."""

    def write(self, session_id: str, attempt: int, episode: bytes) -> int:
        """Write an episode, and return the bytes that it takes on the disk. The file is on the disk when this returns.
        Raise `OSError`."""
        path = self._path(session_id, attempt)
        if path.parent not in self._made:
            durable.make_directory(path.parent, mode=0o700)
            self._made.add(path.parent)
        packed = igzip.compress(episode, compresslevel=2, mtime=0)
        durable.write(path, packed)
        return len(packed)

    def read(self, session_id: str, attempt: int) -> bytes:
        """Return an episode as one line of JSON. Raise `DamagedError` where the file was evicted or is damaged, and
        `OSError` where it cannot be read now."""
        path = self._path(session_id, attempt)
        try:
            packed = path.read_bytes()
        except FileNotFoundError as error:
            raise DamagedError(str(error)) from error
        try:
            return igzip.decompress(packed)
        except (OSError, EOFError, isal_zlib.error) as error:  # pyright: ignore[reportGeneralTypeIssues] - isal's own annotation
            raise DamagedError(f"{path}: {error}") from error

    def remove(self, session_id: str, attempt: int) -> None:
        self._path(session_id, attempt).unlink(missing_ok=True)

    def _path(self, session_id: str, attempt: int) -> Path:
        return self.directory / session_id[:2] / f"{session_id}.{attempt}.json.gz"
