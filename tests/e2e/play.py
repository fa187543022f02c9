"""Runs of the real harnesses with a scripted policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym

from polar_gym.builders.trace import verify_trace
from polar_gym.envs.swe import SweEnv
from polar_gym.gateway.proxy.journal import read_journal
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


def solve_a_task(runtime: str, harness: str, tmp_path: Path) -> None:
    """Play the first task of the demo, and check the reward, the trace and the books."""
    env = make(tmp_path, harness=harness, runtime=runtime)
    try:
        reward, terminated, truncated, episode = play(env)
    finally:
        env.close()
    assert (reward, terminated, truncated) == (1.0, True, False), episode.session.failure
    assert episode.session.status == "COMPLETED"
    assert episode.evaluation is not None
    assert set(episode.evaluation.tests.values()) == {"PASSED"}
    assert "diff --git" in episode.artifacts.diff

    fidelity = episode.trajectory.fidelity
    assert episode.artifacts.journal is not None
    calls = read_journal(Path(episode.artifacts.journal))
    assert len(calls) == fidelity.calls >= 3
    assert fidelity.sampled_tokens == sum(len(call.response_ids) for call in calls)
    assert fidelity.exact
    assert set(fidelity.excluded) <= {"kind:auxiliary"}, "nothing but titles is left out"
    (trace,) = episode.trajectory.traces
    assert trace.kind == "main"
    verify_trace(trace, calls)
    assert trace.reward == 1.0
