"""Decides which waiting session goes to which node: pure functions over the nodes' last heartbeats.

Tasks take turns, in the order in which they came, so that a large task delays a small one by one session at a time.
Within a task the samples go first come, first served. A session goes to the node with most free places. Nodes
where a place to run is free come before nodes where the session can only be prepared. Among nodes that are equal in
this sense a task keeps to one engine, whose prefix cache holds the task's prompt. A session never waits for that engine
while another engine is idle. In the same way a session that goes on with its record prefers the node that has it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from polar_gym.gateway.session.turns import FairQueue
from polar_gym.protocol import Heartbeat


@dataclass(frozen=True, slots=True)
class FreePlaces:
    """The places of one node that a session can still be given."""

    name: str
    """The node's."""
    engine_key: str
    running: int
    """Places to run that no session of the node is on its way to; negative when sessions queue for them."""
    total: int
    """Sessions that the node may be given: to run, and to be prepared before a place to run is free."""

    @classmethod
    def of(cls, heartbeat: Heartbeat, dispatched_since: int = 0) -> FreePlaces:
        """Return the free places of the node that sent `heartbeat`. `dispatched_since`: the number of sessions that
        were placed on the node and that the heartbeat does not tell of yet."""
        places, held = heartbeat.places, heartbeat.held
        load = heartbeat.waiting + held.init + held.ready + held.run + dispatched_since
        backlog = max(0, held.postrun - places.postrun)  # a node that cannot grade fast enough gets fewer sessions
        total = 0 if heartbeat.draining else max(0, places.init + places.ready + places.run - load - backlog)
        return cls(heartbeat.node, heartbeat.engine_key, places.run - load, total)

    def with_one_more(self) -> FreePlaces:
        return replace(self, running=self.running - 1, total=self.total - 1)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A waiting session, and the node that it goes to."""

    session_id: str
    task_id: str
    node: str


class Offers:
    """The free places of all nodes. Each look-up and each change takes a time that hardly grows with their number."""

    def __init__(self, nodes: Iterable[FreePlaces]) -> None:
        self._left = {node.name: node for node in nodes if node.total > 0}
        self._order = {name: number for number, name in enumerate(self._left)}
        self._heaps: dict[str | None, list[tuple[int, int, int, str]]] = {}
        """Engine -> its nodes, the best one first; None: all nodes. Entries of other numbers than the node has now are
        void."""
        for node in self._left.values():
            self._push(node)

    def choose(self, preferred_engine: str | None, record_at: str | None = None) -> FreePlaces | None:
        """Return the node for one session, or None where no node has a free place."""
        first = self._first(None)
        if first is None:
            return None
        own = self._first(preferred_engine) if preferred_engine is not None else None
        for preferred in (self._left.get(record_at or ""), own):
            if preferred is not None and (preferred.running > 0 or first.running <= 0):
                return preferred
        return first

    def take(self, node: FreePlaces) -> None:
        """Take one of a node's free places."""
        left = node.with_one_more()
        if left.total > 0:
            self._left[node.name] = left
            self._push(left)
        else:
            del self._left[node.name]

    def _push(self, node: FreePlaces) -> None:
        entry = (-node.running, -node.total, self._order[node.name], node.name)
        for key in (None, node.engine_key):
            heapq.heappush(self._heaps.setdefault(key, []), entry)

    def _first(self, engine_key: str | None) -> FreePlaces | None:
        heap = self._heaps.get(engine_key, [])
        while heap:
            running, total, _, name = heap[0]
            node = self._left.get(name)
            if node is not None and (node.running, node.total) == (-running, -total):
                return node
            heapq.heappop(heap)
        return None


def plan(
    nodes: Iterable[FreePlaces],
    queue: FairQueue[str],
    engines: Mapping[str, str],
    record_at: Callable[[str], str | None] = lambda _: None,
) -> list[Assignment]:
    """Take from the queue all sessions that the nodes have free places for, and return the node of each.

    `engines`: task -> the engine that the task's sessions are on. `record_at`: session -> the node with its record.
    """
    offers = Offers(nodes)
    new: dict[str, str] = {}
    assignments = []
    while (head := queue.peek()) is not None:
        node = offers.choose(engines.get(head[0]) or new.get(head[0]), record_at(head[1]))
        if node is None:
            break
        task_id, session_id = queue.pop()
        new.setdefault(task_id, node.engine_key)
        offers.take(node)
        assignments.append(Assignment(session_id, task_id, node.name))
    return assignments
