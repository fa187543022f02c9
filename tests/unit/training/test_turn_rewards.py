"""Rewards of calls: their advantages, their arrays, and the law of the packing with them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from polar_gym.builders import build_trajectory
from polar_gym.builders.exclusions import exclusions
from polar_gym.schema import BuilderSpec, Episode, EvaluationResult, ModelCall, Replayed
from polar_gym.training import make_batch, padded
from polar_gym.training.advantage import call_advantages
from polar_gym.training.conformance import Step, TokenLoss, check, holds, ppo, train_arrays
from polar_gym.training.nemo_rl import datums
from polar_gym.training.prime_rl import training_samples
from polar_gym.training.tensors import token_advantages
from polar_gym.training.trl import rollout_samples
from polar_gym.training.verl import agent_loop_outputs
from tests.support import call_trees
from tests.support.calls import make_call
from tests.support.episodes import forked, make_episode


def rewarded(session_id: str, reward: float | None, calls: list[ModelCall], *of_calls: float, **fields: Any) -> Episode:
    """Return an episode whose first calls have these rewards, also in its traces' turns, as a node makes it."""
    rewards = {call.call_id: value for call, value in zip(calls, of_calls, strict=False)}
    evaluation = EvaluationResult(evaluator="rubric", reward=reward or 0.0, call_rewards=rewards)
    episode = make_episode(session_id, reward, calls, evaluation=evaluation, **fields)
    for trace in episode.trajectory.traces:
        for turn in trace.turns:
            turn.reward = rewards.get(turn.call_id)
    return episode


def test_the_advantage_of_a_call_is_that_of_the_rewards_to_come() -> None:
    """The example is GRPO with process supervision: two sessions, the mean of four rewards is 0.5."""
    rewards = [{"a": 1.0, "b": 0.0, "c": 1.0}, {"d": 0.0}, {"e": 0.25}]
    assert call_advantages(rewards, ["t", "t", "u"]) == [{"a": 0.5, "b": 0.0, "c": 0.5}, {"d": -0.5}, {"e": 0.0}]
    scaled = call_advantages(rewards, ["t", "t", "u"], scale="std")
    assert scaled[1]["d"] == pytest.approx(-0.5 / np.std([1, 0, 1, 0], ddof=1), rel=1e-5)
    assert call_advantages([{"a": 0.1, "b": 0.1}, {"c": 0.1}], ["t", "t"])[0] == {"a": 0.0, "b": 0.0}, "exactly"
    some = call_advantages([{"a": None, "b": 1.0, "c": None}, {"d": None, "e": 0.0}, {"f": None}], ["t"] * 3)
    assert some == [{"a": 0.5, "b": 0.5}, {"d": -0.5, "e": -0.5}, {}], "a call without a reward has those to come"


def test_each_token_has_the_advantage_of_its_call() -> None:
    calls = [make_call(0, [1], [2, 3]), make_call(1, [1, 2, 3, 4], [5]), make_call(2, [1, 2, 3, 4, 5, 6], [7])]
    episodes = [
        rewarded("a", 1.0, calls, 1.0, 0.0),
        rewarded("b", 0.0, calls[:1], 0.5),
        rewarded("m", None, calls, 9.0),
    ]
    rows = make_batch(episodes, turn_reward_weight=0.5).rows
    arrays = padded(rows, pad_id=0)
    session, first, second = 0.5, 0.5 + 0.5 * (0.5 - 0.5), 0.5 + 0.5 * -0.5
    assert arrays["advantages"][0].tolist() == [0, first, first, 0, second, 0, session], "the third call has no reward"
    assert arrays["advantages"][1].tolist() == [0, -0.5, -0.5, 0, 0, 0, 0]
    assert arrays["turn_rewards"][0].tolist() == pytest.approx([np.nan, 1, 1, np.nan, 0, np.nan, np.nan], nan_ok=True)
    assert training_samples(rows, "swe")[0]["advantages"] == arrays["advantages"][0].tolist()


def test_a_call_before_the_first_rewarded_one_has_its_share() -> None:
    """Guards against credit that depends on whether an evaluator writes 0 for a call, or nothing."""
    calls = [make_call(0, [1], [2]), make_call(1, [1, 2, 3], [4])]
    episodes = [rewarded(name, 0.0, calls) for name in ("a", "b")]
    for episode, reward in zip(episodes, (1.0, 0.0), strict=True):
        assert episode.evaluation is not None
        episode.evaluation.call_rewards["call1"] = reward
    arrays = padded(make_batch(episodes, turn_reward_weight=1.0).rows, pad_id=0)
    assert arrays["advantages"].tolist() == [[0, 0.5, 0, 0.5], [0, -0.5, 0, -0.5]]


def test_rewards_of_calls_that_would_spoil_a_batch_are_named() -> None:
    """Guards against one NaN that becomes the advantage of its whole group, and weights that silently do nothing."""
    wrong, older = rewarded("a", 1.0, forked(2), math.nan), rewarded("b", 1.0, forked(2), 0.5)
    with pytest.raises(ValueError, match="session a: the reward nan of call0 is not a finite number"):
        make_batch([wrong], turn_reward_weight=1.0)
    older.trajectory.traces[0].turns.clear()
    with pytest.raises(ValueError, match="session b: its calls have rewards, but its traces do not tell the tokens"):
        make_batch([older], turn_reward_weight=1.0)
    assert make_batch([wrong, older]).counts.rows


@pytest.mark.parametrize("form", [datums, lambda rows: rollout_samples(rows, 3)])
def test_a_form_with_one_advantage_for_a_row_refuses_others(form: Any) -> None:
    """Guards against rows whose calls are all trained by the session's advantage although they have their own."""
    episodes = [rewarded("a", 1.0, forked(2), 1.0, 0.0), rewarded("b", 0.0, forked(1), 0.0)]
    with pytest.raises(ValueError, match=r"trace a/call0: this form has one advantage for a row; set turn_reward_w"):
        form(make_batch(episodes, turn_reward_weight=1.0).rows)
    assert len(form(make_batch(episodes).rows)) == 3


def test_verl_which_computes_the_advantages_refuses_such_rows() -> None:
    rows = make_batch([rewarded("a", 1.0, forked(2), 1.0, 0.0)], turn_reward_weight=1.0).rows
    with pytest.raises(ValueError, match="verl computes the advantages itself, one for each session"):
        agent_loop_outputs(rows, (0, 0))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_weight_is_named(weight: float) -> None:
    with pytest.raises(ValueError, match=rf"turn_reward_weight={weight}: expected a finite number of at least 0"):
        make_batch([], turn_reward_weight=weight)


def test_a_group_whose_calls_differ_is_no_group_without_variance() -> None:
    episodes = [rewarded("a", 1.0, forked(2), 1.0, 0.0), rewarded("b", 1.0, forked(1), 0.0)]
    assert make_batch(episodes, zero_variance="drop").counts.rows == 0
    batch = make_batch(episodes, zero_variance="drop", turn_reward_weight=1.0)
    assert (batch.counts.rows, batch.counts.zero_variance_groups, batch.counts.holds) == (3, 0, True)


def test_rewards_of_calls_that_a_session_does_not_train_move_no_advantage() -> None:
    """Guards against recorded calls of a branch, titles and abandoned calls in the mean of the calls that are trained,
    and in the sums of the rewards to come."""
    replayed = Replayed(session_id="origin", owned=False)
    own = [make_call(0, [1], [2], replayed=replayed), make_call(1, [1, 2, 3], [4])]
    others = [make_call(2, [7], [8], hints={"kind": "auxiliary"}), make_call(3, [9], [9], outcome="abandoned")]
    episodes = [rewarded("a", 1.0, own, 1.0, 0.5), rewarded("b", 1.0, [*own, *others], 1.0, 1.0, 0.0, 0.0)]
    rows = make_batch(episodes, turn_reward_weight=1.0).rows
    assert [row.call_advantages for row in rows] == [{"call1": -0.25}, {"call1": 0.25}]


VALUES = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=9, max_size=9)


@effort(max_examples=40)
@given(calls=call_trees.sessions(), values=VALUES, weight=st.sampled_from([0.0, 0.5]), tokens=st.integers(1, 12))
def test_the_advantage_of_a_call_does_not_depend_on_traces(
    calls: list[ModelCall], values: list[float], weight: float, tokens: int
) -> None:
    """All tokens of a call have one advantage, whatever the builder and the cut; without a weight, the session's."""
    merged, other = rewarded("a", 1.0, calls, *values), rewarded("b", 0.0, [make_call(0, [1], [2])], 0.3)
    for_calls: dict[str, set[float]] = {}
    for builder in ("prefix_merging", "per_request"):
        split = merged.model_copy(update={"trajectory": build_trajectory(calls, BuilderSpec(name=builder))})
        for row in make_batch([split, other], turn_reward_weight=weight, max_tokens=tokens, overlong="truncate").rows:
            if row.session_id == "a":
                for turn in row.turns:
                    own = token_advantages(row)[turn.start : turn.end][row.loss_mask[turn.start : turn.end] == 1]
                    for_calls.setdefault(turn.call_id, set()).update(own.tolist())
    excluded = exclusions(calls, BuilderSpec(name="prefix_merging"))
    pairs = [(call, value) for call, value in zip(calls, values, strict=False) if len(call.response_ids)]
    rewards = {call.call_id: value for call, value in pairs if call.call_id not in excluded}
    expected = call_advantages([rewards, {"x": 0.3}], ["t", "t"])[0]
    for call_id, seen in for_calls.items():
        assert seen <= ({0.5 + weight * expected[call_id]} if call_id in expected else set())


def test_the_arrays_obey_the_law_with_advantages_of_calls(tiny_gpt2: Any) -> None:
    findings = check(train_arrays, tiny_gpt2, vocabulary=32, turn_advantages=True)
    assert len(findings) == 4 * 2 * 5
    assert holds(findings), findings


def test_an_adapter_that_drops_advantages_of_calls_is_caught(tiny_gpt2: Any) -> None:
    def of_sessions(model: Any, step: Step) -> None:
        for row in (row for rank in step.ranks for part in rank for row in part):
            row.call_advantages.clear()
        train_arrays(model, step)

    losses: dict[str, TokenLoss] = {"ppo": ppo}
    assert not holds(check(of_sessions, tiny_gpt2, vocabulary=32, losses=losses, turn_advantages=True))
