"""Loads tasks. A task is one row in SWE-bench's field names, or in NeMo Gym's form.

A task source is one module that defines `TASKS`: a class made from its validated `Options`, whose `load()` returns
tasks. The sources are `bundled` (with its files in `suite/`), `jsonl`, `parquet`, `huggingface` and `harbor`, which
reads directories instead of rows. The tools:

- `rows`: reads and checks rows, for all sources; `gym_rows` reads those of NeMo Gym;
- `confined`: keeps the files that a row names below allowed directories;
- `request`: makes a `TaskRequest` of a task.

The room uses workspaces, runtimes, registry and schema.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from pydantic_core import to_jsonable_python

from polar_gym.registry import Makers
from polar_gym.schema import Environment, InsidePath
from polar_gym.workspaces.requirements import check_requirement


class Audit(BaseModel):
    """How often a task rewards a wrong patch, as `polar-gym tasks audit` measures it."""

    rewarded: int = Field(ge=0)
    tried: int = Field(ge=0)
    accepted: list[str] = []
    """The wrong patches that were rewarded."""
    equivalent: list[str] = []
    """Variants of the solution that are not counted, because they did the same on the inputs that are named."""
    findings: list[str] = []
    """Where the sandbox tells the solution or the benchmark, and patches that were not graded: not in the figure."""

    @property
    def hackable(self) -> float | None:
        """Return the part of the wrong patches that were rewarded; None where none could be tried."""
        return self.rewarded / self.tried if self.tried else None


class Container(BaseModel):
    """What a task has whose whole container is the harness's, and not a repository in it: a task of Harbor."""

    model_config = ConfigDict(extra="forbid")

    tests: str
    """The directory of the verifier, whose `test.sh` decides."""
    solution: str | None = None
    """The directory of the reference solution, `solve.sh`; None: there is none."""
    environment: Environment = {}
    verifier_environment: Environment = {}
    solution_environment: Environment = {}
    agent_seconds: float | None = Field(default=None, gt=0)
    """How long the harness, or the reference solution, may work; None: as long as the config says."""
    verifier_seconds: float = Field(gt=0)
    limits: dict[str, float] = {}
    """Options of the runtime that the task sets, such as `memory_mb`; the config's own options win."""
    offline: list[Literal["agent", "verifier"]] = []
    """The phases that may not reach the network, whatever `runtime.network` says."""


class Task(BaseModel):
    """One task. The field names are SWE-bench's. Fields that this class does not have are kept and ignored."""

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
    """The path of the repository in the image; empty: `runtime.workspace.path`."""
    base_patch: str = ""
    """A git patch that the base commit has and the image's repository lacks: a planted bug."""
    hidden_files: list[str] = []
    """Tests in the image's repository that are removed before the harness runs. Only grading sees them."""
    test_command: str = ""
    """Run by `sh -c` in the workspace after the hidden tests are in place."""
    eval_script: str = ""
    """Instead of `test_command`: the script that swebench itself would run."""
    log_parser: str = "unittest"
    """The name of a parser, never an import path: a task is data, and data names no code of the gateway's machine."""
    eval_type: str = "pass_and_fail"
    twins: dict[str, dict[str, list[Annotated[list[int], Field(min_length=3, max_length=3)]]]] = {}
    """Places in the hidden tests at which the tests can be altered; made by `polar-gym tasks twins`."""
    version: str = ""
    python_requirements: list[Annotated[str, AfterValidator(check_requirement)]] = []
    """Packages of an index that the tests need, installed from wheels only."""
    gym_row: dict[str, Any] = {}
    """The row in NeMo Gym's form that this task is (`gym_rows`); empty: the task is a repository's."""
    audit: Audit | None = None
    container: Container | None = None
    place: str = ""
    """The place of the row, `file:line`, for error messages."""

    @field_validator("*")
    @classmethod
    def _is_json(cls, value: Any) -> Any:
        """Return the value. Raises `ValueError` where no file of episodes could hold it, such as half a surrogate."""
        try:
            orjson.dumps(value, default=to_jsonable_python)
        except TypeError as error:
            raise ValueError(f"{error}; correct it") from error
        return value

    @field_validator("log_parser")
    @classmethod
    def _no_code(cls, value: str) -> str:
        if ":" in value:
            raise ValueError("a task names no code; name a parser, or set evaluator.log_parser in the run's config")
        return value


class TaskSource(Protocol):
    """A place that tasks come from."""

    def load(self) -> list[Task]:
        """Return the selected tasks. Raises `ValueError` that names the file, the line and the wrong field."""
        ...


TASK_SOURCES: Makers[TaskSource] = Makers("tasks", __name__)
