"""Episodes in full: one gzip file each, whole or not there at all."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path


class EpisodeFiles:
    """Files named by (session id, attempt). Blocking: call from a thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, session_id: str, attempt: int, episode: bytes) -> int:
        """It is on the disk when this returns; the bytes that it takes there. Raises `OSError`."""
        path = self._path(session_id, attempt)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        packed = gzip.compress(episode, compresslevel=1, mtime=0)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.write(packed)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        _sync_directory(path.parent)
        return len(packed)

    def read(self, session_id: str, attempt: int) -> bytes:
        """One line of JSON. Raises `OSError` when it was evicted, or is damaged."""
        path = self._path(session_id, attempt)
        try:
            return gzip.decompress(path.read_bytes())
        except (EOFError, zlib.error) as error:
            raise OSError(f"{path}: {error}") from error

    def remove(self, session_id: str, attempt: int) -> None:
        self._path(session_id, attempt).unlink(missing_ok=True)

    def _path(self, session_id: str, attempt: int) -> Path:
        return self._directory / session_id[:2] / f"{session_id}.{attempt}.json.gz"


def _sync_directory(directory: Path) -> None:
    """A name is on the disk when its directory is."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
