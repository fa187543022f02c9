"""What a finished sandbox is worth.

Each plug-in here defines one class `EVALUATOR`, made from its validated options. Grading happens in a fresh sandbox,
built from the same image and workspace, to which only the agent's diff is carried (`grading.carry`).

Who is to blame when grading fails is decided in one place, `judge.judge`: what fails before the diff is there, or
without it too, is the grader's fault and masks the episode; what fails only with it is the agent's, and scored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from polar_gym.registry import Makers
from polar_gym.runtimes import Sandbox
from polar_gym.schema import EvaluationResult, ModelCall, Session, TaskRequest


class EvaluatorError(Exception):
    """The grader itself is broken, through no fault of the agent: the episode is masked, not scored."""


class SuspectError(Exception):
    """Grading was cut short, or cannot be believed, with the agent's changes in place: `result` is what they are worth,
    provided that the grader comes to its end without them."""

    def __init__(self, result: EvaluationResult, *, unwitnessed: EvaluationResult | None = None) -> None:
        super().__init__(result.detail)
        self.result = result
        self.unwitnessed = unwitnessed
        """The result that counts if the run without the changes is `Progress.unwitnessed` too; None: `result` does."""


@dataclass(slots=True)
class Progress:
    """How far an evaluation is."""

    carried: bool = False
    """The agent's diff is, at least in part, in a sandbox."""
    counted: list[str] = field(default_factory=list)
    """Files that the agent changed and that are its own."""
    not_counted: list[str] = field(default_factory=list)
    """Files that the agent changed and that are the task's."""
    unwitnessed: bool = False
    """The tests ran and told the witness nothing."""


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
    diff_problem: str = ""
    """Why no diff could be taken, through the agent's own doing; `diff` is empty then."""
    control: bool = False
    """Grade the workspace as it was before the agent (`diff` is empty): only to see whether the grader works."""
    progress: Progress = field(default_factory=Progress)


class Evaluator(Protocol):
    """With `needs_sandbox = True` on its class, a fresh sandbox is made while the agent runs, if there is a place."""

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        """Raises `EvaluatorError` when the grader, not the agent, is at fault, and `SuspectError` when that depends on
        whether it works without the agent's changes."""
        ...


EVALUATORS: Makers[Evaluator] = Makers("evaluator", __name__)
