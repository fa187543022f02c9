"""Keeps the state of the rollout service in SQLite (WAL), and the episodes in full as files beside the database.

One thread owns the database, so that writes are one after the other and the event loop never waits for a disk. A task
is changed by one `Change` at a time: samples, events and callbacks to be made are written together or not at all. A
commit is synced before any request is answered. Changes that wait at the same time share one commit: a disk that syncs
some hundred times a second would else be the limit of the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from polar_gym import durable
from polar_gym.errors import ConfigError
from polar_gym.protocol import Event, Generation
from polar_gym.schema import TaskRequest
from polar_gym.service.change import Change, OutboxEntry
from polar_gym.service.episode_files import EpisodeFiles
from polar_gym.service.journal_files import JournalFiles
from polar_gym.service.task import Sample, Task

T = TypeVar("T")

MIGRATIONS = (
    """
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
""",
    """
ALTER TABLE outbox ADD COLUMN host TEXT NOT NULL DEFAULT '';
UPDATE outbox SET due_at = max(due_at, created_at),
    host = substr(url || '/', 1, instr(url, '://') + 2 + instr(substr(url || '/', instr(url, '://') + 3), '/'));
CREATE INDEX outbox_by_host ON outbox (host, due_at);
CREATE INDEX outbox_by_task ON outbox (task_id);
CREATE INDEX episodes_kept ON episodes (number, size) WHERE evicted = 0;
CREATE TABLE begun (version TEXT PRIMARY KEY, step INTEGER NOT NULL);
""",
)
"""The scripts that make the schema, in order; `PRAGMA user_version` counts those that a database has had. A script is
never changed: another schema is one script more. A database of version 0 may have the tables of the first."""


MOST_IN_A_COMMIT = 256
"""Changes; the first of them waits for the last."""


class StoreError(Exception):
    """The database cannot be used; the message names its file."""


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One row of the table of episodes."""

    number: int
    session_id: str
    attempt: int
    accepted: bool
    evicted: bool


class Store:
    """The database. Every method runs in the store's own thread, and raises `StoreError` where the database fails."""

    def __init__(self, directory: Path) -> None:
        """Open or make the database. Raise `StoreError` where another server uses the directory, or where the directory
        cannot be written."""
        self.path = directory / "service.sqlite"
        self.files = EpisodeFiles(directory / "episodes")
        self.journals = JournalFiles(directory / "journals")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._waiting: queue.SimpleQueue[tuple[Callable[[sqlite3.Connection], Any], Future[Any]]] = queue.SimpleQueue()
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            with ExitStack() as opened:
                self._lock = opened.enter_context(durable.locked(directory / "lock", wait=False))
                durable.remove_partial(self.files.directory)
                self._db = sqlite3.connect(self.path, check_same_thread=False, isolation_level="IMMEDIATE", timeout=1)
                opened.callback(self._db.close)
                self._db.row_factory = sqlite3.Row
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                self._migrate()
                opened.pop_all()
        except BlockingIOError as error:
            raise StoreError(f"{directory} is in use by another rollout server; give each its own") from error
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self.path}: {error}") from error

    def _migrate(self) -> None:
        """Run the scripts that the database lacks, one transaction each. Raise `ConfigError` for a newer database."""
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise ConfigError(
                f"{self.path}: a newer polar-gym wrote it (schema {version}, this one knows {len(MIGRATIONS)}); "
                "start that version, or name another directory with state="
            )
        for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
            self._db.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT;")

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()
        self._lock.close()

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `work`, whose writes are on the disk as a whole or not at all."""
        done: Future[T] = Future()
        self._waiting.put((work, done))
        if self._waiting.qsize() == 1:  # else a commit is due already
            self._thread.submit(self._commit)
        return await asyncio.wrap_future(done)

    def _commit(self) -> None:
        """Do the work that waits, in one transaction. Work that fails undoes its own writes only."""
        batch: list[tuple[Callable[[sqlite3.Connection], Any], Future[Any]]] = []
        with contextlib.suppress(queue.Empty):
            while len(batch) < MOST_IN_A_COMMIT:
                batch.append(self._waiting.get_nowait())
        if not self._waiting.empty():
            self._thread.submit(self._commit)
        batch = [(work, done) for work, done in batch if done.set_running_or_notify_cancel()]
        outcomes: list[tuple[Any, Exception | None]] = []
        try:
            if batch:
                self._db.execute("BEGIN IMMEDIATE")
                outcomes += (self._part(work) for work, _ in batch)
                self._db.commit()
        except Exception as error:  # noqa: BLE001 - each caller gets it
            outcomes = [(None, error)] * len(batch)
            self._db.rollback()
        finally:  # also where the rollback fails
            for (_, done), (result, error) in zip(batch, outcomes, strict=True):
                if error is None:
                    done.set_result(result)
                else:
                    failure = StoreError(f"{self.path}: {error}") if isinstance(error, sqlite3.Error) else error
                    done.set_exception(failure)

    def _part(self, work: Callable[[sqlite3.Connection], T]) -> tuple[T | None, Exception | None]:
        """Return the result of a part of a transaction, or its error, after which nothing of the part is left. Raises
        where an error has ended the transaction."""
        self._db.execute("SAVEPOINT part")
        result, failure = None, None
        try:
            result = work(self._db)
        except Exception as error:
            if not self._db.in_transaction:
                raise
            self._db.execute("ROLLBACK TO part")
            failure = error
        self._db.execute("RELEASE part")
        return result, failure

    async def _execute(self, sql: str, *values: object) -> list[sqlite3.Row]:
        return await self._run(lambda db: db.execute(sql, values).fetchall())

    # Tasks ------------------------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> Coroutine[Any, Any, None]:
        """Write a change as a whole or not at all, as it is now, at the call, whenever the writing begins."""
        task_row: dict[str, Any] = {}
        if (task := change.task) is not None:
            task_row = {name: getattr(task, name) for name in ("task_id", *CHANGING)}
            if change.new:
                task_row |= {"request": task.request.to_json(), "created_at": task.created_at}
        samples = [(s.session.session_id, s.session.task_id, s.to_json()) for s in change.samples]

        def write(db: sqlite3.Connection) -> None:
            if change.new:
                _insert(db, "INTO tasks", task_row)
            elif task_row:
                db.execute(_UPDATE_TASK, task_row)
            db.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?)", samples)
            if change.episode is not None:
                _insert(db, "INTO episodes", asdict(change.episode))
            for entry in change.callbacks:
                _insert(db, "OR IGNORE INTO outbox", asdict(entry) | {"host": entry.host, "due_at": entry.created_at})
            for event in change.events:
                _insert_event(db, event)

        return self._run(write)

    async def live_tasks(self) -> list[Task]:
        """Return the tasks that have not ended, in the order in which they came."""
        return await self._tasks(f"status NOT IN {_FINAL}")

    async def find_task(self, task_id: str) -> Task | None:
        return next(iter(await self._tasks("task_id = ?", task_id)), None)

    async def _tasks(self, where: str, *values: object) -> list[Task]:
        def read(db: sqlite3.Connection) -> list[Task]:
            rows = db.execute(f"{_TASKS} WHERE {where} ORDER BY number", values).fetchall()
            return [_task(db, row) for row in rows]

        return await self._run(read)

    async def list_tasks(self, limit: int, after: str | None, status: str | None) -> list[str]:
        """Return task ids, newest first, beginning behind `after`."""
        where, values = ["1"], list[str]()
        if after is not None:
            where.append("number < (SELECT number FROM tasks WHERE task_id = ?)")
            values.append(after)
        if status is not None:
            where.append("status = ?")
            values.append(status)
        sql = f"SELECT task_id FROM tasks WHERE {' AND '.join(where)} ORDER BY number DESC LIMIT ?"
        return [row["task_id"] for row in await self._execute(sql, *values, limit)]

    async def events(self, task_id: str, after: int, limit: int = 500) -> list[Event]:
        """Return the events of a task that came after the one with id `after`, in order of their ids."""
        sql = "SELECT * FROM events WHERE task_id = ? AND id > ? ORDER BY id LIMIT ?"
        rows = await self._execute(sql, task_id, after, limit)
        return [Event(**{**dict(row), "data": orjson.loads(row["data"])}) for row in rows]

    # Episodes ---------------------------------------------------------------------------------------------------------

    async def find_episode(self, session_id: str, attempt: int | None = None) -> EpisodeRow | None:
        """Return the episode of an attempt; None: of the accepted attempt."""
        which = "accepted = 1" if attempt is None else "attempt = ?"
        values = (session_id,) if attempt is None else (session_id, attempt)
        rows = await self._execute(f"{_EPISODES} WHERE session_id = ? AND {which}", *values)
        return EpisodeRow(*rows[0]) if rows else None

    async def episodes(self, task_id: str, after: int, limit: int, excluded: bool) -> list[EpisodeRow]:
        """Return the episodes of a task that came after the one with number `after`, in order of arrival."""
        which = "" if excluded else "AND accepted = 1"
        sql = f"{_EPISODES} WHERE task_id = ? AND number > ? {which} ORDER BY number LIMIT ?"
        return [EpisodeRow(*row) for row in await self._execute(sql, task_id, after, limit)]

    async def mark_fetched(self, numbers: Sequence[int]) -> None:
        """Let these episodes be evicted: they were sent, or their files are damaged, and cannot be fetched."""
        rows = [(number,) for number in numbers]
        await self._run(lambda db: db.executemany("UPDATE episodes SET fetched = 1 WHERE number = ?", rows))

    async def stored_bytes(self) -> int:
        return (await self._execute("SELECT COALESCE(SUM(size), 0) FROM episodes WHERE evicted = 0"))[0][0]

    # Callbacks --------------------------------------------------------------------------------------------------------

    async def due_callbacks(self, now: float, limit: int, without: Sequence[str] = ()) -> list[OutboxEntry]:
        """Return the callbacks that are due first. Those to the hosts `without` (`OutboxEntry.host`) are left out.

        The index gives the first ones of each host: what waits behind them is not read. A callback that would wait for
        more than an hour is due: no pause is that long, so the clock was set back.
        """
        sql = f"""
            WITH RECURSIVE hosts (host) AS (
                SELECT MIN(host) FROM outbox
                UNION ALL SELECT (SELECT MIN(o.host) FROM outbox o WHERE o.host > hosts.host)
                FROM hosts WHERE hosts.host IS NOT NULL)
            SELECT key, task_id, session_id, attempt, url, created_at, tries FROM hosts JOIN outbox ON outbox.rowid IN (
                SELECT * FROM (SELECT rowid FROM outbox first WHERE first.host = hosts.host AND due_at <= ?1
                    ORDER BY due_at LIMIT ?2)
                UNION ALL SELECT * FROM (SELECT rowid FROM outbox first WHERE first.host = hosts.host
                    AND due_at > ?1 + 3600 ORDER BY due_at LIMIT ?2))
            WHERE hosts.host NOT IN ({", ".join("?" * len(without))}) ORDER BY due_at LIMIT ?2"""
        return [OutboxEntry(*row) for row in await self._execute(sql, now, limit, *without)]

    async def next_due(self, now: float) -> float | None:
        """Return when the next callback is due, of those that are not due yet."""
        return (await self._execute("SELECT MIN(due_at) FROM outbox WHERE due_at > ?", now))[0][0]

    async def callback_done(self, entry: OutboxEntry, event: Event, *, fetched: bool) -> None:
        """Remove a callback that was delivered or given up; `event` says which. `fetched`: as in `mark_fetched`."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM outbox WHERE key = ?", (entry.key,))
            if entry.session_id is not None and fetched:
                key = (entry.session_id, entry.attempt)
                db.execute("UPDATE episodes SET fetched = 1 WHERE session_id = ? AND attempt = ?", key)
            _insert_event(db, event)

        await self._run(write)

    async def callback_failed(self, key: str, due_at: float) -> None:
        await self._execute("UPDATE outbox SET tries = tries + 1, due_at = ? WHERE key = ?", due_at, key)

    # Weights and settings ---------------------------------------------------------------------------------------------

    async def add_weights(self, version: str) -> int:
        """Record an update of all weights, and return its number. No server counts as updated alone any more."""

        def write(db: sqlite3.Connection) -> int:
            db.execute("DELETE FROM settings WHERE name = 'rolling'")
            return int(db.execute("INSERT INTO weights (version) VALUES (?)", (version,)).lastrowid or 0)

        return await self._run(write)

    async def weights(self) -> list[tuple[int, str]]:
        return [(row["step"], row["version"]) for row in await self._execute("SELECT * FROM weights ORDER BY step")]

    async def generation(self) -> Generation:
        rows = await self._execute("SELECT value FROM settings WHERE name = 'generation'")
        return Generation.from_json(rows[0]["value"]) if rows else Generation()

    async def set_generation(self, generation: Generation) -> None:
        await self._execute("INSERT OR REPLACE INTO settings VALUES ('generation', ?)", generation.to_json())

    async def rolling(self) -> dict[str, str]:
        """Return the version of each server, by its URL, that was updated alone since the last update of all."""
        rows = await self._execute("SELECT value FROM settings WHERE name = 'rolling'")
        return orjson.loads(rows[0]["value"]) if rows else {}

    async def set_rolling(self, versions: Mapping[str, str]) -> None:
        """Record these, and after how many updates of all weights each version was first set."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR REPLACE INTO settings VALUES ('rolling', ?)", (orjson.dumps(dict(versions)),))
            begun = "INSERT OR IGNORE INTO begun SELECT ?, COALESCE(MAX(step), 0) FROM weights"
            db.executemany(begun, [(version,) for version in versions.values()])

        await self._run(write)

    async def begun(self) -> list[tuple[str, int]]:
        """Return the versions that single servers were ever given, each with the number of updates of all before."""
        return [(row["version"], row["step"]) for row in await self._execute("SELECT * FROM begun")]

    # Bounds -----------------------------------------------------------------------------------------------------------

    async def evict(self, before: float, keep_bytes: int) -> int:
        """Evict episodes of ended or unknown tasks, a thousand at most, and tasks without episodes. Return the number
        of evicted episodes: more may be left until that is 0.

        An episode may be evicted when it was fetched or delivered by a callback, or was damaged when it was asked for,
        or is excluded, and when no callback of its task is left to be made. Those that are older than `before` are
        evicted, and the oldest of the others until at most `keep_bytes` are kept. A task is evicted when it ended
        before `before`, and no episode and no callback of it is left.
        """
        total = await self.stored_bytes()
        rows = await self._execute(
            "SELECT e.number, e.session_id, e.attempt, e.size, e.stored_at FROM episodes e LEFT JOIN tasks t"
            " USING (task_id) WHERE e.evicted = 0 AND (e.fetched OR NOT e.accepted)"
            f" AND (t.status IS NULL OR t.status IN {_FINAL})"
            " AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.task_id = e.task_id) ORDER BY e.number LIMIT 1000"
        )
        gone = []
        for number, session_id, attempt, size, stored_at in rows:
            if stored_at >= before and total <= keep_bytes:
                break
            await asyncio.to_thread(self.files.remove, session_id, attempt)
            total -= size
            gone.append((number,))

        def write(db: sqlite3.Connection) -> None:
            db.executemany("UPDATE episodes SET evicted = 1 WHERE number = ?", gone)
            db.executemany("DELETE FROM episodes WHERE number = ? AND task_id NOT IN (SELECT task_id FROM tasks)", gone)
            _drop_old_tasks(db, before)

        await self._run(write)
        return len(gone)


CHANGING = ("status", "finished_at", "cancelled", "stopped_early")
"""The columns of a task that change."""
_UPDATE_TASK = f"UPDATE tasks SET {', '.join(f'{name} = :{name}' for name in CHANGING)} WHERE task_id = :task_id"
_FINAL = "('COMPLETED', 'FAILED', 'CANCELLED')"
"""The statuses of tasks that have ended."""
_TASKS = "SELECT task_id, request, created_at, finished_at, cancelled, stopped_early FROM tasks"
_EPISODES = "SELECT number, session_id, attempt, accepted, evicted FROM episodes"


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


def _insert(db: sqlite3.Connection, into: str, row: dict[str, Any]) -> None:
    """Insert a row, given as column -> value."""
    db.execute(f"INSERT {into} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))


def _insert_event(db: sqlite3.Connection, event: Event) -> None:
    _insert(db, "INTO events", event.model_dump(exclude={"id"}) | {"data": orjson.dumps(event.data)})


def _drop_old_tasks(db: sqlite3.Connection, before: float) -> None:
    """Remove the tasks that ended before `before` and of which no episode and no callback is left."""
    rows = db.execute(
        f"SELECT task_id FROM tasks t WHERE status IN {_FINAL} AND finished_at < ? AND NOT EXISTS (SELECT 1 FROM"
        " episodes e WHERE e.task_id = t.task_id AND e.evicted = 0) AND NOT EXISTS (SELECT 1 FROM outbox o WHERE"
        " o.task_id = t.task_id)",
        (before,),
    ).fetchall()
    for table in ("events", "episodes", "samples", "tasks"):
        db.executemany(f"DELETE FROM {table} WHERE task_id = ?", rows)
