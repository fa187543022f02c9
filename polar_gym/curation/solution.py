"""Writes a task's reference solution as the diffs of harnesses are written."""

from __future__ import annotations

from contextlib import suppress

from polar_gym.curation.bench import Bench
from polar_gym.evaluators import EvaluatorError, hidden_tests
from polar_gym.evaluators.patch import file_changes
from polar_gym.tasks import Task


async def without_renames(task: Task, bench: Bench) -> Task:
    """Return the task with a reference solution that removes and makes the files that it renames or copies.

    Graders take only such patches. Raises what `Bench.sandbox` raises, and `EvaluatorError` where the patch does not
    apply.
    """
    with suppress(ValueError):
        file_changes(task.patch.encode())
        return task
    async with bench.sandbox(task) as sandbox:
        changes = await hidden_tests.place(sandbox, task.patch, apply=False, field="patch")
    try:
        patch = b"".join(change.section for change in changes).decode()
    except UnicodeDecodeError as error:
        raise EvaluatorError("patch: renames a file that is not UTF-8; leave this task out") from error
    return task.model_copy(update={"patch": patch})
