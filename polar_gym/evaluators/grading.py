"""From the agent's diff to a grading sandbox that holds it: the one way in which evaluators do it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from polar_gym.evaluators import EvaluationContext
from polar_gym.evaluators.patch import FileChange, file_changes
from polar_gym.runtimes import Sandbox
from polar_gym.workspaces.diff import apply_diff


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
        diff, counted, not_counted = await asyncio.to_thread(_without_protected, context.diff, protects)
        context.progress.counted, context.progress.not_counted = counted, not_counted
        await apply_diff(sandbox, context.request.runtime.workspace.path, diff)
    except ValueError as error:
        return f"the agent's diff does not apply: {error}"
    return ""


def _without_protected(
    diff: bytes, protects: Callable[[FileChange], bool] | None
) -> tuple[bytes, list[str], list[str]]:
    """What is left of the diff, its paths, and the paths that are not in it any more."""
    sections: list[bytes] = []
    kept: list[str] = []
    dropped: list[str] = []
    for change in file_changes(diff):
        path = change.path.decode(errors="replace")
        if protects is not None and protects(change):
            dropped.append(path)
        else:
            kept.append(path)
            sections.append(change.section)
    return b"".join(sections), kept, dropped
