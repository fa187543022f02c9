"""Samples of one task are one group for NeMo RL, whatever became of them, and a masked sample has no vote in it."""

from __future__ import annotations

from typing import Any

import pytest

from polar_gym.nemo.rollouts import AgentSettings
from polar_gym.nemo.verified import verified_episode
from polar_gym.schema import Failure, ModelCall, Status
from tests.support.calls import make_call
from tests.support.nemo_rl import advantages, groups
from tests.unit.nemo.answers import OFFLINE, ROW, answer_to, episode

FIRST = make_call(0, [1, 2], [3, 4])
PLAIN = [FIRST, make_call(1, [1, 2, 3, 4, 5], [6])]
COMPACTED = [
    *PLAIN,
    make_call(2, [1, 2, 3, 4, 5, 6, 7], [8], hints={"kind": "compaction"}),
    make_call(3, [1, 2, 70], [71] * 9),
]
"""No other sample has the prompt after the summary, and most tokens are sampled behind it."""
UNNOTICED = [FIRST, make_call(1, [1, 60], [61]), make_call(2, [1, 2, 70], [71] * 9)]
"""A compaction of a harness whose requests do not say what they are for."""
DELEGATED = [FIRST, make_call(1, [30, 31], [32] * 9, hints={"kind": "subagent"})]
ASKED_AGAIN = [make_call(0, [1, 2], [3], outcome="abandoned"), make_call(1, [1, 2], [4, 4])]
TITLED = [make_call(0, [90], [91] * 9, hints={"kind": "auxiliary"}), make_call(1, [1, 2], [3])]
DIED = Failure(stage=Status.RUNNING, kind="harness_error", message="it broke")


def answer_of(calls: list[ModelCall], reward: float = 1.0, failure: Failure | None = None) -> dict[str, Any]:
    sample = episode(calls, failure)
    return verified_episode(ROW, sample.model_copy(update={"reward": None if failure else reward}), calls)


@pytest.mark.parametrize(
    "other",
    [COMPACTED, UNNOTICED, DELEGATED, ASKED_AGAIN, TITLED],
    ids=["compacted", "compacted unnoticed", "delegated", "asked again", "titled"],
)
def test_samples_of_one_task_are_one_group(other: list[ModelCall]) -> None:
    """Guards against a sample that is alone in its group: whatever its reward, it has no advantage."""
    answers = [answer_of(PLAIN, reward=1.0), answer_of(other, reward=0.0)]
    assert groups(answers) == [[0, 1]]
    assert advantages(answers) == pytest.approx([0.7071, -0.7071], abs=1e-4)


def test_a_sample_whose_first_answer_is_not_trained_is_alone() -> None:
    """A stated limit: NeMo RL knows a prompt only by what is sampled behind it."""
    bent = make_call(0, [1, 2], [3, 4], sampling_mismatch=["tool_choice"])
    assert groups([answer_of(PLAIN), answer_of([bent, PLAIN[1]])]) == [[0], [1]]


async def test_masked_samples_have_no_vote() -> None:
    """Guards against a masked sample whose reward of 0 lifts the advantages of solved ones: by its own tokens it would
    be in their group, and they would have +0.577 each."""
    died = answer_of(PLAIN, failure=DIED)
    solved = [answer_of(PLAIN), answer_of(COMPACTED)]
    assert advantages([*solved, died])[:2] == [0.0, 0.0]
    without_a_session = await answer_to(AgentSettings(polar=OFFLINE), ROW)
    nothing_to_train = answer_of([make_call(0, [1, 2], [3], outcome="abandoned")])
    masked = [died, *without_a_session, nothing_to_train]
    assert all(answer["instance_config"]["mask_sample"] for answer in masked)
    assert groups([*solved, *masked]) == [[0, 1], [2, 3, 4]]
    assert advantages([*solved, *masked]) == [0.0] * 5
