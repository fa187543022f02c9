"""Answers that a harness threw away, in data for imitation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polar_gym.builders import build_trajectory
from polar_gym.export.acceptance import Filters
from polar_gym.export.rejected import without_rejected
from polar_gym.export.sft import export_sft
from polar_gym.schema import BuilderSpec, ModelCall, SamplingMask, Trace, Trajectory
from tests.support.calls import make_call
from tests.unit.export.graded_episodes import graded_episode

FIRST = make_call(0, [1], [2])
AGAIN = [FIRST, make_call(1, [1, 2, 9], [3, 4]), make_call(2, [1, 2, 9], [5])]
"""A turn, an answer, and another answer to the same."""
LAST = make_call(3, [1, 2, 9, 5, 9], [6, 7], parent_id="call2")

CASES = {
    "a retry in the middle": ([*AGAIN, LAST], {"call1"}),
    "the answer that is retried is the longest": (AGAIN, {"call1"}),
    "three answers": ([*AGAIN, make_call(3, [1, 2, 9], [7])], {"call1", "call2"}),
    "the first prompt": ([FIRST, make_call(1, [1], [3])], {"call0"}),
    "the conversation went on from the first answer": (
        [*AGAIN, make_call(3, [1, 2, 9, 3, 4, 9], [6], parent_id="call1")],
        set[str](),
    ),
    "sub-agents that were asked the same": (
        [make_call(0, [1], [2], hints={"thread": "a"}), make_call(1, [1], [3], hints={"thread": "b"})],
        set[str](),
    ),
    "the answer that is retried was cut at its length": ([FIRST, make_call(1, [1], [2, 3])], {"call0"}),
    "the second answer is not trained": ([FIRST, make_call(1, [1], [3], sampling_mismatch=["x"])], {"call0", "call1"}),
    "nothing was asked again": ([FIRST, make_call(1, [1, 2, 9], [3, 4])], set[str]()),
}


def built(calls: list[ModelCall], builder: str, *, train_rejected: bool = True) -> Trajectory:
    return build_trajectory(calls, BuilderSpec(name=builder, train_rejected=train_rejected))


def trained(traces: list[Trace]) -> set[str]:
    """Return the calls of which a token is trained."""
    return {turn.call_id for trace in traces for turn in trace.turns if trace.loss_mask[turn.start : turn.end].any()}


@pytest.mark.parametrize("builder", ["prefix_merging", "per_request"])
@pytest.mark.parametrize("case", CASES)
def test_rejected_answers_are_those_that_a_builder_can_exclude(case: str, builder: str) -> None:
    calls, rejected = CASES[case]
    traces = without_rejected(built(calls, builder))
    assert trained(traces) == {call.call_id for call in calls} - rejected
    assert trained(traces) == trained(built(calls, builder, train_rejected=False).traces)
    for trace in traces:
        assert trace.loss_mask.dtype == np.int8
        assert not trace.logprobs[trace.loss_mask == 0].any()


def test_an_episode_of_an_earlier_version_stays_as_it_is() -> None:
    """It names no rejected calls."""
    trajectory = built(AGAIN, "prefix_merging")
    trajectory.rejected = []
    assert without_rejected(trajectory) == trajectory.traces


def test_a_solved_episode_does_not_teach_what_its_harness_threw_away(tmp_path: Path) -> None:
    """Guards against examples of discarded answers, such as broken tool calls, for which the tests passed later."""
    kept = SamplingMask.of([[3, 8], [4]])
    retried = [FIRST, AGAIN[1].model_copy(update={"sampling_mask": kept}), AGAIN[2]]
    middle, longest = built([*AGAIN, LAST], "prefix_merging"), built(retried, "prefix_merging")
    episodes = [graded_episode("middle", trajectory=middle), graded_episode("longest", trajectory=longest)]
    one, two = export_sft(episodes, tmp_path, Filters())
    assert one.left_out == {"rejected": 1}
    assert [example.trainable_tokens for example in one.examples] == [4]
    assert two.left_out == {}
    assert [example.trainable_tokens for example in two.examples] == [1, 1], "the turn before it is still taught"
    (first, _) = without_rejected(longest)
    assert first.sampling_mask is not None
    assert [ids.tolist() for ids in first.sampling_mask.sets()] == [[]] * 4
