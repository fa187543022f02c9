"""Task files, repositories and the requests of tasks, for tests."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from polar_gym.schema import (
    Budget,
    BuilderSpec,
    EvaluatorSpec,
    HarnessSpec,
    PluginSpec,
    RuntimeSpec,
    Sampling,
    TaskRequest,
)
from polar_gym.tasks import TASK_SOURCES, Task
from polar_gym.tasks.request import to_request

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
        "harness": HarnessSpec(name="pi"),
        "runtime": RuntimeSpec(name="bubblewrap"),
        "evaluator": EvaluatorSpec(name="swe"),
        "builder": BuilderSpec(name="prefix_merging"),
        "num_samples": 1,
        "timeout_seconds": 60,
        "sampling": Sampling(),
        "budget": Budget(),
    }
    return to_request(task, **values | changes)
