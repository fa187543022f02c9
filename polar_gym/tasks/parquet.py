"""Tasks from a Parquet file in SWE-bench's field names, as data sets are downloaded from a hub."""

from __future__ import annotations

from pathlib import Path

from pydantic import field_validator

from polar_gym.tasks.rows import FileOptions, FileTasks


class ParquetOptions(FileOptions):
    @field_validator("path")
    @classmethod
    def _is_parquet(cls, value: Path) -> Path:
        if value.suffix != ".parquet":
            raise ValueError("must end in .parquet; for JSON lines set tasks=jsonl")
        return value


class ParquetTasks(FileTasks):
    Options = ParquetOptions


TASKS = ParquetTasks
