"""`polar-gym tasks from-git | from-pypi | prepare | validate | twins | audit`: make tasks, and prove their worth."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import orjson
import typer
from rich.text import Text

from polar_gym.cli.from_git import from_git
from polar_gym.cli.grading import grading_config
from polar_gym.config.run_config import RunConfig
from polar_gym.console import console, errors, table
from polar_gym.curation import CurationError
from polar_gym.curation.audit import audit
from polar_gym.curation.bench import Bench
from polar_gym.curation.prepare import prepare, read_overrides
from polar_gym.curation.twins import with_twins
from polar_gym.curation.validation import GRADING_ERRORS, Verdict, validate
from polar_gym.durable import write
from polar_gym.errors import ConfigError, how_to_install, kind_of
from polar_gym.evaluators.twins import weak_tests
from polar_gym.paths import cache_dir, check_writable
from polar_gym.tasks import Audit, Task
from polar_gym.tasks.harbor import HarborOptions, HarborTasks, read_directories
from polar_gym.tasks.rows import FileOptions, FileSelection, FileTasks, Form, read_rows

app = typer.Typer(no_args_is_help=True)
T = TypeVar("T")

TaskFile = Annotated[Path, typer.Argument(help="Tasks: JSONL or Parquet in SWE-bench's field names.")]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Where and how the tests run, e.g. runtime=docker.")
]
Out = Annotated[
    Path | None,
    typer.Option(help="The JSONL file to write rows to; results that it has stay until new ones come. Default: FILE."),
]


@app.callback()
def tasks() -> None:
    """Make tasks, and prove that they mean what they say."""


@app.command()
def from_pypi(
    package: Annotated[str, typer.Argument(help="A pure-Python package.")],
    old: Annotated[str, typer.Argument(help="The release that is the workspace.")],
    new: Annotated[str, typer.Argument(help="The release whose changes are the task.")],
    settings: Settings = None,
    out: Annotated[Path, typer.Option(help="The JSONL file to add the task to.")] = Path("tasks/pypi.jsonl"),
    require: Annotated[
        list[str] | None, typer.Option(help="A package that the tests need and that the metadata does not name.")
    ] = None,
) -> None:
    """Make a task from two releases: validated, then added to a JSONL file."""
    try:
        from polar_gym.curation.from_pypi import Release, from_releases
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing; install it with: {how_to_install('swe')}") from error

    config = grading_config(settings)
    check_writable("--out", out)
    release = Release(package=package, old=old, new=new, extra_requirements=require or ())

    async def run() -> None:
        async with Bench(config.runtime, cache_dir(), config.evaluator) as bench:
            task = await from_releases(release, bench, out, lambda text: errors.print(Text(text, "dim")))
        counts = f"{len(task.FAIL_TO_PASS)} FAIL_TO_PASS, {len(task.PASS_TO_PASS)} PASS_TO_PASS"
        console.print(f"{task.instance_id}: {counts}, in {out}", soft_wrap=True)

    asyncio.run(run())


app.command()(from_git)


@app.command("prepare")
def prepare_rows(
    file: Annotated[Path, typer.Argument(help="Rows of SWE-bench, SWE-Gym or SWE-smith: JSONL or Parquet.")],
    out: Annotated[Path, typer.Option(help="The JSONL file to write.")],
    form: Annotated[
        Form,
        typer.Option(
            metavar="FORM", help="Whose rows they are: swe_bench, swe_gym, swe_smith; auto: each by its repository."
        ),
    ] = "auto",
    overrides: Annotated[
        Path | None,
        typer.Option(help="YAML: OWNER/NAME: {test_command: 'pytest -rA {files}', log_parser: pytest}."),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Instead of the published images, e.g. 'mirror/{docker_id}:latest'.")
    ] = None,
    skip: Annotated[bool, typer.Option("--skip", help="Leave out rows that cannot be prepared.")] = False,
) -> None:
    """Add to rows of other data sets how they are graded: script, log parser, image, solution.

    When a row cannot be prepared, nothing is written, and the exit code is 2.
    """
    _check_form(out)
    check_writable("--out", out)
    try:
        template = FileSelection(image=image).image
        prepared = prepare(file, form, read_overrides(overrides) if overrides else {}, cache_dir(), template)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for problem in prepared.problems:
        errors.print(Text(problem, "red"), soft_wrap=True)
    if not prepared.rows and not prepared.problems:
        raise ConfigError(f"{file}: it holds no row")
    _check_beside(file, out, prepared.rows)
    if prepared.problems and not skip:
        raise ConfigError(
            f"{len(prepared.problems)} rows cannot be prepared; nothing is written; --skip leaves them out"
        )
    try:
        write(out, b"".join(orjson.dumps(row) + b"\n" for row in prepared.rows))
    except OSError as error:
        raise kind_of(error)(f"--out={out}: {error.strerror}") from error
    left = f", {len(prepared.problems)} left out" if prepared.problems else ""
    console.print(f"{len(prepared.rows)} tasks in {out}{left}; now: polar-gym tasks validate {out}", soft_wrap=True)


@app.command("validate")
def validate_tasks(
    file: Annotated[
        Path, typer.Argument(help="Tasks: JSONL or Parquet in SWE-bench's field names, or a directory of Harbor's.")
    ],
    settings: Settings = None,
) -> None:
    """Grade every task's reference solution (must resolve) and a change that does nothing (must not).

    Exit code 1 when a task is not valid.
    """
    config = grading_config(settings, file)
    if not file.is_dir():
        _conclude(_of_each(_loaded(config), config, validate), config)
        return
    options = HarborOptions.model_validate(config.tasks.options)
    try:
        rows, bad = read_directories(options)
        for problem in bad:
            errors.print(Text(problem, "red"), soft_wrap=True)
        tasks = HarborTasks(options).chosen(rows)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _conclude(_of_each(tasks, config, validate), config)
    if bad:
        raise typer.Exit(1)


@app.command("twins")
def twin_tasks(file: TaskFile, settings: Settings = None, out: Out = None) -> None:
    """Find where each task's hidden tests can be altered, so that forged results are noticed: the row's field `twins`.

    The reference solution must resolve the task with twins, too. Exit code 1 when one does not.
    """
    loaded, config = _to_be_written(file, settings, out)
    earlier = _earlier(file, out)

    async def twins(task: Task, bench: Bench) -> Verdict:
        verdict = await with_twins(task, bench)
        if verdict.tried:
            earlier["twins"][task.instance_id] = verdict.task.twins
        _write_rows(file, out, "twins", earlier)  # now, because the search for many tasks takes hours
        console.print(f"{task.instance_id}: {twin_summary(verdict.task)}", soft_wrap=True)
        return verdict

    _conclude(_of_each(loaded, config, twins), config)


def twin_summary(task: Task) -> str:
    tests = [places for file in task.twins.values() for places in file.values()]
    weak = weak_tests(task.twins, task.FAIL_TO_PASS)
    trust = f"low: {len(weak)} tests hide too few bits, as {weak[0]}" if weak else "high"
    return f"{len(tests)} tests can be altered at {sum(map(len, tests))} places; trust: {trust}"


@app.command("audit")
def audit_tasks(file: TaskFile, settings: Settings = None, out: Out = None) -> None:
    """Measure how often each task rewards a wrong patch: rewarded / tried, in the row's field `audit`.

    Exit code 1 when a task cannot be audited.
    """
    loaded, config = _to_be_written(file, settings, out)
    earlier = _earlier(file, out)

    async def audited(task: Task, bench: Bench) -> bool:
        head = f"{loaded.index(task) + 1}/{len(loaded)} {task.instance_id}: "
        try:
            with errors.status("") as status:
                found = await audit(task, bench, lambda text: status.update(Text(f"{head}{text}")))
        except (CurationError, *GRADING_ERRORS) as error:
            problem = f"{task.instance_id}: cannot be audited: {error or 'timed out'}"
            errors.print(Text(problem, "red"), soft_wrap=True)
            return False
        print_audit(task.instance_id, found)
        earlier["audit"][task.instance_id] = found.model_dump()
        _write_rows(file, out, "audit", earlier)  # now, because an audit of many tasks takes hours
        return True

    if not all(_of_each(loaded, config, audited)):
        raise typer.Exit(1)


def _of_each(tasks: Sequence[Task], config: RunConfig, work: Callable[[Task, Bench], Awaitable[T]]) -> list[T]:
    """Return the results of some work on each task, in sandboxes of the config's runtime."""

    async def run() -> list[T]:
        async with Bench(config.runtime, cache_dir(), config.evaluator) as bench:
            # One after another, so that a slow machine does not make fast tests time out.
            return [await work(task, bench) for task in tasks]

    return asyncio.run(run())


def print_audit(name: str, audit: Audit) -> None:
    """Print a line with the figure, and below it a line for each patch that was rewarded and for each finding."""
    figure = f"{audit.rewarded}/{audit.tried} wrong patches rewarded, {len(audit.equivalent)} equivalent"
    console.print(Text.assemble((f"{name}: ", "bold"), figure), soft_wrap=True)
    kinds = {"rewarded": audit.accepted, "equivalent": audit.equivalent, "finding": audit.findings}
    for kind, lines in kinds.items():
        for line in lines:
            console.print(Text(f"  {kind}: {line}"), soft_wrap=True)


def _loaded(config: RunConfig) -> list[Task]:
    """Return the tasks of the config's file. Raises `ConfigError`."""
    options = FileOptions.model_validate(config.tasks.options)
    try:
        loaded = FileTasks(options).load()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not loaded:
        raise ConfigError(f"{options.path}: it holds no task")
    return loaded


def _to_be_written(file: Path, settings: list[str] | None, out: Path | None) -> tuple[list[Task], RunConfig]:
    """Return the tasks of a file whose rows get a new field, and the config of the work. Raises `ConfigError`."""
    if file.is_dir():
        raise ConfigError(f"{file}: is a directory; name a file of rows")
    config = grading_config(settings, file)
    tasks = _loaded(config)
    for task in tasks:
        if task.gym_row:
            raise ConfigError(
                f"{task.place}: responses_create_params: a row in NeMo Gym's form has no tests of its own, because its "
                "environment's server grades it; leave it out"
            )
    _check_out(file, out)
    return tasks, config


def _check_out(file: Path, out: Path | None) -> None:
    """Raise `ConfigError` where rows cannot be written to `out`; None: to `file`."""
    if out is None and file.suffix == ".parquet":
        raise ConfigError(f"{file}: rows are written as JSONL; set --out FILE.jsonl")
    if out is not None:
        _check_beside(file, out, (row for _, row in read_rows(file)))
    _check_form(out or file)
    check_writable("--out", out or file)


def _check_beside(file: Path, out: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` where rows whose workspaces are relative to `file` would be written elsewhere."""
    if out.parent.resolve() == file.parent.resolve():
        return
    if any(row.get("workspace") and not Path(row["workspace"]).is_absolute() for row in rows):
        raise ConfigError(f"--out={out}: must be beside {file}, because workspaces are relative to the task file")


def _check_form(out: Path) -> None:
    if out.suffix == ".parquet":
        raise ConfigError(f"--out={out}: rows are written as JSONL; name it FILE.jsonl")


_ADDED = ("audit", "twins")
"""The fields that `tasks audit` and `tasks twins` add."""


def _earlier(file: Path, out: Path | None) -> dict[str, dict[str, Any]]:
    """Return the added fields -> instance id -> the value, of the rows that an earlier run of either command wrote to
    `out`, as far as they are otherwise those of `file`: a figure is that of one task.

    Raises `ConfigError` where `out` cannot be read, or has rows that `file` lacks: it would be replaced.
    """
    try:
        rows = [row for _, row in read_rows(out)] if out is not None and out.exists() else []
    except ValueError as error:
        raise ConfigError(f"--out={out}: holds no rows: {error}; remove it, or name another file") from error
    own = {row["instance_id"]: _without_added(row) for _, row in read_rows(file)}
    if others := [row.get("instance_id") for row in rows if row.get("instance_id") not in own]:
        raise ConfigError(f"--out={out}: has rows that {file} lacks, such as {others[0]!r}; name another file")
    same = [row for row in rows if _without_added(row) == own[row["instance_id"]]]
    return {field: {row["instance_id"]: row[field] for row in same if row.get(field) is not None} for field in _ADDED}


def _without_added(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rest of a row as JSON gives it back: Parquet has other types, and NaN comes back as null."""
    return orjson.loads(orjson.dumps({name: value for name, value in row.items() if name not in _ADDED}))


def _write_rows(file: Path, out: Path | None, field: str, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the rows of `file` with new values of a field, and of other fields where a row has none. `values`: field ->
    instance id -> value."""
    rows = [row for _, row in read_rows(file)]
    for row in rows:
        known = {name: of[row["instance_id"]] for name, of in values.items() if row["instance_id"] in of}
        row |= {name: value for name, value in known.items() if name == field or row.get(name) is None}
    write(out or file, b"".join(orjson.dumps(row) + b"\n" for row in rows))


def _conclude(verdicts: Sequence[Verdict], config: RunConfig) -> None:
    """Print each task's grades of its solution and of doing nothing. Exit with 1 where a task is not valid."""
    valid = sum(not verdict.problem for verdict in verdicts)
    grades = table(
        f"{valid} of {len(verdicts)} tasks valid in {config.runtime.name}", "task", "F2P", "P2P", "gold", "no-op"
    )
    grades.add_column("problem", overflow="fold")
    for verdict in verdicts:
        worth = ["" if each is None else f"{each.reward:.3g}" for each in (verdict.gold, verdict.no_op)]
        counts = [str(len(verdict.task.FAIL_TO_PASS)), str(len(verdict.task.PASS_TO_PASS))]
        grades.add_row(verdict.task.instance_id, *counts, *worth, Text(verdict.problem, "red"))
    console.print(grades)
    if valid < len(verdicts):
        raise typer.Exit(1)
