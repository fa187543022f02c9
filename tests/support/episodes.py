"""Episodes for tests of the steps after the rollout, made of calls by the real builder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

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


REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.1, 0.3]))


@st.composite
def sessions(draw: st.DrawFn) -> list[Episode]:
    """Draw episodes whose sampled tokens are all different, so that each can be followed; some fork, some fail."""
    episodes, token = [], 1000
    for number in range(draw(st.integers(0, 8))):
        calls: list[ModelCall] = []
        for index in range(draw(st.integers(0, 4))):
            prompt = [index, *draw(st.lists(st.integers(0, 9), max_size=3))]
            if calls and draw(st.booleans()):
                base = draw(st.sampled_from(calls))
                prompt = [*base.prompt_ids.tolist(), *base.response_ids.tolist(), *prompt]
            sampled = list(range(token, token + draw(st.integers(0, 4))))
            token += len(sampled)
            outcome = draw(st.sampled_from(["delivered", "delivered", "delivered", "abandoned"]))
            calls.append(make_call(index, prompt, sampled, outcome=outcome))
        task_id = draw(st.sampled_from(["a", "b", "c"]))
        episodes.append(make_episode(f"s{number}", draw(REWARDS), calls, task_id=task_id))
    return episodes
