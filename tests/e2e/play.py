"""Runs of the real harnesses with a scripted policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym

from polar_gym.envs.swe import SweEnv
from polar_gym.schema import Episode


def make(tmp_path: Path, **settings: Any) -> SweEnv:
    rollout = {"timeout_seconds": 120, "state": str(tmp_path / "state"), **settings.pop("rollout", {})}
    env = gym.make("polar/swe", rollout=rollout, **settings).unwrapped
    assert isinstance(env, SweEnv)
    return env


def play(env: SweEnv, task_id: str = "") -> tuple[float, bool, bool, Episode]:
    env.reset(seed=0, options={"task_id": task_id or env.tasks[0].instance_id})
    _, reward, terminated, truncated, info = env.step({})
    return reward, terminated, truncated, info["trajectory"]


def scripted(commands: list[str], **options: Any) -> dict[str, Any]:
    script = {"match": "", "commands": commands, "final_message": "I am done."}
    return {"name": "embedded", "scripts": [script], **options}
