"""The book: which placements a loss ends, and what stops the service."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polar_gym.service.book import Book, event
from polar_gym.service.change import Change
from polar_gym.service.fleet import Fleet
from polar_gym.service.store import Store, StoreError
from polar_gym.service.task import Task
from tests.lifecycle.peer_node import make_request


async def test_a_session_that_was_placed_elsewhere_while_a_loss_is_written_is_not_lost(tmp_path: Path) -> None:
    """Guards against a session that is taken from the node which runs it, because an earlier one of its nodes died."""
    store = Store(tmp_path)
    book = Book(store, Fleet())
    first, second = Task.new(make_request("first"), 0.0), Task.new(make_request("second"), 0.0)
    dead = []
    for task in (first, second):
        book.add(task)
        book.queue.pop()
        dead.append(task.place(next(iter(task.samples)), "dead", "i"))
    losing = asyncio.create_task(book.lost(dead, "it died"))
    await asyncio.sleep(0)  # the first task's loss is being written now
    second.withdraw(dead[1].session_id)
    elsewhere = second.place(dead[1].session_id, "other", "i")
    await losing
    assert first.placements() == []
    assert second.placements() == [elsewhere]
    await store.close()


async def test_a_change_that_is_not_written_stops_the_service_whatever_the_error(tmp_path: Path) -> None:
    """Guards against a server that goes on with decisions which are not on its disk."""
    store = Store(tmp_path)
    book = Book(store, Fleet())
    task = Task.new(make_request("t"), 0.0)
    with pytest.raises(TypeError, match="serializable"):
        await book.write(Change(task, new=True, events=[event(task, "task.submitted", reason=object())]))
    assert isinstance(book.failed.result(), TypeError)
    await store.close()


async def test_a_change_that_is_not_written_stops_the_service_also_when_its_caller_is_gone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    book = Book(store, Fleet())
    task = Task.new(make_request("t"), 0.0)
    await book.write(Change(task, new=True))
    again = asyncio.create_task(book.write(Change(task, new=True)))
    await asyncio.sleep(0)  # the change is being written now
    again.cancel()
    await book.written()
    assert isinstance(book.failed.result(), StoreError)
    await store.close()


def test_a_session_whose_next_node_does_not_take_it_is_still_resumed() -> None:
    """Guards against calls that are sampled again although the server has their record."""
    task = Task.new(make_request("a"), 0.0)
    (session_id,) = task.samples
    task.place(session_id, "first", "i")
    assert task.lose(session_id, "it died") is None
    task.place(session_id, "second", "i")
    task.withdraw(session_id)
    task.place(session_id, "third", "i")
    assert task.samples[session_id].record_at == "first"
