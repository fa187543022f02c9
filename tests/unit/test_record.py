"""How a record becomes JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from polar_gym.schema import EvaluationResult, HarnessSpec, RuntimeSpec, TaskRequest
from tests.support.calls import make_call
from tests.support.episodes import make_episode


def test_a_lone_surrogate_is_replaced_and_the_rest_is_kept() -> None:
    """Guards against a grader's text that no episode can be written with: the session and its task never ended."""
    episode = make_episode("s", 1.0, [make_call(0, [1, 2], [3])])
    whole = orjson.loads(episode.to_json())
    episode.evaluation = EvaluationResult(
        evaluator="e", reward=1.0, detail="a\ud83db \U0001f600", components={"\udcff": 0.5}
    )
    written = orjson.loads(episode.to_json())
    assert written["evaluation"]["detail"] == "a\ufffdb \U0001f600"
    assert written["evaluation"]["components"] == {"\ufffd": 0.5}
    assert written["reward"] == 1.0, "the policy cannot mask its own episode"
    assert {**written, "evaluation": None} == {**whole, "evaluation": None}


def request(**options: Any) -> TaskRequest:
    agent = HarnessSpec.model_validate({"name": "pi", **options})
    return TaskRequest(task_id="t", instruction="x", runtime=RuntimeSpec(name="bubblewrap"), agent=agent)


def test_a_lone_surrogate_in_a_path_is_replaced() -> None:
    """Guards against a file name that is no UTF-8, as the option of a plug-in."""
    assert orjson.loads(request(file=Path("/tmp/\udcff")).to_json())["agent"]["file"] == "/tmp/\ufffd"


def test_another_value_that_is_no_json_is_refused() -> None:
    with pytest.raises(TypeError, match="64-bit"):
        request(text="\ud83d", number=2**64).to_json()
