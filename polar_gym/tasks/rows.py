"""Reads tasks in SWE-bench's field names: one loader for all task sources.

Rows of SWE-bench, SWE-bench Verified, SWE-Gym and SWE-smith differ in little. Test lists are lists or the JSON text of
a list. The image is `image`, `image_name` or `docker_image`, or follows from the instance's name. To be graded, a row
must say how its tests run (`test_command` or `eval_script`) and how their log is read (`log_parser`).
`polar-gym tasks prepare` adds these fields. Rows in NeMo Gym's form are read too (`gym_rows`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from polar_gym.durable import json_lines
from polar_gym.errors import how_to_install, said
from polar_gym.registry import Options
from polar_gym.runtimes.image_names import image_file
from polar_gym.tasks import Task
from polar_gym.tasks.confined import confined, confined_workspace
from polar_gym.tasks.gym_rows import is_gym_row, of_gym_row

_TEST_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
_FIELDS = {name.lower(): name for name in Task.model_fields}
IMAGE_NAMES = ("image", "image_name", "docker_image")
_DIRECTORIES = "move it below the task file, or set tasks.directories=[DIR]"
_SHOWN = 20
"""How many names or bad rows an error tells."""
_PLACEHOLDERS = {"instance_id": "", "docker_id": "", "gym_id": ""}

Form = Literal["auto", "swe_bench", "swe_gym", "swe_smith"]
"""The data set that rows come from."""
PlacedRow = tuple[str, dict[str, Any]]
"""The place of a row (`file:line`), and the row."""


class Selection(Options):
    """The part of a source's tasks that is wanted."""

    limit: int | None = Field(default=None, gt=0)
    """The maximum number of tasks, counted from the first."""
    instance_ids: list[str] = Field(default_factory=list)
    """Only these tasks; empty: all. A name that does not occur is an error."""
    max_hackable: float | None = Field(default=None, ge=0, le=1)
    """The largest part of wrong patches that a wanted task may reward, by its `audit`. A wanted task that rewards more,
    or has no figure, is an error. null: any."""


class FileSelection(Selection):
    """The wanted tasks of a data set from elsewhere, whose rows may lack fields that are the same in all rows."""

    image: str | None = None
    """The image of rows that name none. `{instance_id}` is the row's id. `{docker_id}` is the id in Docker Hub's form:
    in lower case, `_1776_` for `__`. `{gym_id}` is the id in SWE-Gym's form, which has `_s_` there."""
    directories: list[Path] = Field(default_factory=list)
    """Directories that workspaces and image files of rows may be in, besides the data set's directory."""

    @field_validator("image")
    @classmethod
    def _placeholders(cls, value: str | None) -> str | None:
        try:
            (value or "").format(**_PLACEHOLDERS)
        except (LookupError, ValueError) as error:
            raise ValueError(
                f"{value!r} may hold {{instance_id}}, {{docker_id}} and {{gym_id}}, not {error}"
            ) from error
        return value


class FileOptions(FileSelection):
    path: Path
    """The file. `workspace` in its rows is relative to the file's directory."""


class FileTasks:
    """A task source that reads one file."""

    Options = FileOptions

    def __init__(self, options: FileOptions) -> None:
        self._options = options

    def load(self) -> list[Task]:
        return load_tasks(self._options.path, self._options)


def load_tasks(path: Path, selection: Selection) -> list[Task]:
    """Return the selected tasks of a JSONL or Parquet file, in its order.

    Raises `ValueError` that names the file, the line and the field.
    """
    return select(str(path), read_rows(path), path.parent, selection)


def read_rows(path: Path) -> Iterator[PlacedRow]:
    """Return the rows of a JSONL or Parquet file, unchanged. Raises `ValueError` that names the file and the line."""
    return _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)


def select(source: str, rows: Iterable[PlacedRow], directory: Path | None, selection: Selection) -> list[Task]:
    """Return the selected tasks among `rows`. Raises `ValueError` with a line for each row that is no task.

    Workspaces are relative to `directory`; None: the data set has no directory.
    """
    chosen = selection if isinstance(selection, FileSelection) else FileSelection()
    tasks: dict[str, Task] = {}
    problems: list[str] = []
    try:
        for place, row in rows:
            try:
                task = to_task(place, row, directory, chosen)
            except ValueError as error:
                problems.append(str(error))
                continue
            if task.instance_id in tasks:
                twice = f"instance_id: {task.instance_id!r} occurs twice in this file; remove one of them"
                problems.append(f"{place}: {twice}")
            tasks[task.instance_id] = task
    except ValueError as error:  # no more rows can be read
        problems.append(str(error))
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        head = [f"{source}: {len(problems)} rows cannot be used"] if len(problems) > 1 else []
        raise ValueError("\n".join([*head, *problems[:_SHOWN], *more]))
    wanted = selection.instance_ids or list(tasks)
    unknown = [instance_id for instance_id in wanted if instance_id not in tasks]
    if unknown:
        raise ValueError(f"{source}: no task named {', '.join(unknown)}; known: {_some(list(tasks))}")
    among = set(wanted)
    chosen_tasks = [task for instance_id, task in tasks.items() if instance_id in among][: selection.limit]
    _refuse_hackable(source, chosen_tasks, selection.max_hackable)
    return chosen_tasks


def _refuse_hackable(source: str, tasks: Sequence[Task], limit: float | None) -> None:
    """Raise `ValueError` that names the tasks that reward more wrong patches than the limit."""
    if limit is None:
        return
    figures = {task.instance_id: task.audit and task.audit.hackable for task in tasks}
    refused = {name: figure for name, figure in figures.items() if figure is None or figure > limit}
    if refused:
        told = [f"{name} ({'no figure' if figure is None else f'{figure:.3f}'})" for name, figure in refused.items()]
        raise ValueError(
            f"{source}: tasks.max_hackable={limit:g}: {len(refused)} of {len(tasks)} tasks reward more wrong patches "
            f"or have no figure: {_some(told)}; measure with: polar-gym tasks audit FILE --out FILE; leave "
            "tasks out with tasks.instance_ids, or give them better tests"
        )


def _json_rows(path: Path) -> Iterator[PlacedRow]:
    try:
        with path.open("rb") as lines:
            yield from json_lines(lines, path, loads=json.loads)  # a data set may hold NaN, which orjson refuses
    except OSError as error:
        raise ValueError(f"{path}: cannot read the task file: {error.strerror}") from error


def _parquet_rows(path: Path) -> Iterator[PlacedRow]:
    """Yield every row. Numbers count from 1, as lines do."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ValueError(
            f"{path}: reading Parquet needs pyarrow; install it with: {how_to_install('export')}"
        ) from error
    try:
        with pq.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(batch_size=64) for row in batch.to_pylist())
            yield from ((f"{path}:{number}", row) for number, row in enumerate(rows, start=1))
    except OSError as error:
        raise ValueError(f"{path}: cannot read the task file: {error.strerror or error}") from error
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from error


def to_task(place: str, row: dict[str, Any], directory: Path | None, selection: FileSelection) -> Task:
    """Return the task in a row. Raises `ValueError` that names the place and the field."""
    if is_gym_row(row):
        row = of_gym_row(place, row)
    row = {name: value for name, value in row.items() if value is not None or name in _TEST_LISTS}
    for name in sorted(row.keys() - Task.model_fields.keys()):
        if (field := _FIELDS.get(name.lower(), name)) not in row:
            raise ValueError(
                f"{place}: {name}: unknown key, which would be ignored; rename it to {field}, or remove it"
            )
    lists = {name: test_ids(place, name, row[name]) for name in _TEST_LISTS if name in row}
    try:
        task = Task.model_validate({**row, **lists})
    except ValidationError as error:
        problems = (_problem(problem) for problem in error.errors())
        raise ValueError(f"{place}: {'; '.join(problems)}") from error
    for name in ("instance_id", "problem_statement"):
        if not getattr(task, name).strip():
            raise ValueError(f"{place}: {name}: must not be empty")
    if ".." in task.instance_id.split("/"):
        raise ValueError(f"{place}: instance_id: {task.instance_id!r} has a part '..'; image files are named by it")
    directories = [*([directory] if directory is not None else []), *selection.directories]
    image = _own_image(place, row, directories) or derived_image(selection.image, task.instance_id)
    workspace = _workspace(place, task, directory, directories, image)
    _check_container(place, task, directories)
    return task.model_copy(update={"workspace": workspace, "image": image, "place": place})


def _problem(problem: Any) -> str:
    place = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{place}: {problem['msg']}; every row needs it"
    return f"{place}: {said(problem)}, got {_short(problem['input'])}"


def _own_image(place: str, row: dict[str, Any], directories: Sequence[Path]) -> str | None:
    """Return the image that the row names. Raises `ValueError` if that is a file outside of the directories."""
    name = next((name for name in IMAGE_NAMES if row.get(name)), None)
    if name is None:
        return None
    try:
        if (file := image_file(str(row[name]))) is not None:
            confined(file, directories)
    except ValueError as error:
        raise ValueError(f"{place}: {name}: {_short(row[name])}: {error}; {_DIRECTORIES}") from error
    return row[name]


def derived_image(image: str | None, instance_id: str) -> str | None:
    """Fill this instance's ids into the template `FileSelection.image`."""
    docker_id, gym_id = (instance_id.lower().replace("__", between) for between in ("_1776_", "_s_"))
    return image.format(instance_id=instance_id, docker_id=docker_id, gym_id=gym_id) if image else None


def test_ids(place: str, name: str, value: Any) -> list[str]:
    """Return test ids as a list; SWE-bench's files hold the JSON text of a list."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}: {name}: not the JSON text of a list: {error}, got {_short(value)}") from error
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(test, str) for test in value):
        raise ValueError(f"{place}: {name}: expected a list of test ids, got {_short(value)}")
    return list(value)


def _workspace(
    place: str, task: Task, directory: Path | None, directories: Sequence[Path], image: str | None
) -> str | None:
    if task.workspace is None:
        if image is None and not task.gym_row:
            raise ValueError(
                f"{place}: workspace, image: a task needs at least one of them, got neither; add one to the row, or "
                "for a data set whose images follow from the instances' names set tasks.image, "
                "e.g. tasks.image='REPOSITORY/sweb.eval.x86_64.{docker_id}:latest'"
            )
        return None
    if task.base_patch or task.hidden_files:
        raise ValueError(f"{place}: base_patch, hidden_files: are for images; a task with a workspace cannot have them")
    workspace = (directory or Path("/")) / task.workspace
    try:
        workspace = confined_workspace(workspace, directories)
    except ValueError as error:
        raise ValueError(f"{place}: workspace: {_short(task.workspace)}: {error}; {_DIRECTORIES}") from error
    if not workspace.is_dir():
        raise ValueError(f"{place}: workspace: {workspace} is not a directory; it is relative to the task file")
    return str(workspace)


def _check_container(place: str, task: Task, directories: Sequence[Path]) -> None:
    """Raise `ValueError` where tests or solution of the row's container are outside of the directories."""
    named = task.container.model_dump(include={"tests", "solution"}) if task.container else {}
    for name, path in named.items():
        try:
            if path is not None:
                confined(Path(path), directories)
        except ValueError as error:
            raise ValueError(f"{place}: container.{name}: {_short(path)}: {error}; {_DIRECTORIES}") from error


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else repr(str(value))
    return text if len(text) <= 80 else f"{text[:77]}...'"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
