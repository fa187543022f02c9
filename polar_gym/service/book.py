"""The live tasks, in memory and on the disk: writes their changes, and wakes the requests that wait for news.

Decisions are made in memory, one at a time, on the event loop. No request is answered before its decision is on the
disk. The book is crash-only: when its store fails, memory is ahead of the disk. So the process must stop (`failed`),
and the next process reads the disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from polar_gym.gateway.session.turns import FairQueue
from polar_gym.protocol import Event
from polar_gym.schema import Session
from polar_gym.service.change import Change, OutboxEntry
from polar_gym.service.fleet import Fleet
from polar_gym.service.store import Store, StoreError
from polar_gym.service.task import Ending, Phase, Placement, Task

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Counts:
    """How often each thing has happened since the process started."""

    dispatched: int = 0
    """Sessions that nodes took."""
    retried: int = 0
    episodes: Counter[str] = field(default_factory=Counter)
    """`accepted` and `excluded` ones."""
    tasks: Counter[str] = field(default_factory=Counter)
    """Ended ones, by status."""
    failures: Counter[str] = field(default_factory=Counter)
    """Samples that ended with a failure, by its kind."""
    callbacks: Counter[str] = field(default_factory=Counter)
    """Tries to deliver one, by outcome."""


class Book:
    """The live tasks and the queue of their waiting samples. All changes of tasks are written through the book."""

    def __init__(self, store: Store, fleet: Fleet) -> None:
        self.store = store
        self.fleet = fleet
        self.live: dict[str, Task] = {}
        self.queue: FairQueue[str] = FairQueue()
        self.engines: dict[str, str] = {}
        """Task -> key of the engine that the task's first session went to."""
        self.counts = Counts()
        self.open_samples = 0
        """How many samples have not ended."""
        self.stored_bytes = 0
        self.may_place = asyncio.Event()
        """Set when the queue or the free places have changed."""
        self.outbox_news = asyncio.Event()
        """Set when there is a new callback to be made."""
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """Done when the store, or a background task of the service, has failed."""
        self._owner: dict[str, str] = {}
        """Session -> its live task."""
        self._news: dict[str, asyncio.Event] = {}
        self._writing: set[asyncio.Future[Any]] = set()

    # Reading ----------------------------------------------------------------------------------------------------------

    async def find(self, task_id: str) -> Task | None:
        """Return a live task, or one that has ended and was not evicted."""
        return self.live.get(task_id) or await self.guard(self.store.find_task(task_id))

    def task_of(self, session_id: str) -> Task | None:
        return self.live.get(self._owner.get(session_id, ""))

    def record_at(self, session_id: str) -> str | None:
        """Return the node that has the record of an earlier attempt of a waiting session, if there is one."""
        task = self.task_of(session_id)
        return None if task is None else task.samples[session_id].record_at

    def news(self, task_id: str) -> asyncio.Event:
        """Return an event that is set as soon as something happens to the live task after this call. Ask for it before
        you read the task, so that no change is missed."""
        return self._news.setdefault(task_id, asyncio.Event()) if task_id in self.live else asyncio.Event()

    # Writing ----------------------------------------------------------------------------------------------------------

    def add(self, task: Task) -> None:
        """Add a task that is on the disk already, and queue its waiting samples."""
        self.live[task.task_id] = task
        self._owner.update(dict.fromkeys(task.samples, task.task_id))
        for sample in sorted(task.open_samples(), key=lambda sample: sample.session.sample_index):
            self.open_samples += 1
            if sample.phase is Phase.WAITING:
                self.queue.push(task.task_id, sample.session.session_id)
        self.may_place.set()

    async def ended(self, task: Task, endings: list[Ending], change: Change | None = None) -> list[Placement]:
        """Write that samples have ended: with all that is in `change`, with their callbacks, and with the task's end
        where these samples were its last. Return the placements that ended with the samples."""
        change = change or Change()
        now = time.time()
        change.task = task
        self.open_samples -= len(endings)
        for ending in endings:
            session = ending.sample.session
            change.samples.append(ending.sample)
            said = {"status": session.status, "usable": ending.sample.usable}
            if session.failure is not None:
                said["failure"] = session.failure.kind
                self.counts.failures[session.failure.kind] += 1
            change.events.append(event(task, "session.ended", session, **said))
            _add_callback(change, task, now, session)
        placements = [ending.placement for ending in endings if ending.placement is not None]
        for placement in placements:
            self.fleet.forget(placement)
        waited = [ending.sample.session.session_id for ending in endings if ending.placement is None]
        self.queue.remove(task.task_id, waited)
        if endings and task.ended and task.finished_at is None:
            task.finished_at = now
            change.events.append(event(task, "task.ended", status=task.status))
            _add_callback(change, task, now, None)
        await self.write(change)
        if task.ended:
            self._remove(task)
        if change.callbacks:
            self.outbox_news.set()
        self.may_place.set()
        return placements

    async def lost(self, placements: Iterable[Placement], why: str) -> None:
        """Take placements back that their nodes do not run any more: each session waits again, or has ended."""
        by_task: dict[str, list[Placement]] = {}
        for placement in list(placements):
            self.fleet.forget(placement)
            if (task := self.task_of(placement.session_id)) is not None:
                by_task.setdefault(task.task_id, []).append(placement)
        for task_id, left in by_task.items():  # results may come while another task's losses are written
            if (task := self.live.get(task_id)) is not None and (lost := [at for at in left if task.counts(at)]):
                await self._lost_of(task, lost, why)

    async def _lost_of(self, task: Task, placements: list[Placement], why: str) -> None:
        change = Change()
        endings = []
        for placement in placements:
            said = f"node {placement.node}: {why}"
            log.warning("session %s, attempt %d: lost: %s", placement.session_id, placement.attempt, said)
            if (ending := task.lose(placement.session_id, said)) is not None:
                endings.append(ending)
            else:
                self.again(task, placement, change, said)
        await self.ended(task, endings, change)

    def again(self, task: Task, left: Placement, change: Change, why: str) -> None:
        """Queue a sample that left its place: before the others of its task, because it waited once already."""
        sample = task.samples[left.session_id]
        self.fleet.forget(left)
        self.queue.push(task.task_id, left.session_id, first=True)
        change.samples.append(sample)
        change.events.append(event(task, "session.retried", sample.session, reason=why))
        self.counts.retried += 1
        self.may_place.set()

    async def write(self, change: Change) -> None:
        """Write a change, and wake the requests that wait for news of its task. The change is on the disk when this
        returns."""
        await self.guard(self.watch(asyncio.create_task(self.store.apply(change))))
        for task_id in {event.task_id for event in change.events}:
            if (news := self._news.pop(task_id, None)) is not None:
                news.set()

    async def guard(self, work: Awaitable[T]) -> T:
        """Await work of the store. The work goes on to its end, and a `StoreError` stops the process, even where the
        caller is cancelled."""
        writing = asyncio.ensure_future(work)
        self._writing.add(writing)
        writing.add_done_callback(self._done)
        return await asyncio.shield(writing)

    def _done(self, writing: asyncio.Future[Any]) -> None:
        self._writing.discard(writing)
        if not writing.cancelled() and isinstance(error := writing.exception(), StoreError):
            self._fail(error)

    async def written(self) -> None:
        """Wait for the work that the store still does for cancelled callers."""
        if self._writing:
            await asyncio.wait(self._writing)

    def watch(self, work: asyncio.Task[T]) -> asyncio.Task[T]:
        """Watch work that must not fail: where the work fails, the process stops instead of going on without it."""
        work.add_done_callback(lambda done: None if done.cancelled() else self._fail(done.exception()))
        return work

    def _fail(self, error: BaseException | None) -> None:
        if error is not None and not self.failed.done():
            log.error("the service cannot go on: %r", error, exc_info=error)
            self.failed.set_result(error)

    def _remove(self, task: Task) -> None:
        if self.live.pop(task.task_id, None) is None:
            return
        for session_id in task.samples:
            del self._owner[session_id]
        self.engines.pop(task.task_id, None)
        self.counts.tasks[task.status.value] += 1
        if (news := self._news.pop(task.task_id, None)) is not None:
            news.set()


def event(about: Task | OutboxEntry, kind: Any, session: Session | OutboxEntry | None = None, **data: Any) -> Event:
    """Return an event of now. The store gives the event its id."""
    session_id, attempt = (session.session_id, session.attempt) if session else (None, None)
    return Event(
        id=0, task_id=about.task_id, at=time.time(), kind=kind, session_id=session_id, attempt=attempt, data=data
    )


def _add_callback(change: Change, task: Task, now: float, session: Session | None) -> None:
    if (url := task.request.callback_url) is None:
        return
    session_id, attempt = (session.session_id, session.attempt) if session else (None, None)
    key = f"{session_id}:{attempt}" if session else f"task:{task.task_id}:{int(task.created_at)}"
    change.callbacks.append(OutboxEntry(key, task.task_id, session_id, attempt, url, now))
