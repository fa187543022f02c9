"""Episodes in full: one gzip file each, whole or not there at all."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from polar_gym import durable


class EpisodeFiles:
    """Files named by (session id, attempt). Blocking: call from a thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, session_id: str, attempt: int, episode: bytes) -> int:
        """It is on the disk when this returns; the bytes that it takes there. Raises `OSError`."""
        path = self._path(session_id, attempt)
        durable.make_directory(path.parent, mode=0o700)
        packed = gzip.compress(episode, compresslevel=1, mtime=0)
        durable.write(path, packed)
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
