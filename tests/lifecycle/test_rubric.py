"""A whole session that tests and a judge grade together, up to the arrays of a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_gym.schema import Episode, EvaluatorSpec
from polar_gym.tasks.bundled import TASKS
from polar_gym.training import make_batch, padded
from tests.support.judge import judging
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking, node
from tests.support.task_files import request_for

HARNESS = asking("ask(); open('made.txt', 'w'); ask()")
INTERVALS = next(each for each in TASKS(TASKS.Options()).load() if each.repo == "polar/intervals")
KEY = "sk-a-key-of-the-judges-server"


def evaluator(url: str) -> EvaluatorSpec:
    criteria = [{"name": "small", "text": "The change is small."}]
    rubric = {"name": "rubric", "url": url, "model": "m", "api_key_env": "JUDGES_KEY", "criteria": criteria}
    components = {
        "tests": {"name": "test_on_output", "command": "test -f made.txt"},
        "style": {**rubric, "per_turn": True},
    }
    return EvaluatorSpec.model_validate({"name": "composite", "components": components, "weights": {"tests": 3}})


@pytest.fixture(autouse=True)
def around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    monkeypatch.setenv("POLAR_GYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JUDGES_KEY", KEY)


async def rollout(tmp_path: Path, *answers: Any) -> tuple[Episode, list[dict[str, Any]]]:
    async with judging(*answers) as model, node(tmp_path) as gateway:
        request = request_for(INTERVALS, agent=HARNESS, evaluator=evaluator(model.url))
        episode = await gateway.rollout(request)
        return episode, model.asked


async def test_tests_and_a_judge_grade_a_session(tmp_path: Path) -> None:
    episode, asked = await rollout(tmp_path, {"criteria": {"small": 0.5}, "calls": [1, 0]})
    assert episode.evaluation is not None, episode.session.failure
    assert episode.reward == (3 * 1.0 + 0.5) / 4
    assert episode.evaluation.components == {"tests": 1.0, "style": 0.5, "style: small": 0.5}
    assert (episode.evaluation.trust, episode.evaluation.resolved) == ("low", True)
    assert len(asked) == 1
    assert "made.txt" in asked[0]["messages"][1]["content"].split("\n")[-2], "the diff is shown"

    again = Episode.from_json(episode.to_json())
    turns = [turn for trace in again.trajectory.traces for turn in trace.turns]
    assert sorted((turn.call_id, turn.reward) for turn in turns) == sorted(again.evaluation.call_rewards.items())  # type: ignore[union-attr]
    assert again.trajectory.fidelity.calls == 2, "the judge's answers are no calls of the session"
    assert KEY.encode() not in episode.to_json()
    rows = make_batch([again], turn_reward_weight=1.0, allow_scripted=True).rows
    arrays = padded(rows, pad_id=0)
    assert set(arrays["advantages"][arrays["loss_mask"] == 1].tolist()) == {0.0, -0.5}, "1 - 0.5 + 0 - 0.5, and 0 - 0.5"
    assert set(arrays["turn_rewards"][arrays["loss_mask"] == 1].tolist()) == {0.0, 1.0}
    assert np.isnan(arrays["turn_rewards"][arrays["turns"] == -1]).all()


async def test_a_judge_without_an_answer_masks_the_session(tmp_path: Path) -> None:
    """Guards against the mean of the other evaluators, which would be another reward."""
    episode, _ = await rollout(tmp_path, "I cannot judge this.")
    assert (episode.reward, episode.evaluation) == (None, None)
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "evaluator_error"
    assert "in another form than asked for" in episode.session.failure.message
    assert {turn.reward for trace in episode.trajectory.traces for turn in trace.turns} == {None}
