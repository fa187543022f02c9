"""The state directory of a node: one directory for each attempt of a session, and a lock on all of them.

    state/lock                                   held by the process that serves this directory
    state/sessions/<session id>.<attempt>/
        manifest.json     the order to run the session; written before the node says that it took the session
        calls.jsonl       the journal of the session's calls; each is written before its answer leaves
        episode.json      the end of the session; on the disk before the episode is delivered
        delivered.json    the server's acknowledgement; from now on the directory may be evicted
        sandboxes_left    sandboxes of the session could not be removed; the next process tries again. Until then the
                          directory is not evicted
        record/           a state directory with earlier attempts that ran elsewhere, as the server had them
    state/unreadable/     directories of sessions that this version of polar-gym cannot read; they are deleted by hand

A directory without an episode is a session that was running when its process died (`polar_gym.gateway.node.salvage`).
"""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import orjson

from polar_gym import durable
from polar_gym.errors import UnavailableError, kind_of
from polar_gym.gateway.session.starting import JOURNAL, MANIFEST, Manifest
from polar_gym.protocol import DeliveryAnswer, Dispatch, JournalPiece
from polar_gym.record import Record
from polar_gym.schema import Episode, StartFrom

log = logging.getLogger(__name__)

SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DIRECTORY = re.compile(rf"({SESSION_ID.pattern})\.([0-9]{{1,9}})")
MAX_ATTEMPT = 999_999_999
PIECES_BYTES = 16 * 2**20
"""How much of journals a node sends at a time."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One attempt of a session. `str(key)` is a safe file name: the constructor refuses all others."""

    session_id: str
    attempt: int

    def __post_init__(self) -> None:
        if not SESSION_ID.fullmatch(self.session_id):
            raise ValueError(f"session_id={self.session_id[:80]!r}: expected 1 to 64 letters, digits, '_' or '-'")
        if not 0 <= self.attempt <= MAX_ATTEMPT:
            raise ValueError(f"attempt={self.attempt}: expected a number from 0 to {MAX_ATTEMPT}")

    def __str__(self) -> str:
        return f"{self.session_id}.{self.attempt}"


class SessionFiles:
    """One session's directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = directory / MANIFEST
        self.journal = directory / JOURNAL
        self.episode = directory / "episode.json"
        self.delivered = directory / "delivered.json"
        self.sandboxes_left = directory / "sandboxes_left"
        self.record = directory / "record"

    def ending(self) -> str | None:
        """Return the kind of failure with which the attempt ended, empty for none; None: it has not ended."""
        if not self.episode.exists():
            return None
        failure = orjson.loads(self.episode.read_bytes())["session"]["failure"]
        return failure["kind"] if failure else ""

    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.directory.rglob("*"))


class StateDirectory:
    """All sessions of one node. Methods block: call them off the event loop."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sessions = root / "sessions"

    def lock(self, key: str = "state") -> IO[bytes]:
        """Return a file that locks the directory until the file is closed. `key`: the setting that names the directory.

        Raise `UnavailableError` where another process serves the directory or its disk is full, and `ConfigError` where
        the directory cannot be written for another reason.
        """
        try:
            self.sessions.mkdir(parents=True, exist_ok=True, mode=0o700)
            return durable.locked(self.root / "lock", wait=False, mode=0o600)
        except BlockingIOError as error:
            raise UnavailableError(
                f"{key}={self.root}: another process serves it; stop that one, or set {key} to a directory of this "
                "one alone"
            ) from error
        except OSError as error:
            raise kind_of(error)(
                f"{key}={self.root}: {error.strerror}; name a directory that can be written"
            ) from error

    def files(self, key: Key) -> SessionFiles:
        return SessionFiles(self.sessions / str(key))

    def known(self) -> Iterator[Key]:
        """Yield the key of every session that has a manifest."""
        return (key for key in self._keys() if self.files(key).manifest.is_file())

    def _keys(self) -> Iterator[Key]:
        for directory in sorted(self.sessions.iterdir()):
            if match := _DIRECTORY.fullmatch(directory.name):
                yield Key(match[1], int(match[2]))

    def remove_unbegun(self) -> None:
        """Remove the sessions without a manifest: the process died before it took them."""
        for key in self._keys():
            if not self.files(key).manifest.exists():
                shutil.rmtree(self.files(key).directory)

    def begin(self, key: Key, manifest: Manifest) -> None:
        files = self.files(key)
        durable.make_directory(files.directory, mode=0o700)
        _write(files.manifest, manifest)

    def set_aside(self, key: Key, error: ValueError) -> None:
        """Move a session that cannot be read out of the node's way, mostly one of another version of polar-gym. Its
        sandboxes, if any are left, stay."""
        aside = self.root / "unreadable" / f"{key}.{uuid.uuid4().hex[:8]}"
        aside.parent.mkdir(mode=0o700, exist_ok=True)
        self.files(key).directory.rename(aside)
        log.error("session %s cannot be read, and is kept in %s: %s", key, aside, " ".join(str(error).split())[:500])

    def read_manifest(self, key: Key) -> Manifest:
        return Manifest.from_json(self.files(key).manifest.read_bytes())

    def put(self, piece: JournalPiece) -> None:
        """Write the whole journal and the manifest of an attempt that ran elsewhere."""
        files = self.files(Key(piece.session_id, piece.attempt))
        durable.make_directory(files.directory, mode=0o700)
        files.manifest.write_text(piece.manifest or "", encoding="utf-8")
        files.journal.write_text(piece.lines, encoding="utf-8")

    def record_for(self, order: Dispatch, others: Iterable[Path], at_work: Container[Key]) -> StartFrom | None:
        """Keep the journals that came with an order to resume, and return the record of the last attempt that counts,
        which must have been interrupted; None: the session begins. `others`: the state directories of other nodes.
        `at_work`: the attempts that run here."""
        sent = StateDirectory(self.files(Key(order.session_id, order.attempt)).record)
        for piece in order.records:
            sent.put(piece)
        states = (self, *map(StateDirectory, others), sent)
        for attempt in reversed(range(order.record_from, order.attempt)):
            key = Key(order.session_id, attempt)
            for files in (state.files(key) for state in states):
                if not files.journal.is_file():
                    continue
                if key in at_work or files.ending() not in (None, "interrupted"):
                    return None
                return StartFrom(record=str(files.directory.absolute()), owned=True)
        return None

    def news(self, sizes: Mapping[Key, int]) -> list[JournalPiece]:
        """Return what journals have after their first bytes (`sizes`): whole lines, `PIECES_BYTES` at most in all,
        or one line that is longer."""
        pieces, left = [], PIECES_BYTES
        for key, size in sizes.items():
            files = self.files(key)
            with files.journal.open("rb") as journal:
                journal.seek(size)
                data = journal.read(left)
                if not pieces and len(data) == left and b"\n" not in data:  # a line that is longer than all pieces
                    data += journal.readline()
            data = data[: data.rfind(b"\n") + 1]
            if data:
                left = max(0, left - len(data))
                manifest = None if size else files.manifest.read_text(encoding="utf-8")
                lines = data.decode(errors="replace")
                told = {"session_id": key.session_id, "attempt": key.attempt, "start": size, "lines": lines}
                pieces.append(JournalPiece(**told, manifest=manifest))
        return pieces

    def finish(self, key: Key, episode: Episode) -> None:
        _write(self.files(key).episode, episode)

    def mark_delivered(self, key: Key, answer: DeliveryAnswer) -> None:
        _write(self.files(key).delivered, answer)

    def evict(self, keys: Sequence[Key], now: float, keep_seconds: float, keep_bytes: int) -> list[Key]:
        """Remove those of these finished sessions that ended more than `keep_seconds` ago, then the oldest until the
        others take at most `keep_bytes`. Return the keys that are gone. A session whose sandboxes could not be removed
        stays: the next process needs its manifest to remove them."""
        there = {key for key in keys if self.files(key).episode.exists()}
        gone = [key for key in keys if key not in there]
        removable = [key for key in there if not self.files(key).sandboxes_left.exists()]
        ended = sorted((self.files(key).episode.stat().st_mtime, key) for key in removable)
        sizes = {key: self.files(key).bytes() for key in removable}
        left = sum(sizes.values())
        for time, key in ended:
            if now - time <= keep_seconds and left <= keep_bytes:
                break
            shutil.rmtree(self.files(key).directory)
            left -= sizes[key]
            gone.append(key)
        return gone


def _write(path: Path, record: Record) -> None:
    """Write a file that only the gateway's user may read."""
    durable.write(path, record.to_json(), mode=0o600)
