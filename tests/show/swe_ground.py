"""Rebuild tasks in SWE-bench's and SWE-Gym's form, and grade them by us and by swebench: `make show-swe-ground`.

Name the histories: `make show-swe-ground ARGS="--histories sympy/sympy=DIR pallets/flask=DIR"`, each a git repository.
A commit that changes source files and tests becomes a row as the data sets publish it. `polar-gym tasks prepare` adds
the way of grading, which it takes from swebench 4. The image has the layout of theirs (`/testbed`, a conda environment)
and is made here: no registry is asked. swebench's own `run_instance` runs the tests of each patch in a container. Each
task that was tried is a file in the cache, and a run goes on where it was. `--quick` makes a small history of its own,
under flask's name, whose tests swebench runs by `pytest -rA`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from polar_gym.console import make_console
from polar_gym.curation import CurationError
from polar_gym.curation.bench import Bench
from polar_gym.curation.from_git import Commit, commits, open_history
from polar_gym.curation.git import run_git
from polar_gym.curation.making import sort_tests
from polar_gym.curation.prepare import prepare
from polar_gym.curation.releases import is_test
from polar_gym.curation.validation import GRADING_ERRORS, NO_OP
from polar_gym.curation.wrong import wrong_patches
from polar_gym.errors import how_to_install
from polar_gym.paths import cache_dir
from polar_gym.schema import RuntimeSpec
from polar_gym.tasks import Task
from polar_gym.workspaces.venv import VenvError, ensure_venv
from tests.lifecycle.testbed_image import image_with_testbed
from tests.show.result import Result, make_parser, parse
from tests.support import docker_daemon
from tests.support.history import commit, git

REBUILT, SOLVED, SAME = LAWS = (
    "every history gives as many tasks as were asked for",
    "the reference solution resolves each task, and doing nothing resolves none, by both programs",
    "swebench gives the same verdict on every patch, wrong ones included",
)

RUNS = 2
"""How often swebench runs the tests before and after the change: only results that are the same each time count."""
TEST_SECONDS = 3600
QUICK = "pallets/flask"
VERSION = re.compile(r"""^(?:__version__|VERSION|version) *= *["'](\d+\.\d+)""", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The facts about a repository that neither its history nor swebench tells."""

    version_files: Sequence[str]
    """Files that may hold the version."""
    requirements: Sequence[str]
    """Packages of the image: those that swebench's specification of the repository names, as far as tests need them."""
    head: str = "HEAD"
    """The newest commit, for a repository whose later versions swebench does not know."""
    largest_tests: int | None = None
    """Commits with more bytes of test files are left out. None: no commit is."""


_PYTEST = "pytest==7.4.4"
_FLASK = ("click==8.1.3", "itsdangerous==2.1.2", "Jinja2==3.1.2", "Werkzeug==2.3.7")
GROUNDS = {
    "sympy/sympy": Ground(  # its larger files of tests run for up to an hour
        version_files=["sympy/release.py"], requirements=["mpmath==1.3.0"], head="sympy-1.12", largest_tests=20_000
    ),
    "pallets/flask": Ground(
        version_files=["src/flask/__init__.py", "pyproject.toml"],
        requirements=[_PYTEST, *_FLASK, "blinker", "asgiref", "python-dotenv"],
    ),
    "marshmallow-code/marshmallow": Ground(
        version_files=["src/marshmallow/__init__.py", "setup.py", "pyproject.toml"],
        requirements=[_PYTEST, "simplejson", "pytz", "packaging"],
        head="3.19.0",
    ),
    "pydantic/pydantic": Ground(
        version_files=["pydantic/version.py"],
        requirements=[_PYTEST, "pytest-mock", "hypothesis", "typing-extensions", "email-validator", "python-dotenv"],
        head="v1.10.13",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """One rebuilt task: the verdicts of both programs on each patch."""

    task: str
    why: str = ""
    """Why the commit makes no task; empty: it does."""
    fail_to_pass: int = 0
    pass_to_pass: int = 0
    ours: Mapping[str, bool] = field(default_factory=dict)
    """Patch -> whether we say resolved."""
    theirs: Mapping[str, bool] = field(default_factory=dict)

    @property
    def unequal(self) -> list[str]:
        return [patch for patch, resolved in self.ours.items() if self.theirs[patch] != resolved]


def rows(name: str, repository: Path, ground: Ground) -> Iterator[dict[str, Any]]:
    """Yield the rows that the commits of a history make, as the data sets publish them, the newest first."""
    history = open_history(repository, name, head=ground.head)
    for each in commits(history):
        sources = [path for path in each.files if not is_test(path)]
        tests = [path for path in each.files if is_test(path)]
        if each.lacks or len(sources) > 3 or not all(path.endswith(".py") for path in tests):
            continue
        listed = run_git(history.git_dir, "ls-tree", "--long", each.sha, "--", *tests).decode().splitlines()
        if ground.largest_tests is not None and sum(int(line.split()[3]) for line in listed) > ground.largest_tests:
            continue
        if version := _version(history.git_dir, each.parent, ground):
            yield {
                "repo": name,
                "instance_id": f"{name.replace('/', '__')}-{_number(each)}",
                "base_commit": each.parent,
                "version": version,
                "patch": _diff(history.git_dir, each, [path for path in sources if path.endswith(".py")]),
                "test_patch": _diff(history.git_dir, each, tests),
                "problem_statement": each.message.strip(),
                "FAIL_TO_PASS": ["to be found"],
                "PASS_TO_PASS": [],
            }


def _version(git_dir: Path, sha: str, ground: Ground) -> str:
    for file in ground.version_files:
        with contextlib.suppress(CurationError):
            if found := VERSION.search(run_git(git_dir, "show", f"{sha}:{file}").decode()):
                return found[1]
    return ""


def _number(commit: Commit) -> str:
    found = re.search(r"#(\d+)", commit.message)
    return found[1] if found else str(int(commit.sha[:8], 16))


def _diff(git_dir: Path, commit: Commit, files: Sequence[str]) -> str:
    return run_git(git_dir, "diff", "--no-renames", commit.parent, commit.sha, "--", *files).decode()


@contextlib.contextmanager
def image_of(row: Mapping[str, Any], repository: Path, ground: Ground, host: str) -> Iterator[None]:
    """Make the image of a row, with its name, and remove it afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        testbed = Path(scratch, "testbed")
        run_git(Path(scratch), "init", "-q", str(testbed))
        run_git(testbed, "fetch", "-q", "--depth=1", str(repository), row["base_commit"])
        run_git(testbed, "checkout", "-q", "--detach", row["base_commit"])
        with image_with_testbed(host, testbed, ground.requirements, row["image"]):
            yield


class Swebench:
    """swebench's own harness, on the Docker daemon that DOCKER_HOST names. It writes into the working directory."""

    def __init__(self) -> None:
        import docker

        self._client = docker.from_env(timeout=TEST_SECONDS + 60)

    def run(self, row: Mapping[str, Any], patch: str) -> tuple[dict[str, str], bool]:
        """Return the statuses that swebench reads in the log of one run with a patch, and whether it says resolved."""
        from swebench.harness.constants import LOG_TEST_OUTPUT, RUN_EVALUATION_LOG_DIR
        from swebench.harness.grading import get_logs_eval
        from swebench.harness.run_evaluation import run_instance
        from swebench.harness.utils import make_test_spec

        spec, run_id = make_test_spec(dict(row)), uuid.uuid4().hex
        prediction = {"instance_id": spec.instance_id, "model_name_or_path": "patch", "model_patch": patch}
        done = run_instance(spec, prediction, self._client, run_id, TEST_SECONDS)
        if done is None:
            raise CurationError(f"{spec.instance_id}: swebench ran into an error")
        log = RUN_EVALUATION_LOG_DIR / run_id / "patch" / spec.instance_id / LOG_TEST_OUTPUT
        return get_logs_eval(spec, str(log))[0], done[1][spec.instance_id]["resolved"]

    async def run_all(self, row: Mapping[str, Any], patches: Sequence[str]) -> list[tuple[dict[str, str], bool]]:
        """Return the results of `run` for some patches. The runs overlap: a container takes 15 seconds to stop."""
        return await asyncio.gather(*(asyncio.to_thread(self.run, row, patch) for patch in patches))


async def rebuild(row: dict[str, Any], repository: Path, ground: Ground, host: str, wrong: int) -> Graded:
    """Make the image and the lists of tests of a row, and grade patches by both programs."""
    swebench, no_op = Swebench(), NO_OP.decode()
    with image_of(row, repository, ground, host):
        runs = await swebench.run_all(row, [no_op, row["patch"]] * RUNS)
        statuses = [each for each, _ in runs]
        if not all(statuses[1::2]):
            raise CurationError("swebench reads no test in the log of a run after the change")
        fail_to_pass, pass_to_pass = sort_tests(statuses[::2], statuses[1::2])
        if not fail_to_pass:
            raise CurationError("no test fails before the change and passes after it")
        row |= {"FAIL_TO_PASS": fail_to_pass, "PASS_TO_PASS": pass_to_pass}
        task = Task.model_validate(row)
        patches = {"gold": row["patch"], "no-op": no_op} | dict(islice(_wrong(task, repository), wrong))
        async with Bench(RuntimeSpec(name="docker"), cache_dir()) as bench:
            ours = {
                name: bool((await bench.evaluate(task, patch.encode())).resolved) for name, patch in patches.items()
            }
        verdicts = [resolved for _, resolved in await swebench.run_all(row, list(patches.values()))]
    return Graded(
        task=task.instance_id,
        fail_to_pass=len(fail_to_pass),
        pass_to_pass=len(pass_to_pass),
        ours=ours,
        theirs=dict(zip(patches, verdicts, strict=True)),
    )


def _wrong(task: Task, repository: Path) -> Iterator[tuple[str, str]]:
    """Yield wrong patches. Cheats are left out: swebench believes the report of the code under test."""
    files = re.findall(r"^\+\+\+ b/(\S+)$", task.patch, re.MULTILINE)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        before = dict[str, str]()
        for file in files:
            with contextlib.suppress(CurationError):  # a file that the change creates
                before[file] = run_git(repository, "show", f"{task.base_commit}:{file}").decode()
                (tree / file).parent.mkdir(parents=True, exist_ok=True)
                (tree / file).write_text(before[file])
        Path(scratch, "patch").write_text(task.patch)
        run_git(tree, "apply", "patch")
        right = {file: (tree / file).read_text() for file in files if (tree / file).exists()}
    for each in wrong_patches(task, before, right):
        if not each.name.startswith("cheat: "):
            yield each.name, each.diff.decode()


def show(options: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    result, console = Result("swe-ground", LAWS, options), make_console()
    host = docker_daemon.running_daemon()
    if host is None:
        if not shutil.which("dockerd"):
            sys.exit(f"no Docker daemon answers; install one with: {docker_daemon.INSTALL}")
        host = stack.enter_context(docker_daemon.own_daemon())
    os.environ["DOCKER_HOST"] = host
    every: list[Graded] = []
    for text in options.histories:
        name, _, directory = text.partition("=")
        graded = [each for each in _history(name, Path(directory), host, options, console) if not each.why]
        result.check(REBUILT, [f"{name}: {len(graded)}"] if len(graded) < options.limit else [])
        every += graded
    console.print(table(every))
    for each in every:
        for program, verdicts in (("we", each.ours), ("swebench", each.theirs)):
            solved = [verdicts["gold"], verdicts["no-op"]]
            result.check(SOLVED, [f"{each.task}: {program} say {solved}"] if solved != [True, False] else [])
        result.check(SAME, [f"{each.task}: {patch}: ours {each.ours[patch]}" for patch in each.unequal])
    result.figures["tasks"] = [asdict(each) for each in every]
    return result.finish()


def _history(name: str, repository: Path, host: str, options: argparse.Namespace, console: Console) -> Iterator[Graded]:
    """Yield what the candidates of a history gave, until `--limit` of them are tasks."""
    ground, left = GROUNDS[name], options.limit
    kept = options.directory / name.replace("/", "__")
    kept.mkdir(parents=True, exist_ok=True)
    candidates = {row["instance_id"]: row for row in islice(rows(name, repository, ground), options.candidates)}
    try:
        ensure_venv(list(ground.requirements), cache_dir())
    except VenvError as error:
        sys.exit(f"{name}: {error}")
    asked = kept / "rows.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in candidates.values()))
    prepared = prepare(asked, "auto", {}, cache_dir())
    console.print(f"{name}: {len(candidates)} candidates, {len(prepared.problems)} that cannot be prepared")
    for problem in prepared.problems[:3]:
        console.print(problem, style="dim", markup=False)
    for row in prepared.rows:
        file = kept / f"{row['instance_id']}.json"
        if file.exists():
            graded = Graded(**json.loads(file.read_text()))
        else:
            try:
                graded = asyncio.run(rebuild(row, repository, ground, host, options.wrong))
            except (CurationError, *GRADING_ERRORS) as error:
                graded = Graded(task=row["instance_id"], why=str(error) or "timed out")
            file.write_text(json.dumps(asdict(graded)))
            console.print(f"{graded.task}: {graded.why[-300:] or 'a task'}", style="dim", markup=False)
        yield graded
        left -= not graded.why
        if not left:
            return


def table(graded: Sequence[Graded]) -> Table:
    shown = Table(title="Rebuilt tasks: resolved, by us and by swebench", title_justify="left")
    for heading in (
        "task",
        "F2P",
        "P2P",
        "gold",
        "no-op",
        "wrong patches",
        "resolved of these",
        "verdicts that differ",
    ):
        shown.add_column(heading, justify="left" if heading == "task" else "right", overflow="fold")
    for each in graded:
        both = [f"{each.ours[patch]:d} {each.theirs[patch]:d}" for patch in ("gold", "no-op")]
        wrong = [patch for patch in each.ours if patch not in ("gold", "no-op")]
        resolved = f"{sum(each.ours[patch] for patch in wrong)} {sum(each.theirs[patch] for patch in wrong)}"
        lists = [str(each.fail_to_pass), str(each.pass_to_pass)]
        shown.add_row(each.task, *lists, *both, str(len(wrong)), resolved, str(len(each.unequal)))
    return shown


def _small_history(repository: Path) -> Path:
    """Make a history of two commits, of a version of flask that swebench knows, and return its path."""
    repository.mkdir()
    git(repository, "init", "-q")
    wrong = "def double(x):\n    return x + 2\n"
    test = "from doubler import double\n\n\ndef test_two():\n    assert double(2) == 4\n"
    files = {"src/doubler.py": wrong, "tests/test_doubler.py": test}
    commit(repository, "Begin", {"pyproject.toml": 'version = "3.0.0"\n', **files})
    more = "\n\ndef test_three():\n    assert double(3) == 6\n"
    fixed = {"src/doubler.py": wrong.replace("+", "*"), "tests/test_doubler.py": test + more}
    commit(repository, "Double numbers other than two (#7)", fixed)
    return repository


def main() -> int:
    parser = make_parser("swe-ground", __doc__, quick="all histories but a small one of its own")
    parser.add_argument("--histories", nargs="*", default=[], metavar="OWNER/NAME=DIR", help=", ".join(GROUNDS))
    parser.add_argument("--limit", type=int, default=5, help="tasks of each history")
    parser.add_argument("--candidates", type=int, default=200, help="commits of each history that are looked at")
    parser.add_argument("--wrong", type=int, default=4, help="wrong patches of each task")
    parser.add_argument("--directory", type=Path, default=cache_dir() / "swe-ground", help="where results are kept")
    options = parse(parser, quick={"limit": 1, "wrong": 2})
    if importlib.util.find_spec("swebench") is None:
        sys.exit(f"swebench is missing; install it with: {how_to_install('swe')}")
    if unknown := [text for text in options.histories if text.partition("=")[0] not in GROUNDS]:
        sys.exit(f"--histories: {', '.join(unknown)}: expected OWNER/NAME=DIR of {', '.join(GROUNDS)}")
    if not options.histories and not options.quick:
        sys.exit("--histories: name at least one git repository")
    options.results, options.directory = options.results.resolve(), options.directory.resolve()
    options.histories = [
        f"{name}={Path(path).resolve()}" for name, _, path in (each.partition("=") for each in options.histories)
    ]
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(contextlib.chdir(scratch))
        if options.quick:
            options.directory = scratch / "kept"
            options.directory.mkdir()
            options.histories = [f"{QUICK}={_small_history(options.directory / 'doubler')}"]
        return show(options, stack)


if __name__ == "__main__":
    sys.exit(main())
