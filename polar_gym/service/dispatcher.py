"""Gives waiting sessions to nodes, and takes them back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from polar_gym.protocol import Dispatch
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
from polar_gym.service.scheduler import Placement, plan
from polar_gym.service.task import Phase, Sample, Task

log = logging.getLogger(__name__)

GIVE_UP_SECONDS = 20.0
"""How long a living node is tried to be given a session, before another is."""
LONGEST_PAUSE = 5.0
"""Seconds between two tries to give a session to a node that does not answer."""


class Dispatcher:
    """`run` places sessions as long as it is not cancelled."""

    def __init__(self, book: Book, link: NodeLink) -> None:
        self._book = book
        self._fleet = book.fleet
        self._link = link
        self._work: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        try:
            while True:
                await self._book.room_changed.wait()
                self._book.room_changed.clear()
                placements = plan(self._fleet.rooms(), self._book.queue, self._book.engines)
                for task, sample, member in [self._place(placement) for placement in placements]:
                    await self._send(task, sample, member)
        finally:
            for work in self._work:
                work.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)

    def _place(self, placement: Placement) -> tuple[Task, Sample, Member]:
        task, member = self._book.live[placement.task_id], self._fleet.members[placement.node]
        sample = task.place(placement.session_id, placement.node, member.heartbeat.incarnation)
        member.placed[placement.session_id] = None
        self._book.engines.setdefault(task.task_id, member.heartbeat.engine_key)
        return task, sample, member

    async def _send(self, task: Task, sample: Sample, member: Member) -> None:
        """A placement is on the disk before the node hears of it: no restarted server gives it to another one."""
        attempt = sample.session.attempt
        if self.is_on(member, sample, attempt):
            said = event(task, "session.dispatched", sample.session, node=member.heartbeat.node)
            await self._book.write(Change(task, [sample], [said]))
            self.dispatch(member, task, sample, attempt)

    def is_on(self, member: Member, sample: Sample, attempt: int) -> bool:
        """Whether this attempt of the sample is still placed on this process of the node."""
        where = (sample.session.node, sample.incarnation, sample.session.attempt)
        here = (member.heartbeat.node, member.heartbeat.incarnation, attempt)
        return sample.phase is Phase.PLACED and where == here and self._fleet.is_member(member)

    def dispatch(self, member: Member, task: Task, sample: Sample, attempt: int) -> None:
        """Give a placed session to its node, until it has it or the placement does not count any more."""
        self._start(self._dispatch(member, task, sample, attempt))

    async def _dispatch(self, member: Member, task: Task, sample: Sample, attempt: int) -> None:
        session_id, node = sample.session.session_id, member.heartbeat.node
        order = Dispatch(
            session_id=session_id, attempt=attempt, sample_index=sample.session.sample_index, request=task.request
        )
        pause, deadline = 0.2, time.monotonic() + GIVE_UP_SECONDS
        while self.is_on(member, sample, attempt):
            try:
                await self._link.dispatch(member.heartbeat.url, order)
            except NodeUnreachableError as error:
                if time.monotonic() > deadline:
                    if self.is_on(member, sample, attempt):
                        await self._give_up(task, sample, member, error)
                    return
                log.info("session %s: not dispatched yet: %s", session_id, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            except NodeBusyError as error:
                log.info("session %s: node %s does not take it: %s", session_id, node, error)
                if self.is_on(member, sample, attempt):
                    await self._give_back(task, sample, member)
            except RequestRefusedError as error:
                if self.is_on(member, sample, attempt):
                    task.refuse(session_id, str(error))
                    await self._book.ended(task, [sample])
            else:
                if session_id in member.placed:
                    member.placed[session_id] = member.beats
                member.failing = False
                self._book.metrics.dispatched()
            return

    async def _give_up(self, task: Task, sample: Sample, member: Member, error: NodeUnreachableError) -> None:
        """The node beats, and does not take sessions. If it has this one after all, its next heartbeat shows it, and it
        is called off."""
        session_id, node = sample.session.session_id, member.heartbeat.node
        why = f"node {node} did not take it within {GIVE_UP_SECONDS:g} s: {error}"
        member.full = member.failing = True
        if isinstance(error, NodeFailedError):  # it may fail because of what the session asks for: not for ever
            await self._book.lost(node, [session_id], why)
            return
        log.warning("session %s goes elsewhere: %s", session_id, why)
        task.withdraw(session_id)
        change = Change(task)
        self._book.again(task, sample, change, why)
        await self._book.write(change)

    async def _give_back(self, task: Task, sample: Sample, member: Member) -> None:
        session_id = sample.session.session_id
        member.full = True
        member.placed.pop(session_id, None)
        task.unplace(session_id)
        self._book.queue.push(task.task_id, session_id, first=True)
        await self._book.write(Change(task, [sample]))
        self._book.room_changed.set()

    def call_off(self, placed: Iterable[tuple[str, str, int]]) -> None:
        """Tell nodes to stop these (session, node, attempt), without waiting: what is missed, the answer to their next
        heartbeat repeats."""
        for session_id, node, attempt in placed:
            member = self._fleet.members.get(node)
            if member is not None:
                self._start(self._call_off(member.heartbeat.url, session_id, attempt))

    async def _call_off(self, url: str, session_id: str, attempt: int) -> None:
        try:
            await self._link.cancel(url, session_id, attempt)
        except NodeUnreachableError as error:
            log.info("session %s, attempt %d: not called off yet: %s", session_id, attempt, error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._book.watch(asyncio.create_task(work))
        self._work.add(task)
        task.add_done_callback(self._work.discard)


def placements(samples: Iterable[Sample]) -> list[tuple[str, str, int]]:
    """(session, node, attempt) of those that are on a node."""
    return [
        (sample.session.session_id, sample.session.node, sample.session.attempt)
        for sample in samples
        if sample.phase is Phase.PLACED and sample.session.node is not None
    ]
