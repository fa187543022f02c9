"""Tasks from a JSON-lines file in SWE-bench's field names, each with a workspace directory or an image."""

from __future__ import annotations

from pathlib import Path

from polar_gym.tasks import Task
from polar_gym.tasks.rows import FileSelection, load_tasks


class JsonlOptions(FileSelection):
    path: Path
    """The file. `workspace` in its rows is relative to it."""


class JsonlTasks:
    Options = JsonlOptions

    def __init__(self, options: JsonlOptions) -> None:
        self._options = options

    def load(self) -> list[Task]:
        return load_tasks(self._options.path, self._options)


TASKS = JsonlTasks
