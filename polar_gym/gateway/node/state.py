"""What a node keeps on disk: one directory for each attempt of a session, and a lock on all of it.

    state/lock                                   held by the process that serves this directory
    state/sessions/<session id>.<attempt>/
        manifest.json     what was asked for; written before the node says that it took the session
        calls.jsonl       the journal of its captured calls; written before their answers leave
        episode.json      its end; written, and on the disk, before it is delivered
        delivered.json    the server's acknowledgement; from now on the directory may be evicted

A directory without an episode is a session that was running when its process died (`polar_gym.gateway.node.salvage`).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar_gym.protocol import DeliveryAnswer
from polar_gym.record import Record
from polar_gym.schema import EngineInfo, Episode, Session, TaskRequest

SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DIRECTORY = re.compile(rf"({SESSION_ID.pattern})\.([0-9]{{1,9}})")
MAX_ATTEMPT = 999_999_999


class StateError(Exception):
    """The state directory cannot be used. The message says why and what to do."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One attempt of a session. Its text is a file name: nothing else ever becomes a `Key`."""

    session_id: str
    attempt: int

    def __post_init__(self) -> None:
        if not SESSION_ID.fullmatch(self.session_id):
            raise ValueError(f"session_id={self.session_id[:80]!r}: expected 1 to 64 letters, digits, '_' or '-'")
        if not 0 <= self.attempt <= MAX_ATTEMPT:
            raise ValueError(f"attempt={self.attempt}: expected a number from 0 to {MAX_ATTEMPT}")

    def __str__(self) -> str:
        return f"{self.session_id}.{self.attempt}"


class Manifest(Record):
    """What a session needs to be told of when its process is gone."""

    session: Session
    request: TaskRequest
    engine: EngineInfo


@dataclass(frozen=True, slots=True)
class SessionFiles:
    """One session's directory."""

    directory: Path

    @property
    def manifest(self) -> Path:
        return self.directory / "manifest.json"

    @property
    def journal(self) -> Path:
        return self.directory / "calls.jsonl"

    @property
    def episode(self) -> Path:
        return self.directory / "episode.json"

    @property
    def delivered(self) -> Path:
        return self.directory / "delivered.json"

    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.directory.iterdir())


class StateDirectory:
    """All sessions of one node. Methods block: call them off the event loop."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sessions = root / "sessions"
        self._lock: int | None = None

    def lock(self) -> None:
        """Raises `StateError` when another process serves this directory, or when it cannot be written."""
        try:
            self.sessions.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(f"state={self.root}: {error.strerror}; name a directory that can be written") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise StateError(
                f"state={self.root}: another gateway process serves it; stop that one, or set state= to a directory "
                "of this one's own"
            ) from error
        self._lock = lock

    def unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def files(self, key: Key) -> SessionFiles:
        return SessionFiles(self.sessions / str(key))

    def known(self) -> Iterator[Key]:
        """Every session of which there is a manifest."""
        for directory in sorted(self.sessions.iterdir()):
            match = _DIRECTORY.fullmatch(directory.name)
            if match and (directory / "manifest.json").is_file():
                yield Key(match[1], int(match[2]))

    def begin(self, key: Key, manifest: Manifest) -> None:
        files = self.files(key)
        files.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(files.manifest, manifest.to_json())

    def read_manifest(self, key: Key) -> Manifest:
        return Manifest.from_json(self.files(key).manifest.read_bytes())

    def finish(self, key: Key, episode: Episode) -> None:
        write_atomically(self.files(key).episode, episode.to_json())

    def mark_delivered(self, key: Key, answer: DeliveryAnswer) -> None:
        write_atomically(self.files(key).delivered, answer.to_json())

    def evict(self, keys: Sequence[Key], now: float, keep_seconds: float, keep_bytes: int) -> list[Key]:
        """Remove those of these finished sessions that ended too long ago, then the oldest until the others fit."""
        there = [key for key in keys if self.files(key).episode.exists()]
        ended = sorted((self.files(key).episode.stat().st_mtime, key) for key in there)
        sizes = {key: self.files(key).bytes() for key in there}
        left, gone = sum(sizes.values()), [key for key in keys if key not in sizes]
        for time, key in ended:
            if now - time <= keep_seconds and left <= keep_bytes:
                break
            shutil.rmtree(self.files(key).directory)
            left -= sizes[key]
            gone.append(key)
        return gone


def write_atomically(path: Path, data: bytes) -> None:
    """The whole file or none, and on the disk when this returns. Raises `OSError`."""
    temporary = path.with_name(f".{path.name}.new")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.fsync(file)
    finally:
        os.close(file)
    temporary.rename(path)
    for directory in (path.parent, path.parent.parent):
        _sync(directory)


def _sync(directory: Path) -> None:
    """Names are on the disk when their directory is."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
