"""`gym.make` used wrongly, or at a bad moment: said at once, and nothing is left behind or half begun."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import polar_gym  # noqa: F401 - registers the environment
from polar_gym.engines import EngineError
from polar_gym.envs.swe import SweEnv
from polar_gym.errors import ConfigError


def make(**settings: Any) -> SweEnv:
    settings = {"harness": {"name": "command", "command": "true"}, "runtime": "bubblewrap", **settings}
    env = gym.make("polar/swe", **settings).unwrapped
    assert isinstance(env, SweEnv)
    return env


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "polar-gym"]


def test_a_reset_that_fails_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a second reset that finds a node half started, and writes into the working directory."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    env = make(engine={"name": "embedded", "policy": "transformers", "model_path": str(model)})
    for _ in range(2):
        with pytest.raises(EngineError):
            env.reset()
        assert threads() == []
    env.close()
    assert list(tmp_path.iterdir()) == [model]


def test_step_after_a_reset_that_failed_is_refused() -> None:
    """Guards against an episode of a sandbox that never came up."""
    env = make(runtime={"name": "bubblewrap", "scratch": "/nonexistent"})
    try:
        with pytest.raises(RuntimeError, match="/nonexistent"):
            env.reset()
        with pytest.raises(gym.error.ResetNeeded):
            env.step({})
    finally:
        env.close()


def test_an_unknown_reset_option_is_named() -> None:
    env = make()
    with pytest.raises(KeyError, match="unknown reset option 'taskid'; known: task_id"):
        env.reset(options={"taskid": env.tasks[0].instance_id})
    env.close()


@pytest.mark.parametrize(("name", "settings"), [("polar/swe", {}), ("polar/task", {"instruction": "Go."})])
def test_the_harness_is_the_recipes_unless_one_is_named(name: str, settings: dict[str, Any]) -> None:
    """Guards against a default of ours that wins over the recipe without a word."""
    settings = {**settings, "engine": {"name": "vllm", "url": "http://127.0.0.1:1"}, "runtime": "bubblewrap"}
    for recipe, named, expected in (
        ("swe_rollout", {}, "codex"),
        ("swe_rollout", {"harness": "qwen_code"}, "qwen_code"),
        (None, {}, "pi"),
    ):
        env: Any = gym.make(name, **{**settings, **named, "recipe": recipe}).unwrapped
        assert env.config.harness.name == expected
        env.close()


@pytest.mark.parametrize(
    ("evaluator", "says"),
    [
        ({"name": "swe", "log_parser": "nope"}, r"evaluator\.log_parser='nope': .*unknown log parser"),
        ({"name": "swe", "wings": 2}, r"evaluator\.wings=2: unknown key; known here: FAIL_TO_PASS, "),
    ],
)
def test_what_a_task_cannot_be_graded_with_is_said_before_anything_starts(evaluator: dict[str, Any], says: str) -> None:
    """Guards against a grader that turns out to be broken when the harness has already run."""
    with pytest.raises(ConfigError, match=says):
        make(evaluator=evaluator)
