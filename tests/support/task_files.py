"""Task files, repositories and the requests of tasks, for tests."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from polar_gym.schema import EvaluatorSpec, HarnessSpec, PluginSpec, RuntimeSpec, TaskRequest
from polar_gym.tasks import TASK_SOURCES, Task
from polar_gym.tasks.request import instruction, with_task

ROW = {"instance_id": "a-1", "problem_statement": "It breaks.", "image": "python:3.11"}


def load(name: str, **options: object) -> list[Task]:
    spec = PluginSpec.model_validate({"name": name, **options})
    return TASK_SOURCES.get(name)(TASK_SOURCES.options(spec)).load()


def write(directory: Path, *rows: object) -> Path:
    path = directory / "tasks.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def git(repository: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=T", "-c", "user.email=t@localhost", "-C", str(repository), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def request_for(task: Task, **changes: Any) -> TaskRequest:
    """Return the request of a task with the defaults of a run that the tests do not depend on."""
    values = {
        "task_id": task.instance_id,
        "instruction": instruction(task),
        "agent": HarnessSpec(name="pi"),
        "runtime": RuntimeSpec(name="bubblewrap"),
        "evaluator": EvaluatorSpec(name="swe"),
        "timeout_seconds": 60,
    }
    return with_task(TaskRequest(**values | changes), task)
