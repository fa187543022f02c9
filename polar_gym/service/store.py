"""Keeps the state of the rollout service in SQLite (WAL), and the episodes in full as files beside the database.

One thread owns the database, so that writes are one after the other and the event loop never waits for a disk. A task
is changed by one `Change` at a time: samples, events and callbacks to be made are written together or not at all. A
commit is synced before any request is answered.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from polar_gym import durable
from polar_gym.protocol import Event, Generation, TaskStatus
from polar_gym.schema import TaskRequest
from polar_gym.service.change import Change, NewEpisode, OutboxEntry
from polar_gym.service.episode_files import EpisodeFiles
from polar_gym.service.task import Sample, Task

T = TypeVar("T")

SCHEMA = """
CREATE TABLE IF NOT EXISTS tasks (
    number INTEGER PRIMARY KEY AUTOINCREMENT, task_id TEXT NOT NULL UNIQUE, request BLOB NOT NULL,
    status TEXT NOT NULL, created_at REAL NOT NULL, finished_at REAL, cancelled INTEGER NOT NULL,
    stopped_early INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS tasks_by_status ON tasks (status);
CREATE TABLE IF NOT EXISTS samples (
    session_id TEXT PRIMARY KEY, task_id TEXT NOT NULL, sample BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS samples_by_task ON samples (task_id);
CREATE TABLE IF NOT EXISTS episodes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL, attempt INTEGER NOT NULL,
    task_id TEXT NOT NULL, accepted INTEGER NOT NULL, reason TEXT NOT NULL, stored_at REAL NOT NULL,
    size INTEGER NOT NULL, fetched INTEGER NOT NULL DEFAULT 0, evicted INTEGER NOT NULL DEFAULT 0,
    UNIQUE (session_id, attempt));
CREATE UNIQUE INDEX IF NOT EXISTS one_is_accepted ON episodes (session_id) WHERE accepted;
CREATE INDEX IF NOT EXISTS episodes_by_task ON episodes (task_id, number);
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, task_id TEXT NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL,
    session_id TEXT, attempt INTEGER, data BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS events_by_task ON events (task_id, id);
CREATE TABLE IF NOT EXISTS outbox (
    key TEXT PRIMARY KEY, task_id TEXT NOT NULL, session_id TEXT, attempt INTEGER, url TEXT NOT NULL,
    created_at REAL NOT NULL, due_at REAL NOT NULL, tries INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS outbox_by_due ON outbox (due_at);
CREATE TABLE IF NOT EXISTS weights (step INTEGER PRIMARY KEY AUTOINCREMENT, version TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value BLOB NOT NULL);
"""

FINAL = (TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED)


class StoreError(Exception):
    """The database cannot be used; the message names its file."""


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One row of the table of episodes."""

    number: int
    session_id: str
    attempt: int
    task_id: str
    accepted: bool
    reason: str
    evicted: bool


class Store:
    """The database. Every method runs in the store's own thread, and raises `StoreError` where the database fails."""

    def __init__(self, directory: Path) -> None:
        """Open or make the database. Raise `StoreError` where another server uses the directory, or where the directory
        cannot be written."""
        self.path = directory / "service.sqlite"
        self.files = EpisodeFiles(directory / "episodes")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = durable.locked(directory / "lock", wait=False)
            self._db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None, timeout=1)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(SCHEMA)
        except BlockingIOError as error:
            raise StoreError(f"{directory} is in use by another rollout server; give each its own") from error
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self.path}: {error}") from error

    async def close(self) -> None:
        await self._run(lambda db: db.close())
        self._thread.shutdown()
        self._lock.close()

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def guarded() -> T:
            try:
                return work(self._db)
            except sqlite3.Error as error:
                if self._in_transaction():
                    self._db.execute("ROLLBACK")
                raise StoreError(f"{self.path}: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    def _in_transaction(self) -> bool:
        try:
            return self._db.in_transaction
        except sqlite3.ProgrammingError:  # closed
            return False

    # Tasks ------------------------------------------------------------------------------------------------------------

    async def apply(self, change: Change) -> None:
        """Write a change as a whole or not at all, as it is at the time of the call."""
        task_row = _task_row(change.task) if change.task else None
        samples = [(s.session.session_id, s.session.task_id, s.to_json()) for s in change.samples]

        def write(db: sqlite3.Connection) -> None:
            db.execute("BEGIN IMMEDIATE")
            if task_row is not None:
                db.execute(
                    "INSERT INTO tasks (task_id, request, status, created_at, finished_at, cancelled, stopped_early)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (task_id) DO UPDATE SET status = excluded.status,"
                    " finished_at = excluded.finished_at, cancelled = excluded.cancelled,"
                    " stopped_early = excluded.stopped_early",
                    task_row,
                )
            db.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?)", samples)
            if change.episode is not None:
                _insert_episode(db, change.episode)
            for entry in change.callbacks:
                db.execute(
                    "INSERT OR IGNORE INTO outbox (key, task_id, session_id, attempt, url, created_at, due_at)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (entry.key, entry.task_id, entry.session_id, entry.attempt, entry.url, entry.created_at, 0.0),
                )
            for event in change.events:
                _insert_event(db, event)
            db.execute("COMMIT")

        await self._run(write)

    async def live_tasks(self) -> list[Task]:
        """Return the tasks that have not ended, in the order in which they came."""

        def read(db: sqlite3.Connection) -> list[Task]:
            marks = ", ".join("?" * len(FINAL))
            rows = db.execute(f"{_TASKS} WHERE status NOT IN ({marks}) ORDER BY number", FINAL).fetchall()
            return [_task(db, row) for row in rows]

        return await self._run(read)

    async def find_task(self, task_id: str) -> Task | None:
        def read(db: sqlite3.Connection) -> Task | None:
            row = db.execute(f"{_TASKS} WHERE task_id = ?", (task_id,)).fetchone()
            return _task(db, row) if row else None

        return await self._run(read)

    async def list_tasks(self, limit: int, after: str | None, status: str | None) -> list[str]:
        """Return task ids, newest first, beginning behind `after`."""

        def read(db: sqlite3.Connection) -> list[str]:
            where, values = ["1"], list[Any]()
            if after is not None:
                where.append("number < (SELECT number FROM tasks WHERE task_id = ?)")
                values.append(after)
            if status is not None:
                where.append("status = ?")
                values.append(status)
            sql = f"SELECT task_id FROM tasks WHERE {' AND '.join(where)} ORDER BY number DESC LIMIT ?"
            return [row[0] for row in db.execute(sql, [*values, limit])]

        return await self._run(read)

    async def events(self, task_id: str, after: int, limit: int = 500) -> list[Event]:
        """Return the events of a task that came after the one with id `after`, in order of their ids."""

        def read(db: sqlite3.Connection) -> list[Event]:
            rows = db.execute(
                "SELECT id, task_id, at, kind, session_id, attempt, data FROM events WHERE task_id = ? AND id > ?"
                " ORDER BY id LIMIT ?",
                (task_id, after, limit),
            )
            return [_event(row) for row in rows]

        return await self._run(read)

    # Episodes ---------------------------------------------------------------------------------------------------------

    async def find_episode(self, session_id: str, attempt: int | None = None) -> EpisodeRow | None:
        """Return the episode of an attempt; None: of the accepted attempt."""
        which = "accepted = 1" if attempt is None else "attempt = ?"
        values = (session_id,) if attempt is None else (session_id, attempt)

        def read(db: sqlite3.Connection) -> EpisodeRow | None:
            row = db.execute(f"{_EPISODES} WHERE session_id = ? AND {which}", values).fetchone()
            return EpisodeRow(*row) if row else None

        return await self._run(read)

    async def episodes(self, task_id: str, after: int, limit: int, excluded: bool) -> list[EpisodeRow]:
        """Return the episodes of a task that came after the one with number `after`, in order of arrival."""

        def read(db: sqlite3.Connection) -> list[EpisodeRow]:
            which = "" if excluded else "AND accepted = 1"
            sql = f"{_EPISODES} WHERE task_id = ? AND number > ? {which} ORDER BY number LIMIT ?"
            return [EpisodeRow(*row) for row in db.execute(sql, (task_id, after, limit))]

        return await self._run(read)

    async def mark_fetched(self, numbers: Sequence[int]) -> None:
        rows = [(number,) for number in numbers]
        await self._run(lambda db: db.executemany("UPDATE episodes SET fetched = 1 WHERE number = ?", rows))

    async def stored_bytes(self) -> int:
        sql = "SELECT COALESCE(SUM(size), 0) FROM episodes WHERE evicted = 0"
        return await self._run(lambda db: db.execute(sql).fetchone()[0])

    # Callbacks --------------------------------------------------------------------------------------------------------

    async def due_callbacks(self, now: float, limit: int) -> list[OutboxEntry]:
        def read(db: sqlite3.Connection) -> list[OutboxEntry]:
            rows = db.execute(
                "SELECT key, task_id, session_id, attempt, url, created_at, tries FROM outbox WHERE due_at <= ?"
                " ORDER BY due_at, created_at LIMIT ?",
                (now, limit),
            )
            return [OutboxEntry(*row) for row in rows]

        return await self._run(read)

    async def next_due(self, now: float) -> float | None:
        """Return when the next callback is due, of those that are not due yet."""
        sql = "SELECT MIN(due_at) FROM outbox WHERE due_at > ?"
        return await self._run(lambda db: db.execute(sql, (now,)).fetchone()[0])

    async def callback_done(self, entry: OutboxEntry, event: Event) -> None:
        """Remove a callback that was delivered or given up; `event` says which."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("BEGIN IMMEDIATE")
            db.execute("DELETE FROM outbox WHERE key = ?", (entry.key,))
            if entry.session_id is not None and event.kind == "callback.delivered":
                key = (entry.session_id, entry.attempt)
                db.execute("UPDATE episodes SET fetched = 1 WHERE session_id = ? AND attempt = ?", key)
            _insert_event(db, event)
            db.execute("COMMIT")

        await self._run(write)

    async def callback_failed(self, key: str, due_at: float) -> None:
        sql = "UPDATE outbox SET tries = tries + 1, due_at = ? WHERE key = ?"
        await self._run(lambda db: db.execute(sql, (due_at, key)))

    # Weights and settings ---------------------------------------------------------------------------------------------

    async def add_weights(self, version: str) -> int:
        """Record an update of the weights, and return its number."""
        sql = "INSERT INTO weights (version) VALUES (?)"
        return await self._run(lambda db: int(db.execute(sql, (version,)).lastrowid or 0))

    async def weights(self) -> list[tuple[int, str]]:
        return await self._run(lambda db: db.execute("SELECT step, version FROM weights ORDER BY step").fetchall())

    async def generation(self) -> Generation:
        sql = "SELECT value FROM settings WHERE name = 'generation'"
        row = await self._run(lambda db: db.execute(sql).fetchone())
        return Generation.from_json(row[0]) if row else Generation()

    async def set_generation(self, generation: Generation) -> None:
        sql = "INSERT OR REPLACE INTO settings VALUES ('generation', ?)"
        await self._run(lambda db: db.execute(sql, (generation.to_json(),)))

    # Bounds -----------------------------------------------------------------------------------------------------------

    async def evict(self, before: float, keep_bytes: int) -> int:
        """Evict episodes of ended or unknown tasks, and tasks without episodes. Return the number of evicted episodes.

        An episode may be evicted when it was fetched or delivered by a callback, or is excluded, and when no callback
        of its task is left to be made. Those that are older than `before` are evicted, and the oldest of the others
        until at most `keep_bytes` are kept. A task is evicted when it ended before `before`, and no episode and no
        callback of it is left.
        """

        def read(db: sqlite3.Connection) -> tuple[int, list[tuple[int, str, int, int, float]]]:
            total = db.execute("SELECT COALESCE(SUM(size), 0) FROM episodes WHERE evicted = 0").fetchone()[0]
            marks = ", ".join("?" * len(FINAL))
            rows = db.execute(
                "SELECT e.number, e.session_id, e.attempt, e.size, e.stored_at FROM episodes e LEFT JOIN tasks t"
                " USING (task_id) WHERE e.evicted = 0 AND (e.fetched OR NOT e.accepted)"
                f" AND (t.status IS NULL OR t.status IN ({marks}))"
                " AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.task_id = e.task_id) ORDER BY e.number LIMIT 1000",
                FINAL,
            ).fetchall()
            return total, rows

        total, rows = await self._run(read)
        gone = []
        for number, session_id, attempt, size, stored_at in rows:
            if stored_at >= before and total <= keep_bytes:
                break
            await asyncio.to_thread(self.files.remove, session_id, attempt)
            total -= size
            gone.append((number,))

        def write(db: sqlite3.Connection) -> None:
            db.execute("BEGIN IMMEDIATE")
            db.executemany("UPDATE episodes SET evicted = 1 WHERE number = ?", gone)
            _drop_old_tasks(db, before)
            db.execute("COMMIT")

        await self._run(write)
        return len(gone)


_TASKS = "SELECT task_id, request, created_at, finished_at, cancelled, stopped_early FROM tasks"
_EPISODES = "SELECT number, session_id, attempt, task_id, accepted, reason, evicted FROM episodes"


def _task_row(task: Task) -> tuple[Any, ...]:
    numbers = (task.created_at, task.finished_at, task.cancelled, task.stopped_early)
    return (task.task_id, task.request.to_json(), task.status, *numbers)


def _task(db: sqlite3.Connection, row: Sequence[Any]) -> Task:
    task_id, request, created_at, finished_at, cancelled, stopped_early = row
    samples = [
        Sample.from_json(found[0])
        for found in db.execute("SELECT sample FROM samples WHERE task_id = ? ORDER BY rowid", (task_id,))
    ]
    return Task(
        TaskRequest.from_json(request),
        created_at,
        {sample.session.session_id: sample for sample in samples},
        finished_at,
        bool(cancelled),
        bool(stopped_early),
    )


def _event(row: Sequence[Any]) -> Event:
    number, task_id, at, kind, session_id, attempt, data = row
    return Event(
        id=number,
        task_id=task_id,
        at=at,
        kind=kind,
        session_id=session_id,
        attempt=attempt,
        data=orjson.loads(data),
    )


def _insert_event(db: sqlite3.Connection, event: Event) -> None:
    row = (event.task_id, event.at, event.kind, event.session_id, event.attempt, orjson.dumps(event.data))
    db.execute("INSERT INTO events (task_id, at, kind, session_id, attempt, data) VALUES (?, ?, ?, ?, ?, ?)", row)


def _insert_episode(db: sqlite3.Connection, new: NewEpisode) -> None:
    db.execute(
        "INSERT INTO episodes (session_id, attempt, task_id, accepted, reason, stored_at, size)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (new.session_id, new.attempt, new.task_id, new.accepted, new.reason, new.stored_at, new.size),
    )


def _drop_old_tasks(db: sqlite3.Connection, before: float) -> None:
    """Remove the tasks that ended before `before` and of which no episode and no callback is left."""
    marks = ", ".join("?" * len(FINAL))
    rows = db.execute(
        f"SELECT task_id FROM tasks t WHERE status IN ({marks}) AND finished_at < ? AND NOT EXISTS (SELECT 1 FROM"
        " episodes e WHERE e.task_id = t.task_id AND e.evicted = 0) AND NOT EXISTS (SELECT 1 FROM outbox o WHERE"
        " o.task_id = t.task_id)",
        (*FINAL, before),
    ).fetchall()
    for table in ("events", "episodes", "samples", "tasks"):
        db.executemany(f"DELETE FROM {table} WHERE task_id = ?", rows)
    db.execute("DELETE FROM episodes WHERE evicted = 1 AND task_id NOT IN (SELECT task_id FROM tasks)")
