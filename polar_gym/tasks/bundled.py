"""The tasks that ship with the package: small Python libraries with one real bug each.

They need only a Python interpreter, so that the whole machinery can be tried on any machine in seconds. They are far
too few and too easy to train or to compare models on.
"""

from __future__ import annotations

from pathlib import Path

from polar_gym.tasks import Task
from polar_gym.tasks.rows import Selection, load_tasks

SUITE = Path(__file__).parent / "suite" / "tasks.jsonl"


class BundledTasks:
    Options = Selection

    def __init__(self, options: Selection) -> None:
        self._options = options

    def load(self) -> list[Task]:
        return load_tasks(SUITE, self._options)


TASKS = BundledTasks
