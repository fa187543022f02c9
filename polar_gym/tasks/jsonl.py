"""Tasks from a JSON-lines file in SWE-bench's field names, each with a workspace directory or an image."""

from __future__ import annotations

from polar_gym.tasks.rows import FileTasks

TASKS = FileTasks
