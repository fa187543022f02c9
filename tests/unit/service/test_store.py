"""The store: whole changes or none, what is evicted and what never is, episodes as files."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.errors import ConfigError
from polar_gym.protocol import Event, Generation
from polar_gym.service.book import event
from polar_gym.service.change import Change, NewEpisode, OutboxEntry
from polar_gym.service.episode_files import DamagedError
from polar_gym.service.store import MIGRATIONS, Store, StoreError
from polar_gym.service.task import Phase, Task
from polar_gym.service.weights import WeightHistory
from tests.lifecycle.peer_node import make_request


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(tmp_path)
    yield store
    await store.close()


async def add_task(store: Store, task_id: str, *, ended_at: float | None = None, **fields: object) -> Task:
    task = Task.new(make_request(task_id, **fields), 1.0)
    if ended_at is not None:
        task.cancel()
        task.finished_at = ended_at
    await store.apply(Change(task, True, list(task.samples.values()), [event(task, "task.submitted")]))
    return task


async def add_episode(store: Store, task: Task, stored_at: float, *, accepted: bool = True, attempt: int = 0) -> str:
    session_id = next(iter(task.samples))
    size = store.files.write(session_id, attempt, b'{"some": "episode"}')
    new = NewEpisode(session_id, attempt, task.task_id, accepted, "" if accepted else "late", stored_at, size)
    await store.apply(Change(episode=new))
    return session_id


async def test_a_task_comes_back_as_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path)
    task = await add_task(store, "t", num_samples=3, metadata={"a": [1, None]})
    placement = task.place(next(iter(task.samples)), "node", "incarnation")
    await store.apply(Change(task, samples=[task.samples[placement.session_id]]))
    await store.set_generation(Generation(paused=True, running="keep"))
    await store.add_weights("v1")
    await store.close()
    store = Store(tmp_path)
    (again,) = await store.live_tasks()
    assert (again.request, again.samples, again.created_at) == (task.request, task.samples, 1.0)
    assert again.placements() == [placement]
    assert (await store.generation()).running == "keep"
    assert await store.weights() == [(1, "v1")]
    await store.close()


async def test_a_change_is_written_as_it_was_when_it_was_made(store: Store) -> None:
    """Guards against a sample that has ended on the disk before its episode is there: a later change of the sample went
    along with an earlier one, and the process was killed between the two."""
    task = await add_task(store, "t")
    (sample,) = task.samples.values()
    written = store.apply(Change(task, samples=[sample]))
    sample.phase = Phase.ENDED
    await written
    (again,) = await store.live_tasks()
    assert [each.phase for each in again.samples.values()] == [Phase.WAITING]


async def test_a_change_is_written_whole_or_not_at_all(store: Store) -> None:
    task = await add_task(store, "t")
    session_id = await add_episode(store, task, 1.0)
    second = NewEpisode(session_id, 1, "t", True, "", 1.0, 1)
    with pytest.raises(StoreError, match="UNIQUE"):
        await store.apply(Change(task, events=[event(task, "task.ended")], episode=second))
    assert [found.kind for found in await store.events("t", 0)] == ["task.submitted"], "its event neither"
    assert (await store.find_episode(session_id, 1)) is None
    await store.apply(Change(events=[event(task, "session.status")]))
    assert len(await store.events("t", 0)) == 2, "the store goes on after a refused change"


async def written_at_once(store: Store, sizes: list[int | None]) -> tuple[list[bool], list[int]]:
    """Make changes at the same time, each with an event of so many characters; None: one that the database refuses.
    Return which of them succeeded, and the numbers of the events that a later reader finds."""
    task = await add_task(store, "t")
    session_id = await add_episode(store, task, 1.0)

    def change(number: int, size: int | None) -> Change:
        said = event(task, "session.status", number=number, text="x" * (size or 0))
        refused = NewEpisode(session_id, number + 1, "t", True, "", 1.0, 1)
        return Change(
            task, samples=list(task.samples.values()), events=[said], episode=refused if size is None else None
        )

    made = (store.apply(change(number, size)) for number, size in enumerate(sizes))
    outcomes = await asyncio.gather(*made, return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, StoreError) for outcome in outcomes), outcomes
    await store.close()
    with contextlib.closing(sqlite3.connect(store.path)) as reader:
        found = [orjson.loads(row[0]) for row in reader.execute("SELECT data FROM events WHERE kind='session.status'")]
    return [outcome is None for outcome in outcomes], sorted(each["number"] for each in found)


@given(st.lists(st.sampled_from([0, 10, None]), max_size=40))
async def test_changes_that_share_a_commit_fail_alone(sizes: list[int | None]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        succeeded, found = await written_at_once(Store(Path(directory)), sizes)
    assert succeeded == [size is not None for size in sizes]
    assert found == [number for number, size in enumerate(sizes) if size is not None]


async def test_changes_that_wait_share_a_commit(tmp_path: Path) -> None:
    """Guards against a service that is as slow as its disk syncs."""
    store, said = Store(tmp_path), list[str]()
    store._db.set_trace_callback(said.append)
    succeeded, _ = await written_at_once(store, [0] * 500)
    assert all(succeeded)
    assert said.count("COMMIT") < 100


async def test_a_disk_that_fills_in_a_commit_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """The error may end the whole transaction: then none of its changes may be told as written."""
    store = Store(tmp_path)
    store._db.execute("PRAGMA max_page_count = 60")
    succeeded, found = await written_at_once(store, [10, 20_000] * 30)
    assert not all(succeeded)
    assert found == [number for number, success in enumerate(succeeded) if success]


KILLED_IN_A_WRITE = """
import os, signal, sys
from pathlib import Path
from polar_gym import durable
path = Path(sys.argv[1])
durable.make_directory(path.parent)
with durable.replacing(path) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_in_a_write(path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED_IN_A_WRITE, str(path)], check=False)
    assert killed.returncode == -9


async def test_a_database_that_cannot_even_be_rolled_back_is_an_error(store: Store) -> None:
    """Guards against requests that wait for ever."""
    store._db.close()
    with pytest.raises(StoreError, match="closed"):
        await asyncio.wait_for(store.find_task("t"), 60)


async def test_a_server_removes_the_half_episodes_of_killed_ones(tmp_path: Path) -> None:
    """A node delivers again until its episode is stored: a server that is killed each time would fill the disk."""
    whole = tmp_path / "episodes" / "ab" / "abc.0.json.gz"
    for _ in range(2):
        kill_in_a_write(whole)
    assert len(list(whole.parent.iterdir())) == 2
    store = Store(tmp_path)
    store.files.write("abc", 0, b"{}")
    assert list(whole.parent.iterdir()) == [whole]
    await store.close()


async def test_an_episode_that_nobody_fetched_is_never_evicted(store: Store) -> None:
    task = await add_task(store, "t", ended_at=2.0)
    session_id = await add_episode(store, task, 2.0)
    assert await store.evict(before=100.0, keep_bytes=0) == 0
    row = await store.find_episode(session_id)
    assert row is not None
    assert store.files.read(session_id, 0) == b'{"some": "episode"}'
    await store.mark_fetched([row.number])
    assert await store.evict(before=1.0, keep_bytes=10**9) == 0, "neither old nor too much"
    assert await store.evict(before=1.0, keep_bytes=0) == 1, "too much"
    with pytest.raises(DamagedError):
        store.files.read(session_id, 0)
    assert (await store.stored_bytes(), await store.find_task("t") is not None) == (0, True)
    await store.evict(before=3.0, keep_bytes=0)
    assert await store.find_task("t") is None, "an old task of which nothing is left goes as a whole"
    assert await store.events("t", 0) == []


async def test_nothing_of_a_live_task_or_one_with_callbacks_under_way_is_evicted(store: Store) -> None:
    live = await add_task(store, "live")
    told = await add_task(store, "told", ended_at=1.0)
    for task in (live, told):
        session_id = await add_episode(store, task, 1.0)
        row = await store.find_episode(session_id)
        assert row is not None
        await store.mark_fetched([row.number])
    entry = OutboxEntry("k", "told", session_id, 0, "http://x/", 1.0)
    await store.apply(Change(callbacks=[entry]))
    assert await store.evict(before=100.0, keep_bytes=0) == 0
    done = Event(id=0, task_id="told", at=2.0, kind="callback.delivered")
    await store.callback_done(entry, done, fetched=True)
    assert await store.evict(before=100.0, keep_bytes=0) == 1
    assert [task.task_id for task in await store.live_tasks()] == ["live"]


async def test_what_belongs_to_no_task_is_evicted_too(store: Store) -> None:
    gone = Task.new(make_request("gone"), 0.0)
    session_id = await add_episode(store, gone, 1.0, accepted=False)
    assert await store.evict(before=2.0, keep_bytes=10**9) == 1
    assert await store.find_episode(session_id, 0) is None


async def test_callbacks_are_due_in_order_and_repeated_later(store: Store) -> None:
    entries = [OutboxEntry(f"k{n}", "t", None, None, "http://x/", float(n)) for n in range(3)]
    await store.apply(Change(callbacks=entries))
    await store.apply(Change(callbacks=entries[:1]))
    assert [entry.key for entry in await store.due_callbacks(10.0, 2)] == ["k0", "k1"]
    await store.callback_failed("k0", due_at=50.0)
    assert [entry.key for entry in await store.due_callbacks(10.0, 9)] == ["k1", "k2"]
    assert await store.next_due(10.0) == 50.0
    assert not await store.due_callbacks(60.0, 9, ["http://x/"])
    assert len(await store.due_callbacks(60.0, 9, ["http://x:80/", "http://x.y/"])) == 3
    assert [entry.tries for entry in await store.due_callbacks(60.0, 9) if entry.key == "k0"] == [1]


async def test_a_callback_that_failed_comes_before_later_ones(store: Store) -> None:
    """Guards against a repetition that waits as long as new callbacks come."""
    await store.apply(Change(callbacks=[OutboxEntry("old", "t", None, None, "http://x/", 1.0)]))
    await store.callback_failed("old", due_at=2.0)
    await store.apply(Change(callbacks=[OutboxEntry(f"k{n}", "t", None, None, "http://x/", 3.0) for n in range(9)]))
    assert [entry.key for entry in await store.due_callbacks(10.0, 1)] == ["old"]


async def test_a_clock_that_was_set_back_delays_no_callback(store: Store) -> None:
    await store.apply(Change(callbacks=[OutboxEntry("k", "t", None, None, "http://x/", 90_000.0)]))
    assert [entry.key for entry in await store.due_callbacks(3_600.0, 9)] == ["k"]
    await store.callback_failed("k", due_at=3_900.0)
    assert not await store.due_callbacks(3_600.0, 9)


async def test_what_waits_behind_the_next_callbacks_is_not_read(store: Store) -> None:
    """Guards against callbacks that are sent the slower the more of them wait: 14 a second of 100,000."""
    hosts = ["http://a/", "http://b/"]
    for host in hosts:
        entries = [OutboxEntry(f"{host}{n}", f"t{n}", None, None, host, float(n)) for n in range(5_000)]
        await store.apply(Change(callbacks=entries))
    steps = 0

    def stepped() -> None:
        nonlocal steps
        steps += 1

    store._db.set_progress_handler(stepped, 100)
    assert len(await store.due_callbacks(1e6, 9)) == 9
    assert {entry.url for entry in await store.due_callbacks(1e6, 9, hosts[:1])} == {hosts[1]}
    assert not await store.due_callbacks(1e6, 9, hosts)
    assert steps < 50, "hundreds of the machine's steps"
    for number in range(30):
        await add_episode(store, Task.new(make_request(f"gone-{number}"), 0.0), 1.0, accepted=False)
    steps = 0
    assert await store.evict(before=2.0, keep_bytes=10**9) == 30
    assert steps < 300, "no look at all callbacks for each episode"


def test_how_far_a_session_lies_behind() -> None:
    history = WeightHistory()
    assert history.behind(None) is None, "no version was ever set"
    for step, version in enumerate(["a", "b", "a"], start=1):
        history.add(step, version)
    assert (history.behind("a"), history.behind("b"), history.behind(None)) == (0, 1, 3)
    assert history.behind("unknown (the update to b failed)") == 3, "any weights may have sampled it"
    history.begin("c")
    history.begin("b")
    assert (history.behind("c"), history.behind("b")) == (0, 1), "single servers have them"
    history.add(4, "d")
    assert history.behind("c") == 1
    history.begin("of-a-server-before-a-restart", 3)
    assert history.behind("of-a-server-before-a-restart") == 1


async def test_a_database_without_a_version_goes_on(tmp_path: Path) -> None:
    """Databases of before the versions have the tables of the first script."""
    urls = ("http://trainer:8000/a/b", "https://x", "http://x/")
    with sqlite3.connect(tmp_path / "service.sqlite") as db:
        db.executescript(MIGRATIONS[0])
        db.execute("INSERT INTO settings VALUES ('kept', 'x')")
        db.executemany("INSERT INTO outbox VALUES (?1, 't', NULL, NULL, ?1, 5, 0, 0)", [(url,) for url in urls])
    store = Store(tmp_path)
    assert not await store.due_callbacks(4.0, 9)
    found = {entry.url: entry.host for entry in await store.due_callbacks(5.0, 9)}
    assert found == dict(zip(urls, ("http://trainer:8000/", "https://x/", "http://x/"), strict=True))
    assert not await store.due_callbacks(5.0, 9, [*found.values()]), "the database has the same hosts"
    await store.close()
    with sqlite3.connect(tmp_path / "service.sqlite") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
        assert db.execute("SELECT name FROM settings").fetchall() == [("kept",)]


async def test_scripts_that_a_database_lacks_are_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await Store(tmp_path).close()
    more = (*MIGRATIONS, "CREATE TABLE added (number INTEGER); INSERT INTO added VALUES (1)")
    monkeypatch.setattr("polar_gym.service.store.MIGRATIONS", more)
    for _ in range(2):
        await Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "service.sqlite") as db:
        assert db.execute("SELECT number FROM added").fetchall() == [(1,)]


async def test_a_script_that_fails_leaves_the_database_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Store(tmp_path).close()
    more = (*MIGRATIONS, "CREATE TABLE half (number INTEGER); INSERT INTO nowhere VALUES (1)")
    monkeypatch.setattr("polar_gym.service.store.MIGRATIONS", more)
    with pytest.raises(StoreError, match="no such table: nowhere"):
        Store(tmp_path)
    monkeypatch.undo()
    await Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "service.sqlite") as db:
        assert db.execute("SELECT * FROM sqlite_master WHERE name = 'half'").fetchall() == []


async def test_a_database_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    """Guards against an older program that writes into tables which it does not know."""
    await Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "service.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match=r"service\.sqlite: a newer polar-gym wrote it \(schema 99, .*state="):
        Store(tmp_path)


async def test_an_update_of_all_ends_the_versions_of_single_servers_at_once(store: Store) -> None:
    """Guards against a kill between two writes: nodes that began then had a server under the version before."""
    await store.set_rolling({"http://a:8000": "3"})
    await store.add_weights("4")
    assert await store.rolling() == {}
    assert await store.begun() == [("3", 0)], "sessions of that server lie one version behind, and not all"
