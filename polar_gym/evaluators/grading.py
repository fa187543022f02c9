"""Carries the harness's diff into a grading sandbox. All evaluators use this one way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from polar_gym.evaluators import EvaluationContext, EvaluatorError
from polar_gym.evaluators.patch import FileChange, file_changes
from polar_gym.runtimes import Sandbox
from polar_gym.workspaces.diff import apply_diff


async def carry(
    context: EvaluationContext, sandbox: Sandbox, protects: Callable[[FileChange], bool] | None = None
) -> str:
    """Apply the harness's diff, without the changes that `protects` names, to a fresh sandbox's workspace.

    Return "" when the diff is applied, else the reason why it does not apply. The harness is at fault then.
    """
    if context.request.runtime.scope == "container":
        raise EvaluatorError("the work is a whole container, of which there is no diff: set evaluator=harbor")
    if context.diff_problem:
        return context.diff_problem
    context.progress.carried = bool(context.diff.strip())
    try:
        kept, dropped = await asyncio.to_thread(_without_protected, context.diff, protects)
        context.progress.counted, context.progress.not_counted = _names(kept), _names(dropped)
        diff = b"".join(change.section for change in kept)
        found = await apply_diff(sandbox, context.request.runtime.workspace.path, diff)
    except ValueError as error:
        return f"the harness's diff does not apply: {error}"
    if hidden := sorted(found - {change.path for change in kept}):
        names = ", ".join(path.decode(errors="replace") for path in hidden)
        return f"the harness's diff does not apply: it changes {names} in the section of another file"
    return ""


def _without_protected(
    diff: bytes, protects: Callable[[FileChange], bool] | None
) -> tuple[list[FileChange], list[FileChange]]:
    """Return the changes of the diff that count, and those that are dropped."""
    kept: list[FileChange] = []
    dropped: list[FileChange] = []
    for change in file_changes(diff):
        (dropped if protects is not None and protects(change) else kept).append(change)
    return kept, dropped


def _names(changes: Iterable[FileChange]) -> list[str]:
    return [change.path.decode(errors="replace") for change in changes]
