"""Tasks from a Parquet file in SWE-bench's field names, as data sets are downloaded from a hub."""

from __future__ import annotations

from pathlib import Path

from pydantic import field_validator

from polar_gym.tasks import Task
from polar_gym.tasks.rows import FileSelection, load_tasks


class ParquetOptions(FileSelection):
    path: Path
    """The file. `workspace` in its rows is relative to it."""

    @field_validator("path")
    @classmethod
    def _is_parquet(cls, value: Path) -> Path:
        if value.suffix != ".parquet":
            raise ValueError("must end in .parquet; for JSON lines set tasks=jsonl")
        return value


class ParquetTasks:
    Options = ParquetOptions

    def __init__(self, options: ParquetOptions) -> None:
        self._options = options

    def load(self) -> list[Task]:
        return load_tasks(self._options.path, self._options)


TASKS = ParquetTasks
