"""The life of one task, as a pure state machine: no clock, no disk, no network.

A task expands into samples, one session each. A sample waits, is placed on a node, and ends. When its node dies or its
machinery fails, the sample may wait again, as the next attempt. At most one of the episodes that arrive for a sample is
accepted: the first one that is whole, or a salvaged one where no retry is left. The others are excluded, each for a
named reason.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from polar_gym.protocol import TaskState, TaskStatus
from polar_gym.record import Record
from polar_gym.schema import Episode, Failure, Session, Status, TaskRequest

WAITS = (Status.QUEUED, Status.READY)
"""The states in which a session only waits on its node. Such a session cannot have brought the node down."""
FREE_LOSSES = 10
"""How often a sample may be lost at no cost while it waits. The number is limited, because the server's news of a
session is a moment old. A session that brings its node down as soon as it begins looks like one that waited."""


class Phase(StrEnum):
    WAITING = "waiting"
    PLACED = "placed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Placement:
    """One attempt of a session on one process of a node. A sample has at most one at a time."""

    session_id: str
    attempt: int
    node: str
    incarnation: str
    """Names the node's process."""


class Sample(Record):
    """One sample: its session, as a node last told it, and the history of its attempts."""

    session: Session
    phase: Phase = Phase.WAITING
    incarnation: str | None = None
    """Names the process of the node that the sample is placed on."""
    usable: bool = False
    stale: bool = False
    node_deaths: int = 0
    lost_waiting: int = 0
    """How often the sample only waited on a node that died. `node_deaths` does not count these."""
    failures: int = 0
    record_at: str | None = None
    """The node that died while it ran the last attempt, and that has the record of it; None: the sample begins."""
    record_from: int = 0
    """See `Dispatch.record_from`."""

    @property
    def placement(self) -> Placement | None:
        """Return where the sample is placed now, or None where it waits or has ended."""
        if self.phase is not Phase.PLACED:
            return None
        assert self.session.node is not None
        assert self.incarnation is not None
        return Placement(self.session.session_id, self.session.attempt, self.session.node, self.incarnation)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a sample, and the placement that ended with it."""

    sample: Sample
    placement: Placement | None
    """None: the sample was waiting."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on one delivered episode."""

    accepted: bool
    reason: str = ""
    """Why the episode is excluded; empty when it is accepted."""
    retried: Placement | None = None
    """The placement that ended with the episode, where the sample waits again."""
    ended: Ending | None = None
    """The end of the sample, where the sample ended with the episode."""


@dataclass(slots=True)
class Task:
    """A task and its samples. Invariant: a sample that has ended never changes again."""

    request: TaskRequest
    created_at: float
    samples: dict[str, Sample]
    finished_at: float | None = None
    cancelled: bool = False
    stopped_early: bool = False

    @classmethod
    def new(cls, request: TaskRequest, now: float) -> Task:
        sessions = [
            Session(
                session_id=uuid.uuid4().hex, task_id=request.task_id, sample_index=index, harness=request.agent.name
            )
            for index in range(request.num_samples)
        ]
        return cls(request, now, {session.session_id: Sample(session=session) for session in sessions})

    def differences(self, request: TaskRequest) -> list[str]:
        """Return the fields in which `request` differs. Two dates that the harness is told do not count as different:
        the same request made on another day is the same task, and keeps its first date."""
        if self.request.agent.today is not None and request.agent.today is not None:
            agent = request.agent.model_copy(update={"today": self.request.agent.today})
            request = request.model_copy(update={"agent": agent})
        return [name for name in TaskRequest.model_fields if getattr(self.request, name) != getattr(request, name)]

    # State ------------------------------------------------------------------------------------------------------------

    @property
    def task_id(self) -> str:
        return self.request.task_id

    @property
    def ended(self) -> bool:
        return all(sample.phase is Phase.ENDED for sample in self.samples.values())

    @property
    def usable(self) -> int:
        return sum(sample.usable for sample in self.samples.values())

    @property
    def status(self) -> TaskStatus:
        if self.ended:
            if self.cancelled:
                return TaskStatus.CANCELLED
            return TaskStatus.COMPLETED if self.usable else TaskStatus.FAILED
        begun = any(sample.phase is not Phase.WAITING for sample in self.samples.values())
        return TaskStatus.RUNNING if begun else TaskStatus.QUEUED

    def state(self) -> TaskState:
        samples = sorted(self.samples.values(), key=lambda sample: sample.session.sample_index)
        kinds = Counter(s.session.failure.kind for s in samples if s.phase is Phase.ENDED and s.session.failure)
        return TaskState(
            task_id=self.task_id,
            status=self.status,
            request=self.request,
            sessions=[sample.session for sample in samples],
            created_at=self.created_at,
            finished_at=self.finished_at,
            usable=self.usable,
            failures=dict(kinds),
            stopped_early=self.stopped_early,
            stale=sum(sample.stale for sample in samples),
        )

    def open_samples(self) -> Iterator[Sample]:
        return (sample for sample in self.samples.values() if sample.phase is not Phase.ENDED)

    def placements(self) -> list[Placement]:
        return [placement for sample in self.open_samples() if (placement := sample.placement) is not None]

    def counts(self, placement: Placement) -> bool:
        """Return whether this is where the session is placed now."""
        return self.samples[placement.session_id].placement == placement

    # Transitions ------------------------------------------------------------------------------------------------------

    def place(self, session_id: str, node: str, incarnation: str) -> Placement:
        sample = self.samples[session_id]
        sample.phase, sample.incarnation = Phase.PLACED, incarnation
        sample.session.node, sample.session.status = node, Status.QUEUED
        return Placement(session_id, sample.session.attempt, node, incarnation)

    def heard(self, told: Session) -> bool:
        """Take over how far a placed session is, as its node tells. Return whether its status has changed."""
        known = self.samples[told.session_id].session
        if told.status.final:
            return False
        news = known.status is not told.status
        known.status, known.timing = told.status, told.timing
        known.weight_version = told.weight_version if told.weight_version is not None else known.weight_version
        return news

    def lose(self, session_id: str, why: str) -> Ending | None:
        """End a placed sample whose node died, or return None where the sample waits again."""
        sample = self.samples[session_id]
        if not self._outlives(sample):
            return self._end(sample, Status.INTERRUPTED, "node_died", why)
        self._again(sample, record_at=sample.session.node)
        return None

    def withdraw(self, session_id: str) -> None:
        """Let a sample wait again as the next attempt, because its node does not answer the order to run it, or refuses
        it. The node may have this attempt. No retry is used up, and a record to resume from stays."""
        sample = self.samples[session_id]
        self._again(sample, record_at=sample.record_at)

    def refuse(self, session_id: str, why: str) -> Ending:
        """End a sample because a node says that no node can run its request."""
        return self._end(self.samples[session_id], Status.ERROR, "request_error", why)

    def cancel(self) -> list[Ending]:
        self.cancelled = self.cancelled or not self.ended
        return self._end_all("cancelled", "the task was cancelled")

    def judge(self, episode: Episode) -> Verdict:
        """Decide on a delivered episode, and follow the decision. The attempt and the staleness are those of the
        episode's session."""
        session = episode.session
        sample = self.samples.get(session.session_id)
        if sample is None:
            return Verdict(False, "unknown session")
        if sample.phase is Phase.ENDED:
            return Verdict(False, "late: the sample has ended already")
        placement = sample.placement
        current = placement is not None and placement.attempt == session.attempt
        if session.status in (Status.INTERRUPTED, Status.CANCELLED):
            if not current:
                return Verdict(False, "interrupted")
            if self._outlives(sample, episode.trajectory.fidelity.calls):
                self._again(sample, record_at=sample.session.node)
                return Verdict(False, "interrupted", retried=placement)
        elif session.failure is not None:
            if not current:
                return Verdict(False, "late: another attempt was begun")
            if session.failure.kind == "diverged" and sample.record_at is not None:
                self._again(sample)
                return Verdict(False, "begun again: it could not go on with its record", retried=placement)
            if sample.failures < self.request.retries.failure:
                sample.failures += 1
                self._again(sample)
                return Verdict(False, f"tried again: {session.failure.kind}", retried=placement)
        elif session.attempt > sample.session.attempt:
            return Verdict(False, f"attempt {session.attempt} was never dispatched")
        return self._accept(sample, episode)

    def cancel_stale(self, session_id: str, staleness: int) -> Ending:
        sample = self.samples[session_id]
        sample.stale = True
        sample.session.staleness = staleness
        limit = self.request.max_staleness
        why = f"begun {staleness} weight versions ago, max_staleness is {limit}"
        return self._end(sample, Status.CANCELLED, "stale", why)

    def stop_early(self) -> list[Ending]:
        """End the samples that are not needed any more, where enough samples are usable."""
        enough = self.request.stop_when_usable
        if enough is None or self.usable < enough:
            return []
        stopped = self._end_all("early_stop", f"{enough} usable samples were there (stop_when_usable)")
        self.stopped_early = self.stopped_early or bool(stopped)
        return stopped

    def too_stale(self, staleness: int | None) -> bool:
        limit = self.request.max_staleness
        return limit is not None and staleness is not None and staleness > limit

    def _accept(self, sample: Sample, episode: Episode) -> Verdict:
        staleness = episode.session.staleness
        if staleness is not None and self.too_stale(staleness) and self.request.when_stale == "cancel":
            return Verdict(False, "stale", ended=self.cancel_stale(sample.session.session_id, staleness))
        placement = sample.placement
        sample.session = episode.session.model_copy(deep=True)
        sample.phase, sample.incarnation = Phase.ENDED, None
        sample.usable = episode.reward is not None and episode.session.failure is None
        sample.stale = self.too_stale(staleness)
        if not sample.usable and sample.session.failure is None:
            sample.session.failure = Failure(
                stage=Status.EVALUATING, kind="no_reward", message="the episode has no reward"
            )
        return Verdict(True, ended=Ending(sample, placement))

    def _outlives(self, sample: Sample, calls: int = 0) -> bool:
        """Return whether the sample is tried again after its node's death, and count that death. The death costs a
        retry where the session had begun to run."""
        if sample.session.status in WAITS and not calls and sample.lost_waiting < FREE_LOSSES:
            sample.lost_waiting += 1
        elif sample.node_deaths < self.request.retries.node_death:
            sample.node_deaths += 1
        else:
            return False
        return True

    def _again(self, sample: Sample, record_at: str | None = None) -> None:
        old = sample.session
        sample.record_at = record_at if self.request.retries.resume else None
        if sample.record_at is None:
            sample.record_from = old.attempt + 1
        sample.session = Session(
            session_id=old.session_id,
            task_id=old.task_id,
            sample_index=old.sample_index,
            attempt=old.attempt + 1,
            harness=old.harness,
        )
        sample.phase, sample.incarnation = Phase.WAITING, None

    def _end(self, sample: Sample, status: Status, kind: str, message: str) -> Ending:
        placement = sample.placement
        sample.session.failure = Failure(stage=sample.session.status, kind=kind, message=message)
        sample.session.status, sample.phase = status, Phase.ENDED
        return Ending(sample, placement)

    def _end_all(self, kind: str, message: str) -> list[Ending]:
        return [self._end(sample, Status.CANCELLED, kind, message) for sample in list(self.open_samples())]
