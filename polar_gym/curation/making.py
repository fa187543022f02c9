"""Makes a task out of the sources before and after a change.

The sources before the change are the workspace. The changed files of packages are the reference solution, and the
changed tests are the hidden tests. The tests run three times before and three times after the change. A test whose
result differs between runs is in no list. Foreign code runs in a sandbox only.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar_gym.curation import CurationError
from polar_gym.curation.bench import Bench
from polar_gym.curation.leaks import NOT_SEARCHED, leaks
from polar_gym.curation.releases import Comparison, compare
from polar_gym.curation.twins import with_twins
from polar_gym.curation.validation import validate
from polar_gym.durable import json_lines, remove_tree
from polar_gym.errors import ConfigError
from polar_gym.evaluators.parsers import PASSED, get_parser
from polar_gym.evaluators.result import full_log
from polar_gym.runtimes import Command
from polar_gym.tasks import Task
from polar_gym.workspaces.diff import apply_diff

RUNS = 3
"""How often the tests run before and after the change: only results that are the same every time count."""

PYTEST_COMMAND = "python -P -m pytest -rA --color=no -p no:cacheprovider --continue-on-collection-errors -o addopts="
"""Without the package's own options: they ask for coverage, linters and parallel runs."""

TEST_SECONDS = 600.0
UNSTABLE = "UNSTABLE"

_ERROR = re.compile(
    r"^(?:FAILED|ERROR) (\S+) - (?!Assert|assert|Failed)(\w+(?:Error|Exception|Warning)\b.*)$", re.MULTILINE
)
"""Matches the error of a test that did not fail by an assertion: the error that a user would see, without an expected
value."""

Say = Callable[[str], None]
Instruct = Callable[[Comparison, Mapping[str, str]], Awaitable[tuple[str, str]]]
"""(the change, id of each test of FAIL_TO_PASS -> the error that it ends with today, or "") -> the problem statement
and the name of its source."""


class UntriedError(CurationError):
    """The task was not graded: the fault may be the machine's, and not the task's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """The sources before and after a change."""

    instance_id: str
    repo: str
    """The repository, in the form `owner/name`."""
    old: Path
    new: Path
    needs: Callable[[], Mapping[str, Any]]
    """Returns `python_requirements`, what the tests need, and may return more fields of the row. Blocks."""
    instruct: Instruct


async def make_task(trees: Trees, bench: Bench, out: Path, say: Say, *, refuse_leaks: bool) -> Task:
    """Make the task, validate it, and add it to the JSONL file `out`, with its workspace in `repos/` beside the file.

    A task that is not valid is not written. Raises `CurationError`, and what grading raises.
    """
    comparison = await asyncio.to_thread(compare, trees.old, trees.new)
    say("resolving what the tests need")
    task = _task(trees, comparison, await asyncio.to_thread(trees.needs))
    say("running the tests before and after the change")
    lists, failing = await _lists(task, bench)
    say("writing the instruction")
    issue, source = await trees.instruct(comparison, failing)
    task = Task.model_validate(
        {**task.model_dump(), **lists, "problem_statement": issue, "problem_statement_source": source}
    )
    say("validating the task as a rollout would grade it")
    verdict = await validate(task, bench)
    if verdict.problem:
        kind = CurationError if verdict.tried else UntriedError
        raise kind(f"{trees.instance_id}: not valid: {verdict.problem}")
    if refuse_leaks:
        say("looking for the solution in the sandbox")
        if (found := await leaks(task, bench)) not in ([], [NOT_SEARCHED]):
            raise CurationError(f"{trees.instance_id}: {'; '.join(found)}")
        task = task.model_copy(update={"leaks": found} if found else {})
    say("finding where its tests can be altered")
    twinned = await with_twins(task, bench)
    if twinned.problem:
        say(f"no twins: {twinned.problem}")
    return await asyncio.to_thread(_write, twinned.task, trees.old, out)


def _task(trees: Trees, comparison: Comparison, needs: Mapping[str, Any]) -> Task:
    roots = " ".join(dict.fromkeys([*comparison.import_roots, "."]))
    files = " ".join(map(shlex.quote, comparison.test_modules))
    row = {
        "instance_id": trees.instance_id,
        "problem_statement": "to be written",
        "repo": trees.repo,
        "base_commit": comparison.base_commit,
        "patch": comparison.patch,
        "test_patch": comparison.test_patch,
        "workspace": str(trees.old),
        "test_command": f"{PYTEST_COMMAND} -o 'pythonpath={roots}' {files}",
        "log_parser": "pytest",
    }
    return Task.model_validate({**row, **needs})


async def _lists(task: Task, bench: Bench) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return FAIL_TO_PASS and PASS_TO_PASS, and the error of each test of FAIL_TO_PASS before the change.

    Only tests whose result was the same in all runs are in the lists.
    """
    parse, logs, after = get_parser(task.log_parser), list[str](), list[dict[str, str]]()
    fail_to_pass, pass_to_pass = list[str](), list[str]()
    for _ in range(RUNS):
        logs.append(await _run(task, bench, ""))
        after.append(parse(await _run(task, bench, task.patch)))
        fail_to_pass, pass_to_pass = sort_tests([parse(log) for log in logs], after)
        if not fail_to_pass:
            raise CurationError(f"{task.instance_id}: no test fails before the change and passes after it")
    errors = dict(_ERROR.findall(logs[0]))
    lists = {"FAIL_TO_PASS": fail_to_pass, "PASS_TO_PASS": pass_to_pass}
    return lists, {test: errors.get(test, "") for test in fail_to_pass}


def sort_tests(before: Sequence[dict[str, str]], after: Sequence[dict[str, str]]) -> tuple[list[str], list[str]]:
    """Return FAIL_TO_PASS and PASS_TO_PASS, from the statuses of some runs before the change, and of some after it.

    Ids with spaces, which swebench's parser cuts, are in FAIL_TO_PASS only where it would be empty without them.
    """
    old = stable(before)
    passing = sorted(test for test, status in stable(after).items() if status == PASSED)
    plain = [test for test in passing if not re.search(r"\s", test)]
    fixed = [test for test in passing if old.get(test) not in (PASSED, UNSTABLE)]
    return [test for test in fixed if test in plain] or fixed, [test for test in plain if old.get(test) == PASSED]


def stable(runs: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return test -> its status, or `UNSTABLE` where the runs differ."""
    tests = {test for run in runs for test in run}
    return {test: runs[0][test] if len({run.get(test) for run in runs}) == 1 else UNSTABLE for test in tests}


async def _run(task: Task, bench: Bench, patch: str) -> str:
    """Return the log of the hidden tests, on the sources before the change with `patch`."""
    async with bench.sandbox(task) as sandbox:
        try:
            for diff in (task.test_patch, patch):
                await apply_diff(sandbox, bench.spec.workspace.path, diff.encode())
        except ValueError as error:
            raise CurationError(f"{task.instance_id}: {error}") from error
        wide = {"COLUMNS": "400"}  # in a narrower terminal, pytest cuts the errors of its summary short
        result = await sandbox.exec(
            Command(argv=["sh", "-c", task.test_command], environment=wide, timeout_seconds=TEST_SECONDS)
        )
    if result.timed_out:
        raise CurationError(f"{task.instance_id}: the tests took more than {TEST_SECONDS:g} s")
    log = full_log(result)
    if patch and PASSED not in get_parser(task.log_parser)(log).values():
        missing = sorted(set(re.findall(r"ModuleNotFoundError: No module named '([\w.]+)", log)))
        error = re.search(r"^E +(\w*(?:Error|Exception|Failed)\b.*)$", log, re.MULTILINE)
        advice = f"name the packages of these modules with --require: {', '.join(missing)}"
        why = advice if missing else error[1] if error else log[-2000:]
        raise CurationError(f"{task.instance_id}: no test passes after the change either: {why}")
    return log


def instance_ids(out: Path) -> set[str]:
    """Return the ids of the tasks in a JSONL file, which may be missing."""
    if not out.exists():
        return set()
    with out.open("rb") as lines:
        rows = list(json_lines(lines, out))
    if nameless := [place for place, row in rows if not isinstance(row.get("instance_id"), str)]:
        raise ConfigError(f"{nameless[0]}: instance_id: is missing; name a file of tasks")
    return {row["instance_id"] for _, row in rows}


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line to a JSONL file by one write, so that no half line stays where the process is killed. A last line
    without an end is ended first."""
    with path.open("a+b", buffering=0) as lines:
        size = lines.seek(0, os.SEEK_END)
        lines.seek(max(0, size - 1))
        begun = lines.read() not in (b"", b"\n")
        lines.write((b"\n" if begun else b"") + json.dumps(row).encode() + b"\n")


def make_known(tree: Path, name: str, metadata: str) -> None:
    """Let `importlib.metadata` find a package without an installation, as archives made by setuptools do."""
    source = tree / "src"
    root = source if source.is_dir() and not source.is_symlink() else tree
    if not list(root.glob("*.egg-info")):
        directory = root / f"{re.sub(r'[-_.]+', '_', name)}.egg-info"
        directory.mkdir()
        (directory / "PKG-INFO").write_text(metadata)


def _write(task: Task, old: Path, out: Path) -> Task:
    """Write the workspace first, then the line that names it."""
    workspace = Path("repos") / task.instance_id
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_tree(out.parent / workspace)
    shutil.copytree(old, out.parent / workspace, symlinks=True)
    row = task.model_copy(update={"workspace": str(workspace)}).model_dump(exclude_defaults=True)
    append_line(out, row)
    return task.model_copy(update={"workspace": str(out.parent / workspace)})
