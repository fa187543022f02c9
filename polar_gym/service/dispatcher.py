"""Gives waiting sessions to nodes, and calls sessions off."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from polar_gym.background_loop import cancel_all
from polar_gym.protocol import Dispatch, JournalPiece
from polar_gym.service.book import Book, event
from polar_gym.service.change import Change
from polar_gym.service.fleet import Member
from polar_gym.service.node_link import (
    NodeBusyError,
    NodeFailedError,
    NodeLink,
    NodeUnreachableError,
    RequestRefusedError,
)
from polar_gym.service.scheduler import Assignment, plan
from polar_gym.service.task import Placement, Sample, Task

log = logging.getLogger(__name__)

GIVE_UP_SECONDS = 20.0
"""How long the server tries to give a session to a living node that does not answer. Then another node gets it."""
RECORDS_AT_ONCE = 4
"""How many orders with records are in memory at once. A record takes up to `journal_bytes`, and several times as much
while it is encoded; a node that dies leaves one for each session."""
PAUSES = 4
"""How many times as long as the dispatcher looked at the nodes it waits before it looks again: each heartbeat is news,
and a thousand nodes send some hundred a second."""
LONGEST_PAUSE = 5.0
"""The longest time, in seconds, between two of these tries."""


class Dispatcher:
    """Places waiting sessions on nodes until `run` is cancelled."""

    def __init__(self, book: Book, link: NodeLink) -> None:
        self._book = book
        self._fleet = book.fleet
        self._link = link
        self._work: set[asyncio.Task[None]] = set()
        self._with_records = asyncio.Semaphore(RECORDS_AT_ONCE)
        self._on_the_way: dict[Placement, asyncio.Task[Any] | None] = {}
        """The tasks that make an order or wait for the node's answer."""

    async def run(self) -> None:
        try:
            while True:
                await self._book.may_place.wait()
                self._book.may_place.clear()
                if self._book.queue.peek() is None:
                    continue
                began = time.monotonic()
                free = [member.free_places() for member in self._fleet.members.values() if member.has_room]
                assignments = plan(free, self._book.queue, self._book.engines, self._book.record_at)
                placed: defaultdict[str, list[Placement]] = defaultdict(list)
                for assignment in assignments:
                    placed[assignment.task_id].append(self._place(assignment))
                pause = PAUSES * (time.monotonic() - began)
                await asyncio.gather(*(self._send(self._book.live[name], found) for name, found in placed.items()))
                await asyncio.sleep(pause)
        finally:
            await cancel_all(self._work)

    def _place(self, assignment: Assignment) -> Placement:
        task, member = self._book.live[assignment.task_id], self._fleet.members[assignment.node]
        placement = task.place(assignment.session_id, assignment.node, member.heartbeat.incarnation)
        member.place(placement)
        self._book.engines.setdefault(task.task_id, member.heartbeat.engine_key)
        return placement

    async def _send(self, task: Task, placements: Sequence[Placement]) -> None:
        """Write placements of a task, then give the sessions to their nodes. The placements are on the disk first, so
        that a restarted server does not give a session to another node."""
        placements = [placement for placement in placements if self._member(task, placement) is not None]
        if not placements:
            return
        change = Change(task)
        for placement in placements:
            sample = task.samples[placement.session_id]
            change.samples.append(sample)
            change.events.append(event(task, "session.dispatched", sample.session, node=placement.node))
        await self._book.write(change)
        for placement in placements:
            self.dispatch(task, placement)

    def _member(self, task: Task, placement: Placement) -> Member | None:
        """Return the process that a placement names, or None where the placement has ended or the process is dead."""
        return self._fleet.at(placement) if task.counts(placement) else None

    def dispatch(self, task: Task, placement: Placement) -> None:
        """Give a placed session to its node: try until the node has it, or until the placement has ended. A node that
        has begun to fail since the session was placed is tried with one session at a time."""
        self._start(self._dispatch(task, placement))

    async def _dispatch(self, task: Task, placement: Placement) -> None:
        sample = task.samples[placement.session_id]
        pause, deadline, problem = 0.2, math.inf, None
        while True:
            async with contextlib.nullcontext() if sample.record_at is None else self._with_records:
                if (member := self._member(task, placement)) is None:
                    return
                if problem is None and member.failing and member.unanswered > 1:
                    await self._withdraw(task, placement, "it did not take another session")
                    return
                deadline = min(deadline, time.monotonic() + GIVE_UP_SECONDS)  # counts from the first try
                problem = await self._try(task, placement, member)
            if problem is None or self._member(task, placement) is None:
                return
            if not isinstance(problem, NodeUnreachableError) or time.monotonic() > deadline:
                await self._not_taken(task, placement, member, problem)
                return
            log.info("session %s: not dispatched yet: %s", placement.session_id, problem)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _try(self, task: Task, placement: Placement, member: Member) -> Exception | None:
        """Give a session to its node, or return why the node did not take it."""
        session_id = placement.session_id
        sample = task.samples[session_id]
        self._on_the_way[placement] = asyncio.current_task()
        try:
            order = Dispatch(
                session_id=session_id,
                attempt=placement.attempt,
                sample_index=sample.session.sample_index,
                request=task.request,
                resume=sample.record_at is not None,
                records=await self._records(sample) if sample.record_at is not None else [],
                record_from=sample.record_from,
            )
            await self._link.dispatch(member.heartbeat.url, order)
        except (NodeUnreachableError, NodeBusyError, RequestRefusedError) as error:
            return error
        finally:
            del self._on_the_way[placement]
        if placement in member.placed:
            member.placed[placement] = member.beats
        member.failing = False
        self._book.counts.dispatched += 1
        return None

    async def _records(self, sample: Sample) -> list[JournalPiece]:
        """Return the journals of a sample's earlier attempts that count; none where they cannot be read."""
        session_id = sample.session.session_id
        try:
            pieces = await asyncio.to_thread(self._book.store.journals.of, session_id)
            return [piece for piece in pieces if piece.attempt >= sample.record_from]
        except OSError as error:
            log.error("session %s goes on without the server's record, which cannot be read: %s", session_id, error)
            return []

    async def _not_taken(self, task: Task, placement: Placement, member: Member, error: Exception) -> None:
        """Decide what becomes of a session that its node did not take."""
        if isinstance(error, RequestRefusedError):
            await self._book.ended(task, [task.refuse(placement.session_id, str(error))])
        elif isinstance(error, NodeBusyError):
            member.full = True
            await self._withdraw(task, placement, f"it did not take the session: {error}")
        else:
            await self._give_up(task, placement, member, error)

    async def _give_up(self, task: Task, placement: Placement, member: Member, error: Exception) -> None:
        """Take a session back from a node that sends heartbeats and does not take sessions. Where the node has the
        session after all, its next heartbeat shows this, and the session is called off there."""
        why = f"it did not take the session within {GIVE_UP_SECONDS:g} s: {error}"
        member.full = member.failing = True
        if isinstance(error, NodeFailedError):  # the session may cause the failure: `lost` limits the tries
            await self._book.lost([placement], why)
            return
        await self._withdraw(task, placement, why)

    async def _withdraw(self, task: Task, placement: Placement, why: str) -> None:
        """Queue a session again, as the next attempt, because its node does not take sessions. The node may have this
        attempt, also where it has refused the last order: the answer to an earlier order may be lost, and aiohttp sends
        a PUT again by itself where the connection breaks."""
        why = f"node {placement.node}: {why}"
        log.warning("session %s goes elsewhere: %s", placement.session_id, why)
        task.withdraw(placement.session_id)
        change = Change(task)
        self._book.again(task, placement, change, why)
        await self._book.write(change)

    async def lost(self, placements: Iterable[Placement], why: str) -> None:
        """Take placements back from a process that is dead, and give up the orders that are on their way to it: those
        with records would hold up others until their timeout, which grows with the record."""
        placements = list(placements)
        for placement in placements:
            if (waiting := self._on_the_way.get(placement)) is not None:
                waiting.cancel()
        await self._book.lost(placements, why)

    def call_off(self, placements: Iterable[Placement]) -> None:
        """Tell nodes to stop these sessions, without waiting for them. Where a node is not reached, the answer to its
        next heartbeat repeats the order."""
        for placement in placements:
            if (member := self._fleet.at(placement)) is not None:
                self._start(self._call_off(member.heartbeat.url, placement))

    async def _call_off(self, url: str, placement: Placement) -> None:
        session_id, attempt = placement.session_id, placement.attempt
        try:
            await self._link.cancel(url, session_id, attempt)
        except NodeUnreachableError as error:
            log.info("session %s, attempt %d: not called off yet: %s", session_id, attempt, error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._book.watch(asyncio.create_task(work))
        self._work.add(task)
        task.add_done_callback(self._work.discard)
