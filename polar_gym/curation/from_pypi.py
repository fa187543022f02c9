"""Makes real tasks out of two releases of a pure-Python package.

The old release's source archive is the workspace. The changes in its packages are the reference solution, and the
changes in its tests are the hidden tests. The tests run three times before and three times after the change. A test
whose result differs between runs is in no list. Code of a release runs in a sandbox only. The environment that its
tests need is made of wheels only, at pinned versions, and has no newer release of the package.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar_gym.curation import CurationError
from polar_gym.curation.bench import Bench
from polar_gym.curation.issue import write_issue
from polar_gym.curation.pypi import fetch_sdist, metadata, requirements, unpack
from polar_gym.curation.releases import Comparison, compare
from polar_gym.curation.twins import with_twins
from polar_gym.curation.validation import validate
from polar_gym.durable import json_lines
from polar_gym.evaluators.parsers import PASSED, get_parser
from polar_gym.evaluators.result import full_log
from polar_gym.runtimes import Command
from polar_gym.tasks import Task
from polar_gym.workspaces.diff import apply_diff
from polar_gym.workspaces.requirements import check_requirement
from polar_gym.workspaces.venv import INTERPRETER, VenvError, ensure_venv

RUNS = 3
"""How often the tests run before and after the change: only results that are the same every time count."""

PYTEST = "pytest<9"
"""Version 9 rejects code that is still in many packages' conftest.py."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The two releases that a task is made from."""

    package: str
    old: str
    new: str
    extra_requirements: Sequence[str] = ()
    """Requirements of the tests that the package's metadata does not name."""

    @property
    def instance_id(self) -> str:
        name = re.sub(r"[^a-z0-9]+", "-", self.package.lower())
        return f"{name}__{name}-{self.old}-{self.new}"


async def make_task(release: Release, bench: Bench, out: Path, say: Say) -> Task:
    """Make the task, validate it, and add it to the JSONL file `out`, with its workspace in `repos/` beside the file.

    A task that is not valid is not written. Raises `CurationError`.
    """
    if release.instance_id in _instance_ids(out):
        raise CurationError(f"{out}: has {release.instance_id} already; remove its line to make it anew")
    with tempfile.TemporaryDirectory(prefix="polar-gym-pypi-") as scratch:
        say("fetching both releases")
        old, new = await asyncio.to_thread(_trees, release, bench.cache, Path(scratch))
        comparison = await asyncio.to_thread(compare, old, new)
        say("resolving what the tests need")
        wanted = [*requirements(new, _python_version()), *release.extra_requirements]
        pins = await asyncio.to_thread(resolve, release, wanted, bench.cache)
        task = _task(release, comparison, old, pins)
        say(f"running {len(comparison.test_modules)} test files, {RUNS} times before and after")
        lists, failing = await _lists(task, bench)
        issue, source = write_issue(release.package, old, new, failing=failing, test_patch=comparison.test_patch)
        task = Task.model_validate(
            {**task.model_dump(), **lists, "problem_statement": issue, "problem_statement_source": source}
        )
        say("validating it as a rollout would grade it")
        verdict = await validate(task, bench)
        if verdict.problem:
            raise CurationError(f"{release.instance_id}: not valid: {verdict.problem}")
        say("finding where its tests can be altered")
        twinned = await with_twins(task, bench)
        if twinned.problem:
            say(f"no twins: {twinned.problem}")
        return await asyncio.to_thread(_write, twinned.task, old, out)


def _trees(release: Release, cache: Path, scratch: Path) -> tuple[Path, Path]:
    archives = [fetch_sdist(release.package, version, cache) for version in (release.old, release.new)]
    old, new = unpack(archives[0], scratch / "old"), unpack(archives[1], scratch / "new")
    _make_known(old)
    return old, new


def _make_known(tree: Path) -> None:
    """Let `importlib.metadata` find the package without an installation, as archives made by setuptools do."""
    root = tree / "src" if (tree / "src").is_dir() else tree
    if not list(root.glob("*.egg-info")):
        name = re.sub(r"[-_.]+", "_", metadata(tree).get("name", tree.name))
        (root / f"{name}.egg-info").mkdir()
        shutil.copy(tree / "PKG-INFO", root / f"{name}.egg-info" / "PKG-INFO")


def _task(release: Release, comparison: Comparison, old: Path, pins: list[str]) -> Task:
    roots = " ".join(dict.fromkeys([*comparison.import_roots, "."]))
    files = " ".join(map(shlex.quote, comparison.test_modules))
    return Task(
        instance_id=release.instance_id,
        problem_statement="to be written",
        repo=f"{release.package}/{release.package}",
        base_commit=comparison.base_commit,
        patch=comparison.patch,
        test_patch=comparison.test_patch,
        workspace=str(old),
        python_requirements=pins,
        test_command=f"{PYTEST_COMMAND} -o 'pythonpath={roots}' {files}",
        log_parser="pytest",
    )


def _python_version() -> str:
    command = [INTERPRETER, "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def resolve(release: Release, wanted: Sequence[str], cache: Path) -> list[str]:
    """Return pytest, `wanted` and their dependencies, each at a version that has a wheel: no foreign build code runs.

    Where they need the package itself, the old release is chosen: the new one holds the solution.
    """
    for requirement in wanted:
        try:
            check_requirement(requirement)
        except ValueError as error:
            raise CurationError(f"the tests need {requirement!r}: {error}") from error
    try:
        python = ensure_venv([PYTEST], cache) / "bin" / "python"
    except VenvError as error:
        raise CurationError(str(error)) from error
    options = ["--dry-run", "--ignore-installed", "--only-binary", ":all:", "--quiet", "--no-input", "--report", "-"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(f"{release.package}=={release.old}\n")
        constraints.flush()
        options += ["--constraint", constraints.name]
        command = [str(python), "-I", "-m", "pip", "install", *options, "--", PYTEST, *wanted]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise CurationError(
            f"no wheels for what tests need ({', '.join([PYTEST, *wanted])}) with {release.package}=={release.old}, "
            f"as a newer release holds the solution: {done.stderr.strip()[-1000:]}"
        )
    packages = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return sorted(f"{package['name']}=={package['version']}" for package in packages)


async def _lists(task: Task, bench: Bench) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return FAIL_TO_PASS and PASS_TO_PASS, and the error of each test of FAIL_TO_PASS before the change.

    Only tests whose result was the same in all runs are in the lists.
    """
    logs = [await _run(task, bench, "") for _ in range(RUNS)]
    parse = get_parser(task.log_parser)
    before = stable([parse(log) for log in logs])
    after = stable([parse(await _run(task, bench, task.patch)) for _ in range(RUNS)])
    passing = [test for test, status in after.items() if status == PASSED and len(test.split()) == 1]
    fail_to_pass = sorted(test for test in passing if before.get(test) not in (PASSED, UNSTABLE))
    if not fail_to_pass:
        raise CurationError(
            f"{task.instance_id}: of {len(passing)} tests that pass after the change none fails before it"
        )
    pass_to_pass = sorted(test for test in passing if before.get(test) == PASSED)
    errors = dict(_ERROR.findall(logs[0]))
    lists = {"FAIL_TO_PASS": fail_to_pass, "PASS_TO_PASS": pass_to_pass}
    return lists, {test: errors.get(test, "") for test in fail_to_pass}


def stable(runs: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return test -> its status, or `UNSTABLE` where the runs differ."""
    tests = {test for run in runs for test in run}
    return {test: runs[0][test] if len({run.get(test) for run in runs}) == 1 else UNSTABLE for test in tests}


async def _run(task: Task, bench: Bench, patch: str) -> str:
    """Return the log of the hidden tests, on the old release with `patch`."""
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
        missing = sorted(set(re.findall(r"ModuleNotFoundError: No module named '(\w+)", log)))
        advice = f"name the packages of these modules with --require: {', '.join(missing)}" if missing else log[-2000:]
        raise CurationError(f"{task.instance_id}: no test passes after the change either; {advice}")
    return log


def _instance_ids(out: Path) -> set[str]:
    if not out.exists():
        return set()
    with out.open("rb") as lines:
        return {row["instance_id"] for _, row in json_lines(lines, out)}


def _write(task: Task, old: Path, out: Path) -> Task:
    """Write the workspace first, then the line that names it."""
    workspace = Path("repos") / task.instance_id
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out.parent / workspace, ignore_errors=True)
    shutil.copytree(old, out.parent / workspace, symlinks=True)
    row = task.model_copy(update={"workspace": str(workspace)}).model_dump(exclude_defaults=True)
    with out.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    return task.model_copy(update={"workspace": str(out.parent / workspace)})
