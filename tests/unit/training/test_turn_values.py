"""Values of the states before calls, and the advantages of calls by them."""

from __future__ import annotations

import math
from datetime import date
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.builders import build_trajectory
from polar_gym.record import digest
from polar_gym.schema import BuilderSpec, Episode, EvaluatorSpec, HarnessSpec, ModelCall, Replayed, StartFrom
from polar_gym.training import make_batch, padded
from polar_gym.training.turn_values import state_values, turn_advantages
from tests.support.calls import make_call
from tests.support.episodes import make_episode


def chain(name: str, turns: int, shared: list[ModelCall] | None = None) -> list[ModelCall]:
    """Return the calls of one conversation of `turns` calls, each of which samples two tokens after the shared ones."""
    calls = list(shared or [])
    for index in range(len(calls), turns):
        seen = [*calls[-1].prompt_ids.tolist(), *calls[-1].response_ids.tolist()] if calls else []
        own = make_call(index, [*seen, 1], [10 * index + 2, 10 * index + 3])
        calls.append(own.model_copy(update={"call_id": f"{name}{index}"}))
    return calls


def base(name: str, reward: float | None, turns: int, **fields: Any) -> Episode:
    return make_episode(name, reward, chain(name, turns), **fields)


def branch(name: str, reward: float | None, of: str, calls: int, turns: int, **start: Any) -> Episode:
    """Return a branch of the session `of` after some of its calls."""
    replayed = Replayed(session_id=of, owned=False)
    shared = [call.model_copy(update={"replayed": replayed}) for call in chain(of, calls)]
    episode = make_episode(name, reward, chain(name, turns, shared))
    episode.request.start_from = StartFrom(record=f"/state/sessions/{of}", calls=calls, **start)
    return episode


def test_values_are_the_mean_rewards_of_the_branches_without_the_sessions_own() -> None:
    episodes = [
        base("a", 1.0, 3),
        base("b", 0.0, 2),
        *(branch(f"one{number}", reward, "a", 1, 2) for number, reward in enumerate([1.0, 0.0, 0.0, 0.0])),
        branch("two", 0.5, "a", 2, 4),
        branch("failed", None, "a", 2, 4),
        branch("left", 0.0, "a", 2, 4, when_divergent="live"),
        base("other", 1.0, 1, task_id="other"),
    ]
    values = state_values(episodes)
    start, one, two = values["a"]
    assert (start.calls, start.value, start.samples, start.before) == (0, 0.0, 1, frozenset())
    assert (one.calls, one.value, one.samples, one.before) == (1, 0.25, 4, {"a0"})
    assert one.standard_error == pytest.approx(0.5 / 2)
    assert (two.calls, two.value, two.samples, two.before) == (2, 0.5, 1, {"a0", "a1"})
    assert math.isnan(two.standard_error)
    assert turn_advantages(episodes[0], values["a"]) == {"a0": 0.25, "a1": 0.25, "a2": 0.5}
    (own,) = values["one0"]
    assert (own.calls, own.value, own.samples) == (1, 0.0, 3), "a branch's first state is valued by its siblings"
    assert turn_advantages(episodes[2], values["one0"]) == {"one01": 1.0}
    assert values["other"] == []


def test_each_token_has_the_advantage_of_its_turn() -> None:
    episodes = [base("a", 1.0, 3), base("b", 0.0, 1), branch("c", 0.5, "a", 2, 3), branch("d", 1.0, "a", 2, 3)]
    batch = make_batch(episodes, turn_values=True)
    arrays = padded(batch.rows, pad_id=0)
    by_session = {row.session_id: line for row, line in zip(batch.rows, arrays["advantages"].tolist(), strict=True)}
    assert by_session["a"] == [0, 0.75, 0.75, 0, 0.75, 0.75, 0, 0.25, 0.25], "no state between the first two calls"
    assert by_session["c"] == [0, 0, 0, 0, 0, 0, 0, -0.5, -0.5], "the recorded tokens stay with their session"
    assert by_session["d"] == [0, 0, 0, 0, 0, 0, 0, 0.5, 0.5]
    assert batch.counts.groups == 2
    assert batch.counts.holds


def test_branches_are_compared_with_their_siblings_alone() -> None:
    """Guards against a mean over a task and the branches of one of its sessions, whose calls earned their reward."""
    solved = [branch(f"c{number}", 1.0, "a", 1, 2) for number in range(12)]
    batch = make_batch([base("a", 1.0, 2), *(base(name, 0.0, 1) for name in "bde"), *solved])
    by_session = {row.session_id: row for row in batch.rows}
    assert [by_session[name].advantage for name in ("a", "b", "c0")] == [0.75, -0.25, 0.0]
    told = digest("Do it.", HarnessSpec(name="pi").model_dump(exclude={"today"}))
    assert [by_session[name].group_id for name in ("a", "b", "c0")] == [
        *(f"task, pi default {told}", f"task, pi default {told}"),
        f"task, 1 calls of a, pi default {told}",
    ]
    assert len(set(padded(batch.rows, pad_id=0)["group_ids"].tolist())) == 2


def test_a_branch_that_left_its_record_is_compared_with_no_other() -> None:
    """Guards against votes in the mean of a state that a session never reached: `when_divergent=live` let it go on."""
    left = make_episode("left", 0.0, chain("left", 2))
    left.request.start_from = StartFrom(record="/state/sessions/a", calls=1, when_divergent="live")
    reached = branch("reached", 1.0, "a", 1, 2, when_divergent="live")
    batch = make_batch([left, reached, branch("c", 1.0, "a", 1, 2), branch("d", 0.5, "a", 1, 2)], scale="none")
    by_session = {row.session_id: row for row in batch.rows}
    assert [round(by_session[name].advantage, 3) for name in ("reached", "c", "d", "left")] == [0.167, 0.167, -0.333, 0]
    assert by_session["left"].group_id.startswith("task, 1 calls of a, left by left, pi default ")
    left.trajectory.branched = None
    assert left.group == reached.group, "files of earlier versions do not say which branches left"


def test_harnesses_and_profiles_are_not_compared_with_each_other() -> None:
    """Guards against an advantage for the harness that played: no policy chooses its harness."""
    episodes = [base(name, reward, 1) for name, reward in zip("abcdef", [1.0, 0.0, 1.0, 1.0, 0.0, 0.5], strict=True)]
    for episode in episodes[2:4]:
        episode.session.harness = "codex"
    for episode in episodes[4:]:
        episode.request.agent.profile = "lean"
    batch = make_batch(episodes)
    assert [row.advantage for row in batch.rows] == [0.5, -0.5, 0, 0, -0.25, 0.25]
    assert (batch.counts.groups, len(set(padded(batch.rows, pad_id=0)["group_ids"].tolist()))) == (3, 3)
    assert [(start.value, start.samples) for (start,) in state_values(episodes).values()] == [
        *((0.0, 1), (1.0, 1)),
        *((1.0, 1), (1.0, 1)),
        *((0.5, 1), (0.0, 1)),
    ]


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("request", {"instruction": "Do another thing."}),
        ("agent", {"command": "agent_b"}),
        ("agent", {"model_name": "another"}),
    ],
)
def test_other_instructions_and_harness_settings_are_another_group(part: str, change: dict[str, Any]) -> None:
    """Guards against advantages between different tasks of one id (`step([{"instruction": a}, {"instruction": b}])`),
    and for the choice between two agents of the harness `command`."""
    episodes = [base(name, reward, 1) for name, reward in zip("abcd", [1.0, 0.0, 1.0, 1.0], strict=True)]
    for episode in episodes[2:]:
        changed = episode.request if part == "request" else episode.request.agent
        for name, value in change.items():
            setattr(changed, name, value)
    batch = make_batch(episodes)
    assert [row.advantage for row in batch.rows] == [0.5, -0.5, 0, 0]
    assert batch.counts.groups == len(set(padded(batch.rows, pad_id=0)["group_ids"].tolist())) == 2
    assert [(start.value, start.samples) for (start,) in state_values(episodes).values()] == [
        *((0.0, 1), (1.0, 1)),
        *((1.0, 1), (1.0, 1)),
    ]


def test_samples_of_one_task_are_one_group_on_any_day_and_after_a_file() -> None:
    """Guards against groups of one: of samples on both sides of midnight, or read from files with keys in any order;
    nor do the options of the evaluator split a group."""
    episodes = [base(name, reward, 1) for name, reward in zip("abc", [1.0, 0.0, 0.5], strict=True)]
    for number, episode in enumerate(episodes):
        options = [("command", ["agent", "{instruction}"]), ("environment", {"A": "1", "B": "2"})]
        fields = dict(reversed(options) if number else options)
        episode.request.agent = HarnessSpec(name="pi", today=date(2026, 1, 1 + number), **fields)
        episode.request.evaluator = EvaluatorSpec(name="swe", **{"row": number})
    episodes[2] = Episode.model_validate_json(episodes[2].to_json())
    batch = make_batch(episodes)
    assert [row.advantage for row in batch.rows] == [0.5, -0.5, 0]
    assert batch.counts.groups == 1


def test_calls_before_the_first_valued_state_have_the_sessions_advantage() -> None:
    (row, _) = make_batch([base("a", 1.0, 2), branch("c", 0.5, "a", 1, 2)], turn_values=True).rows
    assert row.call_advantages == {"a1": 0.5}
    assert row.advantage == 0.0, "it is alone in its group"


@pytest.mark.parametrize("builder", ["prefix_merging", "per_request"])
def test_a_sub_agent_that_had_ended_before_a_state_comes_before_it(builder: str) -> None:
    """Guards against an advantage of the wrong sign: the branches' traces leave out a sub-agent that was replayed."""
    main = chain("a", 3)
    helper = [make_call(9, [7], [8]).model_copy(update={"call_id": "a-helper"})]
    spec = BuilderSpec(name=builder)

    def session(calls: list[ModelCall]) -> list[ModelCall]:
        return [call.model_copy(update={"index": place}) for place, call in enumerate(calls)]

    played = session([main[0], *helper, *main[1:]])
    replayed = Replayed(session_id="a", owned=False)
    shared = [call.model_copy(update={"replayed": replayed}) for call in played[:3]]
    own = make_call(3, [*main[2].prompt_ids.tolist(), 9], [5]).model_copy(update={"call_id": "b3"})
    episodes = [
        make_episode("a", 0.0, played, trajectory=build_trajectory(played, spec)),
        make_episode("b", 1.0, [*shared, own], trajectory=build_trajectory([*shared, own], spec)),
    ]
    episodes[1].request.start_from = StartFrom(record="/state/sessions/a", calls=3)
    episodes.append(base("c", 0.0, 1))
    values = state_values(episodes)["a"]
    assert turn_advantages(episodes[0], values) == {"a0": 1.0, "a-helper": 1.0, "a1": 1.0, "a2": -1.0}


def test_an_episode_that_does_not_name_its_calls_is_refused() -> None:
    episodes = [base("a", 1.0, 3), branch("b", 0.0, "a", 2, 3)]
    episodes[0].trajectory.delivered = []
    with pytest.raises(ValueError, match="session a: others branched after 2 calls, and its episode names 0"):
        state_values(episodes)


@pytest.mark.parametrize(("asked", "turns", "own"), [(["a0", "a1"], 0, set()), (["a1", "a2"], 2, {"b3", "b4"})])
def test_a_branch_need_not_have_asked_for_all_of_its_record(asked: list[str], turns: int, own: set[str]) -> None:
    """Guards against a step that is lost for a branch that ended within its record, and against the first call of one
    that skipped a call (a title), which counted as before the state."""
    skipping = branch("b", 0.0, "a", 3, 3 + turns)
    calls = [call for call in chain("a", 3) if call.call_id in asked] + chain("b", 3 + turns)[3:]
    replayed = Replayed(session_id="a", owned=False)
    calls = [call.model_copy(update={"replayed": replayed if call.call_id in asked else None}) for call in calls]
    skipping.trajectory = build_trajectory(calls, BuilderSpec(name="per_request"))
    assert skipping.trajectory.branched == len(asked)
    episodes = [base("a", 1.0, 4), skipping, branch("c", 1.0, "a", 3, 4), branch("d", 1.0, "a", 3, 4)]
    (state,) = state_values(episodes)["b"]
    assert (state.calls, state.value) == (3, 1.0)
    assert turn_advantages(skipping, [state]) == dict.fromkeys(own, -1.0)


def test_equal_rewards_teach_nothing() -> None:
    episodes = [base("a", 0.1, 2), *(branch(f"c{number}", 0.1, "a", 1, 2) for number in range(7)), base("b", 0.1, 1)]
    batch = make_batch(episodes, turn_values=True, zero_variance="drop")
    assert (batch.counts.rows, batch.counts.zero_variance_groups) == (0, 2)


@pytest.mark.parametrize("setting", [{"turn_reward_weight": 0.5}, {"scale": "std"}])
def test_settings_that_contradict_are_named(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="turn_values=True: advantages are differences of values; set turn_reward_wei"):
        make_batch([], turn_values=True, **setting)


REWARDS = st.one_of(st.none(), st.integers(-8, 8).map(lambda eighth: eighth / 8))


@given(turns=st.integers(1, 6), data=st.data())
def test_the_advantages_of_the_turns_telescope(turns: int, data: st.DataObject) -> None:
    """Their sum is the reward less the value of the start; calls with no valued state between them are one turn."""
    at = data.draw(st.lists(st.integers(0, turns - 1), max_size=8))
    rewards = data.draw(st.lists(REWARDS, min_size=len(at), max_size=len(at)))
    branches = [branch(f"x{n}", reward, "a", k, k + 1) for n, (k, reward) in enumerate(zip(at, rewards, strict=True))]
    episode = base("a", data.draw(REWARDS.filter(lambda reward: reward is not None)), turns)
    episodes = [*data.draw(st.permutations([*branches, base("b", 0.25, 1)])), episode]
    states = state_values(episodes)["a"]
    assert [state.calls for state in states] == sorted(
        {0, *(k for k, r in zip(at, rewards, strict=True) if r is not None)}
    )
    own = turn_advantages(episode, states)
    assert own.keys() == {f"a{index}" for index in range(turns)}
    first = [own[f"a{state.calls}"] for state in states]
    assert sum(first) == pytest.approx((episode.reward or 0.0) - states[0].value, abs=1e-12)
    for state in states:
        same = [r for k, r in zip(at, rewards, strict=True) if k == state.calls and r is not None]
        same += [0.25] if state.calls == 0 else []
        assert (state.samples, state.value) == (len(same), pytest.approx(np.mean(same)))
