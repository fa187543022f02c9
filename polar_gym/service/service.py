"""The rollout service without HTTP: takes tasks, gives their sessions to nodes, and keeps the episodes.

`Book` keeps the tasks and writes their changes, `Bounds` keeps them within limits, `Fleet` knows the nodes, and
`Dispatcher` gives sessions to nodes. A session stays placed on its node, also over a restart of the server, until the
node delivers its episode, restarts, or is silent for longer than its lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from weakref import WeakValueDictionary

from polar_gym.background_loop import cancel_all
from polar_gym.http.urls import engine_url
from polar_gym.protocol import (
    Delivery,
    DeliveryAnswer,
    Generation,
    GenerationAnswer,
    GenerationState,
    Heartbeat,
    HeartbeatAnswer,
    JournalPiece,
    Journals,
    JournalsAnswer,
    NodeState,
    TaskState,
    Weights,
)
from polar_gym.schema import Session, Status, TaskRequest
from polar_gym.service.book import Book, event
from polar_gym.service.bounds import Bounds, Limits
from polar_gym.service.change import Change, NewEpisode
from polar_gym.service.dispatcher import Dispatcher
from polar_gym.service.fleet import Fleet, Member, Orphan
from polar_gym.service.node_link import NodeLink, NodeUnreachableError
from polar_gym.service.store import Store, StoreError
from polar_gym.service.task import Ending, Phase, Placement, Task, Verdict
from polar_gym.service.weights import WeightHistory


class ConflictError(Exception):
    """The task id belongs to another request already."""


class UnknownTaskError(LookupError):
    """No task has this id, or the task was evicted."""


class UnknownNodeError(LookupError):
    """No living node has this name."""


class RolloutService:
    """`async with RolloutService(...)` reads the store, and works until the context ends."""

    def __init__(self, store: Store, link: NodeLink, limits: Limits) -> None:
        self.store = store
        self.limits = limits
        self.fleet = Fleet()
        self.book = Book(store, self.fleet)
        self.generation = Generation()
        self.weights = WeightHistory()
        self._rolling: dict[str, str] = {}
        """See `Store.rolling`."""
        self._link = link
        self._bounds = Bounds(self.book, limits)
        self._dispatcher = Dispatcher(self.book, link)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._orphans: dict[str, Orphan] = {}
        self._loops: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> RolloutService:
        self.generation = await self.store.generation()
        self.weights = WeightHistory(await self.store.weights())
        self._rolling = await self.store.rolling()
        for version, step in await self.store.begun():
            self.weights.begin(version, step)
        for version in self._rolling.values():  # a database of an earlier version tells no step
            self.weights.begin(version)
        self.book.stored_bytes = await self.store.stored_bytes()
        for task in await self.store.live_tasks():
            self.book.add(task)
            for placement in task.placements():
                self._orphans.setdefault(placement.node, Orphan()).placed.append(placement)
        deadline = time.monotonic() + self.limits.lease_seconds  # of many tasks, reading takes longer than a lease
        for orphan in self._orphans.values():
            orphan.deadline = deadline
        self._loops = [
            self.book.watch(asyncio.create_task(loop))
            for loop in (self._dispatcher.run(), self._watch_leases(), self._bounds.keep_evicting())
        ]
        return self

    async def __aexit__(self, *exception: object) -> None:
        await cancel_all(self._loops)
        await self.book.written()

    # Trainers ---------------------------------------------------------------------------------------------------------

    async def submit(self, request: TaskRequest) -> tuple[TaskState, bool]:
        """Take a task. Return its state, and whether the task is new. Raise `ConflictError` or `OverloadedError`."""
        async with self._lock(f"task {request.task_id}"):
            known = await self.book.find(request.task_id)
            if known is not None:
                if different := known.differences(request):
                    raise ConflictError(
                        f"task_id={request.task_id!r} was submitted with another {', '.join(different)}; "
                        "choose another task_id, or send the same request"
                    )
                return known.state(), False
            with self._bounds.room_for(request):
                task = Task.new(request, time.time())
                submitted = [event(task, "task.submitted")]
                await self.book.write(Change(task, new=True, samples=list(task.samples.values()), events=submitted))
            self.book.add(task)
        return task.state(), True

    async def task(self, task_id: str) -> TaskState:
        """Return the state of a task. Raise `UnknownTaskError`."""
        task = await self.book.find(task_id)
        if task is None:
            raise UnknownTaskError(f"task_id={task_id!r}: there is no such task, or it was evicted")
        return task.state()

    async def cancel(self, task_id: str) -> TaskState:
        """Cancel a task, and return its state. A task that has ended stays as it is. Raise `UnknownTaskError`."""
        task = self.book.live.get(task_id)
        if task is None:
            return await self.task(task_id)
        self._dispatcher.call_off(await self.book.ended(task, task.cancel()))
        return task.state()

    async def set_generation(self, order: Generation) -> GenerationState:
        """Pause or resume generation on all nodes, and return their acknowledgements."""
        self.generation = order
        await self.book.guard(self.store.set_generation(order))
        return await self._tell_all(lambda url: self._link.generation(url, order))

    async def set_weights(self, order: Weights) -> GenerationState:
        """Record that the engine's weights were updated, tell the nodes, and cancel the sessions that are too stale
        now. An order for one server of an engine holds until the next one for all."""
        async with self._lock("weights"):
            rolling = {} if order.engine is None else {**self._rolling, engine_url(order.engine): order.version}
            if order.engine is not None:
                self.weights.begin(order.version)
            elif order.version != self.weights.current:
                step = await self.book.guard(self.store.add_weights(order.version))
                self.weights.add(step, order.version)
            if rolling != self._rolling:
                await self.book.guard(self.store.set_rolling(rolling))
                self._rolling = rolling
        state = await self._tell_all(lambda url: self._link.weights(url, order))
        for task in list(self.book.live.values()):
            await self._cancel_stale(task)
        return state

    def node_states(self) -> list[NodeState]:
        return self.fleet.states(time.monotonic())

    # Nodes ------------------------------------------------------------------------------------------------------------

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        """Take in a heartbeat, and return the orders for its node. Raise `polar_gym.service.fleet.ReplacedError`."""
        replaced = self.fleet.beat(heartbeat, time.monotonic())
        member = self.fleet.members[heartbeat.node]
        if replaced is not None:
            await self._restarted(member, replaced.placed)
        if (orphan := self._orphans.pop(heartbeat.node, None)) is not None:
            await self._adopt(member, orphan.placed)
        unwanted = await self._hear(member)
        if missing := member.missing():
            await self.book.lost(missing, "its gateway does not know it any more")
        self.book.may_place.set()
        return HeartbeatAnswer(
            lease_seconds=self.limits.lease_seconds,
            known=not unwanted,
            cancel=unwanted,
            generation=self.generation,
            weight_version=self.weights.current,
            engines=self._rolling,
            draining=member.draining,
        )

    async def deliver(self, node: str, delivery: Delivery) -> DeliveryAnswer:
        """Store an episode, and return whether it is accepted. The episode is on the disk when this returns. The same
        delivery twice gets the same answer."""
        session = delivery.episode.session
        async with self._lock(f"session {session.session_id}"):
            known = await self.store.find_episode(session.session_id, delivery.attempt)
            if known is not None:
                return DeliveryAnswer(accepted=known.accepted)
            return DeliveryAnswer(accepted=await self._take_in(node, delivery))

    async def journals(self, node: str, sent: Journals) -> JournalsAnswer:
        """Keep pieces of the journals of sessions that the node runs, and return how far each journal is here. Raise
        `StoreError`."""
        wanted = [piece for piece in sent.pieces if self._may_resume(node, piece)]

        def keep() -> dict[str, int]:
            files, most = self.store.journals, self.limits.journal_bytes
            sizes = {f"{each.session_id}.{each.attempt}": files.append(each, most) for each in wanted}
            return {name: size for name, size in sizes.items() if size is not None}

        try:
            return JournalsAnswer(sizes=await asyncio.to_thread(keep))
        except OSError as error:
            raise StoreError(f"journals cannot be kept: {error}") from error

    def _may_resume(self, node: str, piece: JournalPiece) -> bool:
        """Return whether a piece is of a session that the node runs, and that would go on after the node's death."""
        task = self.book.task_of(piece.session_id)
        if task is None or not task.request.retries.resume:
            return False
        placement = task.samples[piece.session_id].placement
        return placement is not None and (placement.node, placement.attempt) == (node, piece.attempt)

    def drain(self, node: str) -> NodeState:
        """Let a node drain, and return its state. The answer to the node's next heartbeat tells the node. Raise
        `UnknownNodeError`."""
        member = self.fleet.members.get(node)
        if member is None:
            raise UnknownNodeError(f"node={node!r}: no living node has this name")
        member.draining = True
        return next(state for state in self.node_states() if state.node == node)

    async def node_died(self, node: str, incarnation: str | None = None) -> None:
        """Take the sessions back from a node whose process is known to be dead, without waiting for its lease."""
        member = self.fleet.take(node, incarnation)
        if member is not None:
            await self._dispatcher.lost(member.placed, "it died")

    # Inside: episodes -------------------------------------------------------------------------------------------------

    async def _take_in(self, node: str, delivery: Delivery) -> bool:
        """Store an episode that was not delivered before, and return whether it is accepted."""
        episode = delivery.episode
        session = episode.session
        session.attempt, session.node = delivery.attempt, session.node or node
        begun = session.timing.running is not None
        session.staleness = self.weights.behind(session.weight_version) if begun else None
        size = await asyncio.to_thread(
            lambda: self.store.files.write(session.session_id, session.attempt, episode.to_json())
        )
        self.book.stored_bytes += size
        task = self.book.live.get(session.task_id)
        verdict = task.judge(episode) if task else Verdict(False, "its task is gone, or has ended")
        new = NewEpisode(
            session.session_id, session.attempt, session.task_id, verdict.accepted, verdict.reason, time.time(), size
        )
        self.book.counts.episodes["accepted" if verdict.accepted else "excluded"] += 1
        if task is None:
            await self.book.write(Change(episode=new))
        else:
            await self._judged(task, session, verdict, new)
        return verdict.accepted

    async def _judged(self, task: Task, session: Session, verdict: Verdict, new: NewEpisode) -> None:
        """Write the decision of `Task.judge`, with all its consequences, as one change."""
        change = Change(episode=new)
        if not verdict.accepted:
            change.events.append(event(task, "session.excluded", session, reason=verdict.reason))
        if verdict.retried is not None:
            self.book.again(task, verdict.retried, change, verdict.reason)
        endings = [verdict.ended, *task.stop_early()] if verdict.ended is not None else []
        left = await self.book.ended(task, endings, change)
        delivered = (session.session_id, session.attempt)
        self._dispatcher.call_off(at for at in left if (at.session_id, at.attempt) != delivered)

    async def _cancel_stale(self, task: Task) -> None:
        """End the running sessions of a task that began too many weight versions ago, where the task asks for this."""
        if task.request.when_stale != "cancel" or task.request.max_staleness is None:
            return
        endings: list[Ending] = []
        for sample in list(task.open_samples()):
            if sample.phase is not Phase.PLACED or sample.session.status is not Status.RUNNING:
                continue
            behind = self.weights.behind(sample.session.weight_version)
            if behind is not None and task.too_stale(behind):
                endings.append(task.cancel_stale(sample.session.session_id, behind))
        if endings:
            self._dispatcher.call_off(await self.book.ended(task, endings))

    # Inside: nodes ----------------------------------------------------------------------------------------------------

    async def _hear(self, member: Member) -> list[str]:
        """Take over how far the node's sessions are. Return the ids of the sessions that no node needs to run. Where
        another attempt of a session goes on, perhaps on this node, only the old attempt is called off."""
        unwanted = []
        change = Change()
        for placement, told in member.held.items():
            task = self.book.task_of(placement.session_id)
            sample = task.samples[placement.session_id] if task is not None else None
            if task is not None and sample is not None and task.counts(placement):
                if task.heard(told):
                    change.samples.append(sample)
                    change.events.append(event(task, "session.status", sample.session, status=told.status))
            elif told.status.final:
                continue  # the episode is on its way here, and will be kept as excluded
            elif sample is not None and sample.phase is not Phase.ENDED:
                self._dispatcher.call_off([placement])
            else:
                unwanted.append(placement.session_id)
        if change.events:
            await self.book.write(change)
        return unwanted

    async def _adopt(self, member: Member, placed: Iterable[Placement]) -> None:
        """Take up the sessions that an earlier server process had placed on a node which sends its first heartbeat."""
        heartbeat = member.heartbeat
        of_another = []
        for placement in placed:
            task = self.book.task_of(placement.session_id)
            if task is None or not task.counts(placement):
                continue
            if placement.incarnation != heartbeat.incarnation:
                of_another.append(placement)
                continue
            self.book.engines.setdefault(task.task_id, heartbeat.engine_key)
            known = placement in member.held
            member.place(placement, member.beats if known else None)
            if not known:  # the earlier server process may not have sent the order
                self._dispatcher.dispatch(task, placement)
        await self._restarted(member, of_another)

    async def _restarted(self, member: Member, placements: Iterable[Placement]) -> None:
        """Take the placements back that an earlier process of the node ran. Sessions that it had finished stay placed:
        their episodes are on the node's disk, and on their way."""
        lost = []
        kept = (Status.COMPLETED, Status.ERROR, Status.CANCELLED)
        finished = {at for at, told in member.held.items() if told.status in kept}
        for placement in list(placements):
            task = self.book.task_of(placement.session_id)
            here = replace(placement, incarnation=member.heartbeat.incarnation)
            if here in finished and task is not None and task.counts(placement):
                task.samples[placement.session_id].incarnation = here.incarnation
                member.place(here, member.beats)
            else:
                lost.append(placement)
        await self._dispatcher.lost(lost, "its gateway was restarted")

    async def _tell_all(self, tell: Callable[[str], Awaitable[GenerationAnswer]]) -> GenerationState:
        """Send an order to the URL of each node with `tell`, and return the acknowledgements."""
        urls = {name: member.heartbeat.url for name, member in self.fleet.members.items()}
        answers = await asyncio.gather(*map(tell, urls.values()), return_exceptions=True)
        state = GenerationState(generation=self.generation, weight_version=self.weights.current)
        unheard = [node for node in self._orphans if node not in urls]
        state.unreached |= dict.fromkeys(unheard, "not heard of since the server's restart; it has sessions")
        for node, answer in zip(urls, answers, strict=True):
            if isinstance(answer, GenerationAnswer):
                state.nodes[node] = answer
            elif isinstance(answer, NodeUnreachableError):
                state.unreached[node] = str(answer)
            else:
                raise answer
        return state

    # Inside: loops ----------------------------------------------------------------------------------------------------

    async def _watch_leases(self) -> None:
        """Take the sessions back from nodes that are silent for longer than their lease."""
        lease = self.limits.lease_seconds
        pause = min(1.0, lease / 4)
        while True:
            slept = time.monotonic()
            await asyncio.sleep(pause)
            now = time.monotonic()
            late = now - slept - pause
            self.fleet.excuse(late)
            for orphan in self._orphans.values():
                orphan.deadline += late
            for member in self.fleet.take_silent(now, lease):
                await self._dispatcher.lost(member.placed, f"silent for more than {lease:g} s")
            over = [node for node, orphan in self._orphans.items() if now > orphan.deadline]
            for node in (node for node in over if not self.fleet.being_read[node]):
                if (orphan := self._orphans.pop(node, None)) is not None:  # else its heartbeat has just come
                    await self.book.lost(orphan.placed, f"not heard of for {lease:g} s after the server's restart")

    def _lock(self, key: str) -> asyncio.Lock:
        """Return the lock of a key. The lock exists as long as a caller holds it or waits for it."""
        return self._locks.setdefault(key, asyncio.Lock())
