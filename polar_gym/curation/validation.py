"""Validates a task: its reference solution must resolve it, and a change that does nothing must not."""

from __future__ import annotations

from dataclasses import dataclass

from polar_gym.curation import CurationError
from polar_gym.curation.bench import Bench
from polar_gym.curation.oracle import grade_container
from polar_gym.curation.solution import as_harness_diff, unresolved
from polar_gym.evaluators import EvaluatorError
from polar_gym.evaluators.parsers import PASSED
from polar_gym.runtimes import SandboxError
from polar_gym.schema import EvaluationResult
from polar_gym.tasks import Task
from polar_gym.tasks.request import UngradableError
from polar_gym.workspaces.repository import WorkspaceError
from polar_gym.workspaces.venv import VenvError

NO_OP = b"""\
diff --git a/polar-gym-no-op.txt b/polar-gym-no-op.txt
new file mode 100644
--- /dev/null
+++ b/polar-gym-no-op.txt
@@ -0,0 +1 @@
+This file changes nothing.
"""
"""A change that does nothing. Unlike an empty diff, which gets the reward 0 without a run, this change is graded."""


GRADING_ERRORS = (EvaluatorError, SandboxError, UngradableError, VenvError, WorkspaceError, TimeoutError)
"""What grading a task raises where the task or the machine is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of validating one task."""

    task: Task
    gold: EvaluationResult | None = None
    no_op: EvaluationResult | None = None
    problem: str = ""
    """Why the task is not valid; empty: the task is valid."""

    @property
    def tried(self) -> bool:
        """Return whether both patches were graded: else the problem may be the machine's, and not the task's."""
        return self.gold is not None and self.no_op is not None


async def validate(task: Task, bench: Bench) -> Verdict:
    """Grade the reference solution and the change that does nothing."""
    if task.container is not None:
        return await _validate_container(task, bench)
    if not task.patch.strip():
        return Verdict(task=task, problem="patch: is empty, so there is no reference solution to try")
    try:
        carried = await as_harness_diff(task, bench)
        gold = await bench.evaluate(task, carried.patch.encode())
        no_op = await bench.evaluate(task, NO_OP)
    except (CurationError, *GRADING_ERRORS) as error:
        return Verdict(task=task, problem=str(error) or "timed out")
    return Verdict(task=task, gold=gold, no_op=no_op, problem=_problem(task, carried, gold, no_op))


async def _validate_container(task: Task, bench: Bench) -> Verdict:
    try:
        gold = await grade_container(task, bench, solve=True) if task.container and task.container.solution else None
        no_op = await grade_container(task, bench, solve=False)
    except GRADING_ERRORS as error:
        return Verdict(task=task, problem=str(error) or "timed out")
    if gold is None:
        return Verdict(task=task, no_op=no_op, problem="solution/solve.sh: is missing, so there is nothing to try")
    return Verdict(task=task, gold=gold, no_op=no_op, problem=_problem(task, task, gold, no_op))


def _problem(task: Task, carried: Task, gold: EvaluationResult, no_op: EvaluationResult) -> str:
    if not gold.resolved:
        return unresolved(task, carried, gold)
    if no_op.resolved:
        return "doing nothing resolves it"
    wrong = [test for test in task.FAIL_TO_PASS if no_op.tests.get(test) == PASSED]
    wrong += [test for test in task.PASS_TO_PASS if no_op.tests.get(test) != PASSED]
    return f"{len(wrong)} tests are in the wrong list, e.g. {wrong[0]}" if wrong else ""
