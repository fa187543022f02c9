"""Episodes for tests of the steps after the rollout, made of calls by the real builder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polar_gym.builders import build_trajectory
from polar_gym.schema import (
    BuilderSpec,
    EngineInfo,
    Episode,
    EvaluationResult,
    Failure,
    HarnessSpec,
    ModelCall,
    RuntimeSpec,
    Session,
    Status,
    TaskRequest,
)
from tests.support.calls import make_call


def make_episode(
    session_id: str,
    reward: float | None,
    calls: Sequence[ModelCall] = (),
    *,
    task_id: str = "task",
    repo: str = "",
    resolved: bool | None = None,
    truncated_by: Any = None,
    **fields: Any,
) -> Episode:
    """Return an episode of these calls, which failed if it has no reward. `fields` replace the episode's own."""
    failure = Failure(stage=Status.RUNNING, kind="engine_error", message="gone") if reward is None else None
    own = [call.model_copy(update={"session_id": session_id}) for call in calls]
    evaluation = None if reward is None else EvaluationResult(evaluator="swe", reward=reward, resolved=resolved)
    values = {
        "session": Session(
            session_id=session_id,
            task_id=task_id,
            sample_index=0,
            harness="pi",
            status=Status.ERROR if failure else Status.COMPLETED,
            failure=failure,
            truncated_by=truncated_by,
        ),
        "request": TaskRequest(
            task_id=task_id,
            instruction="Do it.",
            runtime=RuntimeSpec(name="bubblewrap"),
            agent=HarnessSpec(name="pi"),
            metadata={"repo": repo} if repo else {},
        ),
        "engine": EngineInfo(name="embedded", model="policy", max_model_len=100),
        "trajectory": build_trajectory(own, BuilderSpec(name="prefix_merging")),
        "reward": reward,
        "evaluation": evaluation,
    }
    return Episode.model_validate(values | fields)


def forked(answers: int, length: int = 3) -> list[ModelCall]:
    """Return the calls of a session that forked into as many traces, because its answers continue nothing."""
    return [
        make_call(index, [100 + index], [10 * index + place for place in range(length)]) for index in range(answers)
    ]
