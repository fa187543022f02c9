"""The gateway nodes as the server sees them: who lives, what they hold, what is on its way to them. Pure: the clock is
an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from polar_gym.protocol import Heartbeat, NodeState
from polar_gym.schema import Session
from polar_gym.service.scheduler import FreePlaces
from polar_gym.service.task import Placement

REMEMBERED_INCARNATIONS = 16


class ReplacedError(Exception):
    """A heartbeat of a process whose place another process of the same name has taken."""


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
    """The server has told it to."""
    full: bool = False
    """It has refused a session since its last heartbeat: it is given nothing before the next one."""
    failing: bool = False
    """It did not take a session, nor say why not: until it takes one, it is tried with one at a time."""
    placed: dict[Placement, int | None] = field(default_factory=dict)
    """What the server has placed on it -> `beats` when the node acknowledged it; None: not yet."""

    def free_places(self) -> FreePlaces:
        free = FreePlaces.of(self.heartbeat, len(self.placed.keys() - self.held.keys()))
        if self.draining or self.full or (self.failing and None in self.placed.values()):
            return replace(free, running=0, total=0)
        return replace(free, running=min(free.running, 1), total=min(free.total, 1)) if self.failing else free

    def missing(self) -> list[Placement]:
        """Sessions that the node acknowledged and does not hold any more: it has answered since, so that its heartbeat
        was made after the acknowledgement."""
        old = (at for at, beats in self.placed.items() if beats is not None and self.beats >= beats + 2)
        return [placement for placement in old if placement not in self.held]


class Fleet:
    """All nodes by name."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self._retired: dict[str, list[str]] = {}

    def beat(self, heartbeat: Heartbeat, now: float) -> Member | None:
        """Take in a heartbeat; the member that it replaces, when the node's process is a new one.

        Raises `ReplacedError` when it is the old one's.
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
        member.heartbeat, member.held, member.seen = heartbeat, held, now
        member.beats += 1
        member.full = False
        return None

    def take_silent(self, now: float, lease: float) -> list[Member]:
        """Remove the nodes that were silent for too long."""
        silent = [member for member in self.members.values() if now - member.seen > lease]
        for member in silent:
            del self.members[member.heartbeat.node]
        return silent

    def excuse(self, seconds: float) -> None:
        """For so long nobody could be heard, because this process stood still."""
        for member in self.members.values():
            member.seen += seconds

    def take(self, name: str, incarnation: str | None) -> Member | None:
        """Somebody knows that this process of the node (None: the last one) is dead, and does not come back."""
        member = self.members.get(name)
        if member is None or incarnation not in (None, member.heartbeat.incarnation):
            return None
        self._retire(name, member.heartbeat.incarnation)
        return self.members.pop(name)

    def at(self, placement: Placement) -> Member | None:
        """Return the process of the node that the placement names, or None where that is dead."""
        member = self.members.get(placement.node)
        return member if member is not None and member.heartbeat.incarnation == placement.incarnation else None

    def forget(self, placement: Placement) -> None:
        """The placement has ended."""
        if (member := self.at(placement)) is not None:
            member.placed.pop(placement, None)

    def free_places(self) -> list[FreePlaces]:
        return [member.free_places() for member in self.members.values()]

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
