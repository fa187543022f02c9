"""The law of the packing: the arrays obey it, and the bugs that it is named after do not."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from polar_gym.builders import build_trajectory
from polar_gym.schema import BuilderSpec, Episode, ModelCall
from polar_gym.training import make_batch, padded
from polar_gym.training.conformance import LOSSES, Step, check, cut, holds, train_arrays
from tests.support import call_trees, packing_bugs
from tests.support.calls import make_call
from tests.support.episodes import forked, make_episode, sessions

VOCABULARY = 32
"""That of `tiny_gpt2`."""


@pytest.mark.parametrize("seed", range(3))
def test_the_arrays_obey_the_law(tiny_gpt2: Any, seed: int) -> None:
    findings = check(train_arrays, tiny_gpt2, vocabulary=VOCABULARY, seed=seed)
    assert len(findings) == 4 * 2 * 5
    assert holds(findings), findings


@effort(max_examples=8)
@given(
    calls=call_trees.sessions(), loss=st.sampled_from(sorted(LOSSES)), weighting=st.sampled_from(["token", "session"])
)
def test_the_gradient_does_not_depend_on_the_builder(
    tiny_gpt2: Any, calls: list[ModelCall], loss: str, weighting: Any
) -> None:
    """Guards against a builder that trains other tokens, or the same ones after others."""
    torch: Any = importlib.import_module("torch")
    merged = make_episode("a", 1.0, calls)
    gradients = []
    for builder in ("prefix_merging", "per_request"):
        trajectory = build_trajectory(calls, BuilderSpec(name=builder))
        other = make_episode("b", 0.0, [make_call(0, [1], [2, 3])])
        rows = make_batch([merged.model_copy(update={"trajectory": trajectory}), other], weighting=weighting).rows
        tiny_gpt2.zero_grad()
        train_arrays(tiny_gpt2, Step(ranks=[[rows]], loss=loss, weighting=weighting))
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in tiny_gpt2.parameters()]))
    assert torch.norm(gradients[0] - gradients[1]) <= 1e-6 * torch.norm(gradients[0])


@pytest.mark.parametrize(
    ("adapter", "loss", "weighting", "caught_by"),
    [
        (packing_bugs.divided_by_rows, "ppo", "session", "traces cut into rows"),
        (packing_bugs.mean_of_micro_batches, "ppo", "token", "uneven micro-batches"),
        (packing_bugs.a_step_for_every_eight_rows, "ppo", "token", "traces cut into rows"),
        (packing_bugs.ratio_of_each_row, "gspo", "token", "traces cut into rows"),
    ],
)
def test_known_bugs_are_caught(
    tiny_gpt2: Any, adapter: Callable[[Any, Step], None], loss: str, weighting: Any, caught_by: str
) -> None:
    findings = check(adapter, tiny_gpt2, vocabulary=VOCABULARY, losses={loss: LOSSES[loss]}, weightings=[weighting])
    assert not holds(findings)
    (difference,) = (finding.difference for finding in findings if finding.split == caught_by)
    assert difference > 0.05, findings


def test_a_model_in_a_small_float_is_refused(tiny_gpt2: Any) -> None:
    """Guards against a check whose differences are those of rounding."""
    torch: Any = importlib.import_module("torch")
    with pytest.raises(ValueError, match=r"parameters of torch.float32: call model.double\(\) first"):
        check(train_arrays, torch.nn.Linear(1, 1), vocabulary=VOCABULARY)


@effort(max_examples=30)
@given(episodes=sessions(), places=st.lists(st.integers(0, 20), max_size=4))
def test_a_cut_row_trains_the_same_tokens_after_the_same_tokens(episodes: list[Episode], places: list[int]) -> None:
    for row in make_batch(episodes, weighting="session").rows:
        pieces = cut(row, [place for place in places if place <= len(row.token_ids)])
        trained = np.zeros(len(row.token_ids))
        for piece in pieces:
            length = len(piece.token_ids)
            assert piece.token_ids.tolist() == row.token_ids[:length].tolist()
            assert piece.session_tokens == row.session_tokens
            for name in ("loss_mask", "logprobs", "weights"):
                own = getattr(row, name)[:length] * piece.loss_mask
                assert getattr(piece, name).tolist() == own.tolist()
            trained[:length] += piece.loss_mask
        assert trained.tolist() == row.loss_mask.tolist()


def test_sessions_and_groups_have_the_same_numbers_in_all_micro_batches() -> None:
    """Guards against ratios of half a session, and means of half a group."""
    episodes = [make_episode("a", 1.0, forked(2)), make_episode("b", 0.0, forked(1), task_id="other")]
    rows = make_batch(episodes, multiple_of=4).rows
    whole = padded(rows, pad_id=0)
    assert whole["session_tokens"].tolist() == [6, 6, 3, 0]
    for name in ("session_ids", "group_ids"):
        one, two, other, inert = whole[name].tolist()
        assert one == two != other
        assert inert == -1
        assert [padded([row], pad_id=0)[name].item() for row in rows] == [one, two, other, inert]
