"""The gateway nodes as the server sees them: which ones live, which sessions they hold, and which sessions are on their
way to them. Pure: the clock is an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from polar_gym.protocol import Heartbeat, NodeState
from polar_gym.schema import Session
from polar_gym.service.scheduler import FreePlaces
from polar_gym.service.task import Placement

REMEMBERED_INCARNATIONS = 16
"""How many replaced or dead processes are remembered for each node name."""


class ReplacedError(Exception):
    """The heartbeat is from a process that is dead, or that another process of the same name has replaced."""


@dataclass(slots=True)
class Member:
    """One living node."""

    heartbeat: Heartbeat
    held: Mapping[Placement, Session]
    """The sessions that the heartbeat tells of."""
    seen: float
    beats: int = 1
    """Heartbeats received."""
    draining: bool = False
    """True: the server has told the node to drain."""
    full: bool = False
    """True: the node has refused a session since its last heartbeat. It gets no session before the next heartbeat."""
    failing: bool = False
    """True: the node did not take a session and gave no reason. Until it takes one, it gets one session at a time."""
    placed: dict[Placement, int | None] = field(default_factory=dict)
    """The placements on this node -> `beats` when the node acknowledged the placement; None: not acknowledged yet."""
    on_their_way: set[Placement] = field(default_factory=set)
    """Those of `placed` that the heartbeat does not tell of."""
    room: int = field(init=False)
    """How many sessions may be on their way, by the heartbeat alone."""

    def __post_init__(self) -> None:
        self.room = FreePlaces.of(self.heartbeat).total

    @property
    def has_room(self) -> bool:
        """Return whether fewer sessions are on their way than may be. The dispatcher asks all nodes each time."""
        return len(self.on_their_way) < self.room

    @property
    def unanswered(self) -> int:
        """Return how many placements the node has not acknowledged."""
        return sum(beats is None for beats in self.placed.values())

    def place(self, placement: Placement, beats: int | None = None) -> None:
        """Add a placement; `beats` as in `placed`."""
        self.placed[placement] = beats
        if placement not in self.held:
            self.on_their_way.add(placement)

    def forget(self, placement: Placement) -> None:
        self.placed.pop(placement, None)
        self.on_their_way.discard(placement)

    def hear(self, heartbeat: Heartbeat, held: Mapping[Placement, Session], now: float) -> None:
        """Take in the next heartbeat of the node's process."""
        self.heartbeat, self.held, self.seen = heartbeat, held, now
        self.on_their_way = self.placed.keys() - held.keys()
        self.room = FreePlaces.of(heartbeat).total
        self.beats += 1
        self.full = False

    def free_places(self) -> FreePlaces:
        """Return how many more sessions the node may be given now."""
        free = FreePlaces.of(self.heartbeat, len(self.on_their_way))
        if self.draining or self.full or (self.failing and self.unanswered):
            return replace(free, running=0, total=0)
        return replace(free, running=min(free.running, 1), total=min(free.total, 1)) if self.failing else free

    def missing(self) -> list[Placement]:
        """Return the placements that the node acknowledged and does not hold any more. Two heartbeats must have come
        since: the second was certainly made after the acknowledgement."""
        old = (at for at, beats in self.placed.items() if beats is not None and self.beats >= beats + 2)
        return [placement for placement in old if placement not in self.held]


@dataclass(slots=True)
class Orphan:
    """A node that had sessions when an earlier server process ended, and that has sent no heartbeat since."""

    placed: list[Placement] = field(default_factory=list)
    deadline: float = 0.0
    """When the node counts as dead."""


class Fleet:
    """All nodes by name."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.being_read: Counter[str] = Counter()
        """Name -> how many heartbeats of this name are being read."""
        self._retired: dict[str, list[str]] = {}

    def beat(self, heartbeat: Heartbeat, now: float) -> Member | None:
        """Take in a heartbeat. Return the member that was replaced, where the node's process is a new one.

        Raise `ReplacedError` where the heartbeat is from a replaced process.
        """
        name = heartbeat.node
        member = self.members.get(name)
        if heartbeat.incarnation in self._retired.get(name, ()):
            raise ReplacedError(
                f"node={name!r}: another process took this name; give every node a name of its own, or stop one"
            )
        held = {
            Placement(told.session_id, told.attempt, name, heartbeat.incarnation): told for told in heartbeat.sessions
        }
        if member is None or member.heartbeat.incarnation != heartbeat.incarnation:
            self.members[name] = Member(heartbeat, held, now)
            if member is not None:
                self._retire(name, member.heartbeat.incarnation)
            return member
        member.hear(heartbeat, held, now)
        return None

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Keep a node alive while its heartbeat is read, which may wait for a thread for longer than a lease. The lease
        is not renewed yet: the heartbeat may be from a process of this name that another one has replaced."""
        self.being_read[name] += 1
        try:
            yield
        finally:
            self.being_read[name] -= 1

    def take_silent(self, now: float, lease: float) -> list[Member]:
        """Remove the nodes that were silent for longer than `lease`, and return them."""
        silent = [name for name, each in self.members.items() if now - each.seen > lease and not self.being_read[name]]
        return [self.members.pop(name) for name in silent]

    def excuse(self, seconds: float) -> None:
        """Extend all leases by the time that this process was stalled."""
        for member in self.members.values():
            member.seen += seconds

    def take(self, name: str, incarnation: str | None) -> Member | None:
        """Remove a node whose process is known to be dead, and return it. `incarnation`: names the process; None: the
        last one. Return None where another process has that name, or no node."""
        member = self.members.get(name)
        if member is None or incarnation not in (None, member.heartbeat.incarnation):
            return None
        self._retire(name, member.heartbeat.incarnation)
        return self.members.pop(name)

    def at(self, placement: Placement) -> Member | None:
        """Return the process that the placement names, or None where that process does not live any more."""
        member = self.members.get(placement.node)
        return member if member is not None and member.heartbeat.incarnation == placement.incarnation else None

    def forget(self, placement: Placement) -> None:
        if (member := self.at(placement)) is not None:
            member.forget(placement)

    def states(self, now: float) -> list[NodeState]:
        return [
            NodeState(
                node=name,
                alive=True,
                draining=member.draining or member.heartbeat.draining,
                silent_seconds=max(0.0, now - member.seen),
                heartbeat=member.heartbeat,
            )
            for name, member in sorted(self.members.items())
        ]

    def _retire(self, name: str, incarnation: str) -> None:
        self._retired[name] = [*self._retired.get(name, []), incarnation][-REMEMBERED_INCARNATIONS:]
