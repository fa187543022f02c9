"""Grades finished sessions.

Grading happens in a fresh sandbox, built from the same image and workspace. Only the harness's diff is carried into
that sandbox.

An evaluator is one module that defines `EVALUATOR`: a class with the method `evaluate` (`Evaluator` below), made from
its validated `Options`. The evaluators are `swe`, `harbor`, `test_on_output`, `rubric`, `nemo_gym`,
`session_completion` and `composite`. The tools:

- `blame`: decides who is at fault when grading fails;
- `grading`: carries the harness's diff into a grading sandbox; `patch` splits a diff into files;
- `protected`, `steering`: tell which files belong to the task;
- `parsers`, `junit`, `swebench_report`: read the statuses of tests from logs and reports;
- `hidden_tests`: puts the tests of a task into the sandbox; `eval_script` runs swebench's scripts;
- `twins` (with `expectations`, `alternatives`), `canary` (with `canary_javascript`) and `witness` (with `in_sandbox/`)
  detect forged reports; `verdict` compares all reports of a run;
- `pattern`: searches an output for a regular expression of a request;
- `resources_server`: one episode of a NeMo Gym server;
- `result`: shortens logs and words results.

The room uses workspaces, runtimes, registry and schema; `rubric` asks a model by the HTTP client of the engines;
`nemo_gym` writes what `providers` read. The room does not import the gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from polar_gym.registry import Makers
from polar_gym.runtimes import Sandbox
from polar_gym.schema import EvaluationResult, ModelCall, Session, TaskRequest


class EvaluatorError(Exception):
    """The grader itself is broken, and the harness did not break it: the episode is masked, not scored."""


class SuspectError(Exception):
    """Grading with the harness's changes was cut short or cannot be believed.

    `result` counts if grading without the changes comes to its end.
    """

    def __init__(self, result: EvaluationResult, *, believed: EvaluationResult | None = None) -> None:
        super().__init__(result.detail)
        self.result = result
        self.believed = believed
        """Counts instead of `result` if the run without the changes gives rise to the same `Progress.doubts`; None:
        `result`."""


@dataclass(slots=True)
class Progress:
    """The progress of one evaluation."""

    carried: bool = False
    """At least a part of the harness's diff is in the sandbox of this run, or the policy's text is with a judge."""
    counted: list[str] = field(default_factory=list)
    """Files that the harness changed and that do not belong to the task."""
    not_counted: list[str] = field(default_factory=list)
    """Files that the harness changed although they belong to the task."""
    doubts: set[str] = field(default_factory=set)
    """Facts that speak against a success, unless they hold without the harness's changes too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationContext:
    """The facts that an evaluator may look at."""

    request: TaskRequest
    session: Session
    calls: list[ModelCall]
    diff: bytes
    """The harness's changes since the base commit, as a binary-safe git patch."""
    final_message: str
    fresh_sandbox: Callable[[], AbstractAsyncContextManager[Sandbox]]
    """A new sandbox from the same image with the workspace at its base commit and no network."""
    left_sandbox: Callable[[], AbstractAsyncContextManager[Sandbox]] | None = None
    """A new sandbox with all files that the harness left in its container; None where its work is the diff."""
    diff_problem: str = ""
    """Why no diff could be taken, where the harness caused that; `diff` is empty then."""
    control: bool = False
    """Grade the workspace as it was before the harness ran (`diff` is empty), only to see whether the grader works."""
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a tool of an environment says to the agent."""

    text: str
    failed: bool


class Environment(Protocol):
    """A server on which a session acts through tools, and which belongs to one session."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools as MCP describes tools (`name`, `description`, `inputSchema`); none: the harness needs no MCP."""
        ...

    async def open(self) -> None:
        """Begin, before the sandbox is made. Raises `EvaluatorError`."""
        ...

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        """Return a tool's answer. May be cancelled."""
        ...

    async def close(self) -> None:
        """End. May be called twice, and without `open`."""
        ...


class Evaluator(Protocol):
    """A grader, made for one session.

    For a class with `needs_sandbox = True`, the gateway makes the fresh sandbox while the harness runs, if a place is
    free. A grader that runs its tests several times has the largest number as its attribute `runs`, and as many times
    the time. A grader with `judges_parts = True` has `blame.judge` grade its parts, each with a deadline, and has none
    itself. A grader whose `environment` is an `Environment` gives the harness the tools of that.
    """

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        """Return the grade of a session.

        Raises `EvaluatorError` when the grader is at fault. Raises `SuspectError` when the fault is the grader's only
        if grading fails without the harness's changes too.
        """
        ...


EVALUATORS: Makers[Evaluator] = Makers("evaluator", __name__)
