"""Decides which waiting session goes to which node: pure functions over the nodes' last heartbeats.

Tasks take turns, in the order in which they came, so that a large task delays a small one by one session at a time.
Within a task the samples go first come, first served. A session goes to the node with most free places. Nodes
where a place to run is free come before nodes where the session can only be prepared. Among nodes that are equal in
this sense a task keeps to one engine, whose prefix cache holds the task's prompt. A session never waits for that engine
while another engine is idle. In the same way a session that goes on with its record prefers the node that has it.
"""

from __future__ import annotations

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


def choose(
    nodes: Iterable[FreePlaces], preferred_engine: str | None, record_at: str | None = None
) -> FreePlaces | None:
    """Return the node for one session, or None where no node has a free place."""
    free = [node for node in nodes if node.total > 0]
    if not free:
        return None
    candidates = with_place = [node for node in free if node.running > 0] or free
    candidates = [node for node in candidates if node.engine_key == preferred_engine] or candidates
    candidates = [node for node in with_place if node.name == record_at] or candidates
    return max(candidates, key=lambda node: (node.running, node.total))


def plan(
    nodes: Iterable[FreePlaces],
    queue: FairQueue[str],
    engines: Mapping[str, str],
    record_at: Callable[[str], str | None] = lambda _: None,
) -> list[Assignment]:
    """Take from the queue all sessions that the nodes have free places for, and return the node of each.

    `engines`: task -> the engine that the task's sessions are on. `record_at`: session -> the node with its record.
    """
    left = {node.name: node for node in nodes}
    engines = dict(engines)
    assignments = []
    while (head := queue.peek()) is not None:
        node = choose(left.values(), engines.get(head[0]), record_at(head[1]))
        if node is None:
            break
        task_id, session_id = queue.pop()
        engines.setdefault(task_id, node.engine_key)
        left[node.name] = node.with_one_more()
        assignments.append(Assignment(session_id, task_id, node.name))
    return assignments
