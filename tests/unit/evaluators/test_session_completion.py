"""session_completion: the harness's own end is the reward."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from polar_gym.evaluators import EvaluationContext
from polar_gym.evaluators.session_completion import EVALUATOR
from polar_gym.runtimes import Sandbox
from polar_gym.schema import HarnessSpec, ModelCall, RuntimeSpec, Session, TaskRequest

CALL = ModelCall(
    call_id="c",
    session_id="s",
    index=0,
    provider="openai_chat",
    model="policy",
    messages=[],
    prompt_ids=np.array([1], np.int32),
    response_ids=np.array([2], np.int32),
    logprobs=np.array([-0.5], np.float32),
    started_at=0.0,
    duration=1.0,
)


def no_sandbox() -> AbstractAsyncContextManager[Sandbox]:
    raise AssertionError("nothing has to be run")


@pytest.mark.parametrize(
    ("session", "calls", "reward", "detail"),
    [
        ({"exit_code": 0}, [CALL], 1.0, "exited with 0 after 1 model calls"),
        ({"exit_code": 2}, [CALL], 0.0, "exited with 2"),
        ({"exit_code": None}, [CALL], 0.0, "was killed or never started"),
        ({"exit_code": 0, "truncated_by": "calls"}, [CALL], 0.0, "cut off by its calls budget"),
        ({"exit_code": 0}, [], 0.0, "made no model call"),
    ],
)
async def test_reward(session: dict[str, Any], calls: list[ModelCall], reward: float, detail: str):
    context = EvaluationContext(
        request=TaskRequest(
            task_id="t", instruction="i", runtime=RuntimeSpec(name="bubblewrap"), agent=HarnessSpec(name="pi")
        ),
        session=Session(session_id="s", task_id="t", sample_index=0, harness="pi", **session),
        calls=calls,
        diff=b"",
        final_message="",
        fresh_sandbox=no_sandbox,
    )
    result = await EVALUATOR(EVALUATOR.Options()).evaluate(context)
    assert result.reward == reward
    assert detail in result.detail
