"""The context of an evaluator that needs no sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from polar_gym.evaluators import EvaluationContext
from polar_gym.runtimes import Sandbox
from polar_gym.schema import EvaluatorSpec, HarnessSpec, ModelCall, RuntimeSpec, Session, TaskRequest


def no_sandbox() -> AbstractAsyncContextManager[Sandbox]:
    raise AssertionError("nothing has to be run")


def make_context(evaluator: EvaluatorSpec, calls: Sequence[ModelCall], **fields: Any) -> EvaluationContext:
    """Return the context of a session that ended by itself. `fields` replace the context's own."""
    request = TaskRequest(
        task_id="t",
        instruction="Fix the bug.",
        runtime=RuntimeSpec(name="bubblewrap"),
        agent=HarnessSpec(name="pi"),
        evaluator=evaluator,
    )
    values: dict[str, Any] = {
        "request": request,
        "session": Session(session_id="s", task_id="t", sample_index=0, harness="pi", exit_code=0),
        "calls": list(calls),
        "diff": b"",
        "final_message": "Done.",
        "fresh_sandbox": no_sandbox,
    }
    return EvaluationContext(**values | fields)
