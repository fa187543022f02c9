"""The book: which placements a loss ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

from polar_gym.service.book import Book
from polar_gym.service.fleet import Fleet
from polar_gym.service.store import Store
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
