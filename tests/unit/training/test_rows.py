"""The fields of rows and arrays beside ids, masks and advantages: how each token was sampled, and by which choices."""

from __future__ import annotations

from itertools import pairwise, takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from polar_gym.schema import EvaluationResult, ModelCall, WeightVersion
from polar_gym.training import make_batch, padded
from polar_gym.training.batch import Truncated
from polar_gym.training.tensors import version_names
from tests.support import call_trees
from tests.support.calls import make_call
from tests.support.choices import experts, recorded_episode
from tests.support.episodes import make_episode


def test_each_token_has_the_temperature_and_the_weights_that_sampled_it() -> None:
    """Guards against the last call's temperature for all tokens of a trace."""
    hot, cold = {"temperature": 1.5}, {"temperature": 0.5}
    calls = [
        make_call(0, [1], [2, 3], sampling=hot, weight_versions=[WeightVersion(version="7", start=0, end=2)]),
        make_call(1, [1, 2, 3, 4], [5], sampling=cold, weight_versions=[WeightVersion(version="8", start=0, end=1)]),
    ]
    components = EvaluationResult(evaluator="composite", reward=1.0, components={"tests": 0.5, "style": 0.5})
    episode = make_episode("a", 1.0, calls, evaluation=components, truncated_by="calls")
    batch = make_batch([episode], multiple_of=2)
    arrays = padded(batch.rows, pad_id=0)
    assert arrays["temperature"].tolist() == [[1.0, 1.5, 1.5, 1.0, 0.5], [1.0] * 5]
    assert arrays["turns"].tolist() == [[-1, 0, 0, -1, 1], [-1] * 5]
    assert version_names(batch.rows) == ["7", "8"]
    assert arrays["weight_versions"].tolist() == [[-1, 0, 0, -1, 1], [-1] * 5]
    assert arrays["truncated"].tolist() == [1, 0]
    row = batch.rows[0]
    assert (row.kind, row.truncated_by, row.components) == ("main", "calls", {"tests": 0.5, "style": 0.5})
    assert [turn.call_id for turn in row.turns] == ["call0", "call1"]


ENDS = (("cut", "tokens"), ("whole", None))


@pytest.mark.parametrize(
    ("truncated", "rewards"),
    [("keep", {"cut": 1.0, "whole": 0.5}), ("zero", {"cut": 0.0, "whole": 0.5}), ("mask", {"whole": 0.5})],
)
def test_a_session_that_a_budget_ended_has_the_reward_that_was_asked_for(
    truncated: Truncated, rewards: dict[str, float]
) -> None:
    cut = make_episode("cut", 1.0, [make_call(0, [1], [2, 3])], truncated_by="calls")
    whole = make_episode("whole", 0.5, [make_call(0, [1], [4])])
    failed = make_episode("failed", None, [make_call(0, [1], [5])], truncated_by="time")
    batch = make_batch([cut, whole, failed], truncated=truncated)
    assert {row.session_id: row.reward for row in batch.rows} == rewards
    assert sum(row.advantage for row in batch.rows) == pytest.approx(0)
    assert batch.counts.masked_episodes == (2 if truncated == "mask" else 1)
    assert batch.counts.holds


def test_a_session_that_a_budget_ended_is_never_better_than_its_reward() -> None:
    """Guards against a policy that learns to run into the budget, where an evaluator gives rewards below zero."""
    cut, whole = (make_episode(name, -1.0, [make_call(0, [1], [2])], truncated_by=end) for name, end in ENDS)
    assert [row.advantage for row in make_batch([cut, whole], truncated="zero").rows] == [0.0, 0.0]


def test_the_version_of_a_token_whose_call_saw_an_update_is_not_known() -> None:
    """Guards against tokens of new weights that pass for tokens of the old ones."""
    span = WeightVersion(version="7", start=0, end=2, estimated=True, until="8")
    batch = make_batch([make_episode("a", 1.0, [make_call(0, [1], [2, 3], weight_versions=[span])])])
    assert padded(batch.rows, pad_id=0)["weight_versions"].tolist() == [[-1, -1, -1]]


def test_an_unknown_treatment_of_sessions_that_a_budget_ended_is_refused() -> None:
    with pytest.raises(ValueError, match="truncated='drop': unknown; known: 'keep', 'zero', 'mask'"):
        make_batch([], truncated="drop")  # pyright: ignore[reportArgumentType]


def test_an_old_episode_without_turns_has_the_last_calls_temperature() -> None:
    calls = [make_call(0, [1], [2], sampling={"temperature": 0.5})]
    episode = make_episode("a", 1.0, calls)
    episode.trajectory.traces[0].turns = []
    assert padded(make_batch([episode]).rows, pad_id=0)["temperature"].tolist() == [[1.0, 0.5]]


@effort(max_examples=30)
@given(calls=call_trees.sessions(), tokens=st.integers(1, 8))
def test_turns_and_prefixes_of_rows(calls: list[ModelCall], tokens: int) -> None:
    """Each turn is what its call sampled; each shared prefix is the longest with an earlier trace."""
    episode = make_episode("a", 1.0, calls)
    by_id = {call.call_id: call for call in calls}
    whole = {row.trace_id: row for row in make_batch([episode]).rows}
    for row in make_batch([episode], max_tokens=tokens, overlong="truncate").rows:
        covered = np.zeros(len(row.token_ids), bool)
        for turn in row.turns:
            sampled = by_id[turn.call_id].response_ids[: turn.end - turn.start]
            assert row.token_ids[turn.start : turn.end].tolist() == sampled.tolist()
            covered[turn.start : turn.end] = True
        assert covered[row.loss_mask == 1].all()
        earlier = list(whole.values())[: list(whole).index(row.trace_id)]
        pairs = [zip(row.token_ids, other.token_ids, strict=False) for other in earlier]
        shared = [len(list(takewhile(lambda pair: pair[0] == pair[1], each))) for each in pairs]
        assert row.shared_prefix == max(shared, default=0)
        if row.shared_prefix:
            parent = whole[row.parent_trace_id or ""].token_ids[: row.shared_prefix]
            assert parent.tolist() == row.token_ids[: row.shared_prefix].tolist()


def test_padded_rows_hold_experts_and_kept_tokens_where_they_are_recorded() -> None:
    arrays = padded(make_batch([recorded_episode()], multiple_of=2).rows, pad_id=0, length_multiple_of=4)
    assert arrays["routed_experts"].dtype == np.int16
    assert arrays["routed_experts"][0].tolist() == [*experts([1, 2, 3, 4, 5]).tolist(), *[[[-1, -1]]] * 3]
    assert (arrays["routed_experts"][1] == -1).all(), "the inert row"
    (kept, _), (offsets, _) = arrays["kept_ids"], arrays["kept_offsets"]
    assert [kept[start:end].tolist() for start, end in pairwise(offsets)] == [
        [],
        [],
        [3, 7],
        [],
        [5, 7],
        [6, 7],
        [],
        [],
    ]


def test_a_row_that_is_cut_keeps_the_choices_of_its_tokens() -> None:
    (row,) = make_batch([recorded_episode()], max_tokens=5, overlong="truncate").rows
    assert row.routed_experts is not None
    assert row.sampling_mask is not None
    assert row.routed_experts.tolist() == experts([1, 2, 3, 4, 5]).tolist()
    assert [kept.tolist() for kept in row.sampling_mask.sets()] == [[], [], [3, 7], [], [5, 7]]


def test_rows_without_experts_among_rows_with_them_are_refused() -> None:
    """Guards against training some sequences by experts that the trainer's own router chooses."""
    rows = make_batch([recorded_episode("a"), recorded_episode("b", lost=[1])]).rows
    with pytest.raises(ValueError, match=r"traces without routed experts, or of another model: \['b/call1'\]"):
        padded(rows, pad_id=0)
