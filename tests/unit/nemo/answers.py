"""Answers of the NeMo Gym agent for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polar_gym.builders import build_trajectory
from polar_gym.nemo.rollouts import AgentSettings, Rollouts
from polar_gym.schema import (
    BuilderSpec,
    EngineInfo,
    Episode,
    Failure,
    HarnessSpec,
    ModelCall,
    RuntimeSpec,
    Session,
    TaskRequest,
)

ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "Fix it."}]},
    "_ng_task_index": 3,  # NeMo Gym's
    "_rowidx": 3,  # NeMo RL's
}

OFFLINE = {"engine": "embedded", "runtime": "bubblewrap"}


def episode(calls: Sequence[ModelCall], failure: Failure | None = None, builder: str = "prefix_merging") -> Episode:
    return Episode(
        session=Session(session_id="s", task_id="t", sample_index=0, harness="pi", failure=failure),
        request=TaskRequest(
            task_id="t", instruction="Fix it.", runtime=RuntimeSpec(name="auto"), agent=HarnessSpec(name="pi")
        ),
        engine=EngineInfo(name="embedded", model="policy", max_model_len=1000),
        trajectory=build_trajectory(calls, BuilderSpec(name=builder)),
        reward=None if failure else 1.0,
    )


async def answer_to(settings: AgentSettings, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    rollouts = Rollouts(settings)
    try:
        return [await rollouts.run(one) for one in rows]
    finally:
        await rollouts.close()
