"""Rewards a harness that ended by itself. Nothing is graded: for smoke tests and for tasks that have no tests."""

from __future__ import annotations

from polar_gym.evaluators import EvaluationContext
from polar_gym.registry import Options
from polar_gym.schema import EvaluationResult


class SessionCompletion:
    Options = Options

    def __init__(self, options: Options) -> None: ...

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        problem = _problem(context)
        return EvaluationResult(
            evaluator="session_completion",
            reward=0.0 if problem else 1.0,
            detail=problem or f"the harness exited with 0 after {len(context.calls)} model calls",
        )


def _problem(context: EvaluationContext) -> str:
    session = context.session
    if session.truncated_by is not None:
        return f"the session was cut off by its {session.truncated_by} budget"
    if session.exit_code is None:
        return "the harness was killed or never started"
    if session.exit_code != 0:
        return f"the harness exited with {session.exit_code}"
    if not context.calls:
        return "the harness made no model call"
    return ""


EVALUATOR = SessionCompletion
