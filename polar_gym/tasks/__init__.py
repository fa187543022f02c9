"""Where tasks come from.

A task is a row in SWE-bench's field names. Each plug-in module here defines one class `TASKS`, made from its validated
options, whose `load()` returns tasks.
"""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, field_validator

from polar_gym.registry import Makers
from polar_gym.schema import InsidePath
from polar_gym.workspaces.requirements import check_requirement


class Task(BaseModel):
    """One SWE task. Field names are SWE-bench's; fields that it does not have are kept and ignored."""

    model_config = ConfigDict(extra="allow")

    instance_id: str
    problem_statement: str
    repo: str = ""
    base_commit: str = ""
    patch: str = ""
    """The reference solution, a git patch."""
    test_patch: str = ""
    """Hidden tests, a git patch; applied only where the grading happens."""
    FAIL_TO_PASS: list[str] = []
    PASS_TO_PASS: list[str] = []
    image: str | None = None
    workspace: str | None = None
    """A directory with the repository at its base commit, relative to the task file."""
    workspace_path: InsidePath | Literal[""] = ""
    """Where the image has the repository; empty: where `runtime.workspace.path` says."""
    base_patch: str = ""
    """A git patch that the base commit has and the image's repository lacks: a planted bug."""
    hidden_files: list[str] = []
    """Files of the image's repository that only grading has: tests that the image shows."""
    test_command: str = ""
    """Run by `sh -c` in the workspace after the hidden tests are in place."""
    eval_script: str = ""
    """Instead of `test_command`: the script that swebench itself would run."""
    log_parser: str = "unittest"
    """A parser by its name. No import path: a task is data, and data names no code of the gateway's machine."""
    eval_type: str = "pass_and_fail"
    version: str = ""
    python_requirements: list[Annotated[str, AfterValidator(check_requirement)]] = []
    """Packages of an index that the tests need, installed from wheels only."""
    place: str = ""
    """Where the row is, `file:line`, for errors."""

    @field_validator("log_parser")
    @classmethod
    def _no_code(cls, value: str) -> str:
        if ":" in value:
            raise ValueError("a task names no code; name a parser, or set evaluator.log_parser in the run's config")
        return value


class TaskSource(Protocol):
    def load(self) -> list[Task]:
        """Raises `ValueError` naming the file, the line and the field that is wrong."""
        ...


TASK_SOURCES: Makers[TaskSource] = Makers("tasks", __name__)
