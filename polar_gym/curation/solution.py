"""Writes a task's reference solution as the diff of a harness that made the same changes."""

from __future__ import annotations

import re

from polar_gym.curation import CurationError
from polar_gym.curation.bench import Bench
from polar_gym.evaluators.patch import unquoted
from polar_gym.schema import EvaluationResult
from polar_gym.tasks import Task
from polar_gym.workspaces.diff import UnreadableWorkspaceError, apply_diff, snapshot_diff

_CHANGED = re.compile(rb'^diff --git "?a/.* ("?b/.*)$', re.MULTILINE)


async def as_harness_diff(task: Task, bench: Bench) -> Task:
    """Return the task with its reference solution as a harness's diff: without renames, and without ignored files.

    Raises `CurationError` where the patch does not apply or is not UTF-8, and what `Bench.context` and `Bench.sandbox`
    raise.
    """
    workspace = bench.context(task, b"").request.runtime.workspace.path
    async with bench.sandbox(task) as sandbox:
        base = await bench.base(task, sandbox)
        try:
            await apply_diff(sandbox, workspace, task.patch.encode())
            patch = (await snapshot_diff(sandbox, workspace, base)).decode()
        except (ValueError, UnreadableWorkspaceError) as error:
            raise CurationError(f"patch: {error}; correct it, or leave this task out") from error
    return task.model_copy(update={"patch": patch})


def unresolved(task: Task, carried: Task, gold: EvaluationResult) -> str:
    """Return why a task is not valid whose reference solution was graded as `as_harness_diff` wrote it in `carried`."""
    lost = sorted(_changed(task.patch) - _changed(carried.patch))
    why = "; no harness's diff carries these files of its patch, because .gitignore names them or Python writes them: "
    return f"the reference solution does not resolve it: {gold.detail}{why if lost else ''}{', '.join(lost[:5])}"


def _changed(patch: str) -> set[str]:
    return {unquoted(name).decode(errors="replace").removeprefix("b/") for name in _CHANGED.findall(patch.encode())}
