"""What the environments' spaces hold, and the transcript that `render` shows."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from gymnasium.vector.utils import batch_space, iterate
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.envs.spaces import AnyText, Number, action_space, observation_space
from polar_gym.envs.transcript import SHOWN, transcript
from tests.support.calls import make_call


@pytest.mark.parametrize(
    "action",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.5, "top_p": np.float32(0.9), "top_k": -1},
        {"temperature": np.array(1.0), "top_k": np.int64(20), "instruction": ""},
    ],
)
def test_actions(action: dict[str, Any]) -> None:
    assert action in action_space()


@pytest.mark.parametrize(
    "action",
    [
        {"temprature": 0.5},
        {"temperature": 2.5},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"temperature": True},
        {"temperature": [0.5]},
        {"top_k": 1.5},
        {"instruction": None},
        "go",
        None,
        0,
    ],
)
def test_no_actions(action: Any) -> None:
    assert action not in action_space()


@given(seed=st.integers(0, 2**31 - 1))
def test_samples_are_members_and_follow_from_the_seed(seed: int) -> None:
    for space, twin in ((action_space(), action_space()), (observation_space(), observation_space())):
        space.seed(seed)
        twin.seed(seed)
        sample = space.sample()
        assert sample in space
        assert sample == twin.sample()


@given(st.text())
def test_any_text_is_text(text: str) -> None:
    assert text in AnyText()


def test_a_batch_of_actions_is_one_dictionary_each() -> None:
    """Guards against a batched space that asks every sub-environment for every entry."""
    batch = batch_space(action_space(), 3)
    actions = ({}, {"temperature": 0.5}, {})
    assert actions in batch
    assert tuple(iterate(batch, actions)) == actions
    assert batch.sample() in batch


def test_spaces_are_equal_by_what_they_hold() -> None:
    assert action_space() == deepcopy(action_space())
    assert observation_space() == observation_space()
    assert Number(0, 1) != Number(0, 1, whole=True)
    assert Number(0, 1) != Number(0, 2)


def test_the_transcript_tells_what_is_new() -> None:
    asked = {"role": "user", "content": "What is here?"}
    listing = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    answer = {"role": "assistant", "content": None, "reasoning": "I look.", "tool_calls": [listing]}
    result = {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "x" * (2 * SHOWN + 7)}]}
    first = make_call(0, [1], [2, 3], messages=[asked], response=answer)
    second = make_call(
        1, [1, 2, 3, 4], [5], messages=[asked, answer, result], response={"content": "A file."}, parent_id="call0"
    )
    third = make_call(2, [1], [], messages=[asked], outcome="failed", error="the engine is gone")
    lines = transcript("task #0", [first, second, third]).splitlines()
    assert lines[:5] == [
        "== task #0",
        "-- call 0 (main, 2 tokens sampled)",
        "[user] What is here?",
        "[assistant] <I look.>",
        '-> bash({"command": "ls"})',
    ]
    text = "\n".join(lines)
    assert text.count("What is here?") == 2, "the second call continues the first, the third begins anew"
    assert "... 7 characters left out ..." in text
    assert lines[-1] == "no answer: the engine is gone"
