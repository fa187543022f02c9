"""A task under whatever nodes, trainers and faults can do to it, in any order."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polar_gym.protocol import Dispatch, TaskStatus
from polar_gym.schema import Episode, Retries, Session, Status
from polar_gym.service.task import FREE_LOSSES, WAITS, Phase, Placement, Sample, Task
from tests.lifecycle.peer_node import episode_of, failed, make_request

samples = st.integers(0, 3)


class AnyLife(RuleBasedStateMachine):
    @initialize(
        deaths=st.integers(0, 2),
        failures=st.integers(0, 1),
        enough=st.sampled_from([None, 1, 2]),
        staleness=st.sampled_from([None, 1]),
        when_stale=st.sampled_from(["mark", "cancel"]),
    )
    def begin(self, deaths: int, failures: int, enough: int | None, staleness: int | None, when_stale: str) -> None:
        self.task = Task.new(
            make_request(
                "t",
                num_samples=4,
                retries=Retries(node_death=deaths, failure=failures),
                stop_when_usable=enough,
                max_staleness=staleness,
                when_stale=when_stale,
            ),
            0.0,
        )
        self.ids = list(self.task.samples)
        self.accepted: dict[str, int] = {}
        self.ended: dict[str, Sample] = {}
        self.attempts = dict.fromkeys(self.ids, 0)
        self.withdrawn = dict.fromkeys(self.ids, 0)

    def sample(self, number: int) -> Sample:
        return self.task.samples[self.ids[number]]

    def episode(self, sample: Sample, attempt: int, **fields: object) -> Episode:
        order = Dispatch(
            session_id=sample.session.session_id,
            attempt=attempt,
            sample_index=sample.session.sample_index,
            request=self.task.request,
        )
        return episode_of(order, **fields)  # type: ignore[arg-type]

    @rule(number=samples)
    def place(self, number: int) -> None:
        if self.sample(number).phase is Phase.WAITING:
            self.task.place(self.ids[number], "a", "i")

    @rule(number=samples)
    def withdraw(self, number: int) -> None:
        if self.sample(number).phase is Phase.PLACED:
            self.withdrawn[self.ids[number]] += 1
            self.task.withdraw(self.ids[number])

    @rule(
        number=samples,
        attempt=st.integers(0, 4),
        status=st.sampled_from([Status.INITIALIZING, Status.READY, Status.RUNNING, Status.COMPLETED]),
    )
    def get_on(self, number: int, attempt: int, status: Status) -> None:
        sample = self.sample(number)
        known = sample.session.status
        counts = self.task.counts(Placement(self.ids[number], attempt, "a", "i"))
        assert counts == (sample.phase is Phase.PLACED and sample.session.attempt == attempt)
        assert not self.task.counts(Placement(self.ids[number], attempt, "a", "the next process"))
        if counts:
            news = self.task.heard(Session(**{**dict(sample.session), "status": status}))
            assert news == (status is not known and not status.final)

    @rule(number=samples)
    def lose(self, number: int) -> None:
        sample = self.sample(number)
        if sample.phase is not Phase.PLACED:
            return
        deaths = sample.node_deaths
        free = sample.session.status in WAITS and sample.lost_waiting < FREE_LOSSES
        placement = sample.placement
        ending = self.task.lose(self.ids[number], "dead")
        assert (ending is None) == (free or deaths < self.task.request.retries.node_death)
        assert sample.node_deaths == deaths + (ending is None and not free), "to have waited costs nothing"
        assert sample.phase is (Phase.WAITING if ending is None else Phase.ENDED)
        assert ending is None or (ending.sample, ending.placement) == (sample, placement)

    @rule(
        number=samples,
        attempt=st.integers(0, 4),
        kind=st.sampled_from(["good", "failed", "interrupted", "cancelled", "no reward"]),
        staleness=st.sampled_from([None, 0, 3]),
    )
    def deliver(self, number: int, attempt: int, kind: str, staleness: int | None) -> None:
        sample = self.sample(number)
        before = sample.model_copy(deep=True)
        fields: dict[str, object] = {
            "good": {},
            "failed": {"reward": None, "failure": failed()},
            "interrupted": {"reward": None, "status": Status.INTERRUPTED},
            "cancelled": {"reward": None, "status": Status.CANCELLED},
            "no reward": {"reward": None, "status": Status.COMPLETED},
        }[kind]
        verdict = self.task.judge(self.episode(sample, attempt, staleness=staleness, **fields))
        assert verdict.accepted == (not verdict.reason), "what is excluded is excluded for a named reason"
        if verdict.accepted:
            assert self.ids[number] not in self.accepted, "one attempt is accepted"
            assert before.phase is not Phase.ENDED
            assert attempt <= before.session.attempt, "nothing that was never dispatched"
            self.accepted[self.ids[number]] = attempt
            assert sample.usable == (kind == "good")
        elif verdict.retried is not None:
            assert verdict.retried == before.placement
            assert sample.phase is Phase.WAITING
            assert sample.session.attempt == before.session.attempt + 1
        if verdict.ended is not None:
            assert (verdict.ended.sample, verdict.ended.placement) == (sample, before.placement)
            placed = self.task.placements()
            stopped = self.task.stop_early()
            assert [ending.placement for ending in stopped if ending.placement is not None] == (
                placed if stopped else []
            )

    @rule(dice=st.integers(0, 9))
    @precondition(lambda self: not self.task.ended)
    def cancel_rarely(self, dice: int) -> None:
        if dice == 9:
            self.task.cancel()
            assert self.task.status is TaskStatus.CANCELLED

    @invariant()
    def what_has_ended_stays_as_it_is(self) -> None:
        for session_id, sample in self.task.samples.items():
            if session_id in self.ended:
                assert sample == self.ended[session_id]
            elif sample.phase is Phase.ENDED:
                self.ended[session_id] = sample.model_copy(deep=True)

    @invariant()
    def attempts_only_grow_and_are_bounded(self) -> None:
        limit = self.task.request.retries.node_death + self.task.request.retries.failure + FREE_LOSSES
        for session_id, sample in self.task.samples.items():
            attempt = sample.session.attempt
            assert attempt <= limit + self.withdrawn[session_id], "a withdrawal uses up no retry"
            if sample.phase is not Phase.ENDED:
                assert attempt >= self.attempts[session_id]
                self.attempts[session_id] = attempt

    @invariant()
    def the_count_is_whole(self) -> None:
        state = self.task.state()
        ended = [sample for sample in self.task.samples.values() if sample.phase is Phase.ENDED]
        assert state.usable + sum(state.failures.values()) == len(ended), "every sample is usable, or says why not"
        assert len(state.sessions) == 4
        if self.task.ended and not self.task.cancelled:
            assert state.status is (TaskStatus.COMPLETED if state.usable else TaskStatus.FAILED)
        if state.stopped_early:
            assert self.task.request.stop_when_usable is not None
            assert self.task.ended


def test_an_attempt_that_begins_anew_leaves_the_earlier_records_behind() -> None:
    """Guards against records of attempts that failed, or that could not go on with a record of their own."""
    task = Task.new(make_request("t", retries=Retries(node_death=2)), 0.0)
    ((session_id, sample),) = task.samples.items()

    def lost() -> tuple[str | None, int]:
        task.place(session_id, "a", "i")
        assert task.lose(session_id, "dead") is None
        return sample.record_at, sample.record_from

    assert lost() == ("a", 0)
    task.place(session_id, "a", "i")
    order = Dispatch(session_id=session_id, attempt=1, sample_index=0, request=task.request)
    task.judge(episode_of(order, reward=None, failure=failed("diverged")))
    assert (sample.record_at, sample.record_from) == (None, 2)
    assert lost() == ("a", 2), "what the second attempt could not go on with counts no more"


TestAnyLife = AnyLife.TestCase
