"""From the agent's diff to a grading sandbox that holds it: the one way in which evaluators do it."""

from __future__ import annotations

from collections.abc import Callable

from polar_gym.evaluators import EvaluationContext
from polar_gym.evaluators.patch import FileChange, file_changes
from polar_gym.runtimes import Sandbox
from polar_gym.runtimes.diff import apply_diff


async def carry(
    context: EvaluationContext, sandbox: Sandbox, protects: Callable[[FileChange], bool] | None = None
) -> str:
    """Apply the agent's diff, without the changes that `protects` names, to a fresh sandbox's workspace.

    Returns why that is not possible, which is the agent's doing; "" when it is done.
    """
    if context.diff_problem:
        return context.diff_problem
    context.progress.carried = bool(context.diff.strip())
    try:
        changes = [change for change in file_changes(context.diff) if protects is None or not protects(change)]
        diff = b"".join(change.section for change in changes)
        await apply_diff(sandbox, context.request.runtime.workspace.path, diff)
    except ValueError as error:
        return f"the agent's diff does not apply: {error}"
    return ""
