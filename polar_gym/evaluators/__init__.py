"""What a finished sandbox is worth.

Each module here defines one class `EVALUATOR`, made from its validated options. Grading happens in a fresh sandbox,
built from the same image and workspace, to which only the agent's diff is carried.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from polar_gym.runtimes import Sandbox
from polar_gym.schema import EvaluationResult, ModelCall, Session, TaskRequest


class EvaluatorError(Exception):
    """The grader itself is broken, through no fault of the agent: the episode is masked, not scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationContext:
    """What an evaluator may look at."""

    request: TaskRequest
    session: Session
    calls: list[ModelCall]
    diff: bytes
    """The agent's changes since the base commit, as a binary-safe git patch."""
    final_message: str
    fresh_sandbox: Callable[[], AbstractAsyncContextManager[Sandbox]]
    """A new sandbox from the same image with the workspace at its base commit and no network."""


class Evaluator(Protocol):
    """With `needs_sandbox = True` on its class, a fresh sandbox is made while the agent runs, if there is a place."""

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        """Raises `EvaluatorError` when the grader, not the agent, is at fault."""
        ...
