"""Make ten real tasks out of package releases, and grade them in two runtimes and by swebench: `make show-pypi-tasks`.

`swebench` grades the same logs, by its own pytest parser and report. The tasks are made first, unless --keep takes
those of the last run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from polar_gym.console import make_console
from polar_gym.curation import CurationError
from polar_gym.curation.bench import Bench
from polar_gym.curation.from_pypi import Release, from_releases
from polar_gym.curation.validation import Verdict, validate
from polar_gym.errors import how_to_install
from polar_gym.paths import cache_dir
from polar_gym.schema import RuntimeSpec
from polar_gym.tasks import Task
from polar_gym.tasks.rows import Selection, load_tasks
from tests.show.result import Result, make_parser, parse
from tests.support import docker_daemon

MADE, SOLVED, SAME = LAWS = (
    "every release becomes a task",
    "the reference solution resolves each task, and doing nothing resolves none",
    "swebench gives the same verdicts on the same logs",
)

RELEASES = [
    Release(package="sqlparse", old="0.5.1", new="0.5.2"),
    Release(package="inflect", old="7.3.1", new="7.4.0"),
    Release(package="prettytable", old="3.10.0", new="3.10.2"),
    Release(package="more-itertools", old="10.3.0", new="10.4.0"),
    Release(package="cachetools", old="5.3.3", new="5.4.0"),
    Release(package="boltons", old="24.0.0", new="24.1.0"),
    Release(package="xmltodict", old="0.14.1", new="0.14.2"),
    Release(package="tomlkit", old="0.13.2", new="0.13.3", extra_requirements=["pyyaml"]),
    Release(package="python-dotenv", old="1.0.0", new="1.0.1", extra_requirements=["click", "sh"]),
    Release(package="parso", old="0.8.3", new="0.8.4"),
]

QUICK = RELEASES[-1:]
RUNTIMES = ("docker", "bubblewrap")
KEPT = cache_dir() / "pypi-tasks" / "pypi.jsonl"
"""The tasks, which stay for other programs."""
KEPT_QUICK = cache_dir() / "pypi-tasks-quick" / "pypi.jsonl"


class Graded(NamedTuple):
    verdict: Verdict
    swebench: list[bool]
    """Whether swebench says resolved: of the reference solution, of doing nothing."""
    seconds: float

    @property
    def right(self) -> bool:
        return not self.verdict.problem and self.swebench == [True, False]


def swebench_resolves(task: Task, log: str) -> bool:
    """Return whether `swebench` takes the task of this log for resolved."""
    from swebench.harness.constants import END_TEST_OUTPUT, START_TEST_OUTPUT
    from swebench.harness.grading import get_eval_report
    from swebench.types import TestSpec

    spec = TestSpec(
        instance_id=task.instance_id,
        image="",
        eval_script_list=[],
        repo=task.repo,
        version="",
        FAIL_TO_PASS=task.FAIL_TO_PASS,
        PASS_TO_PASS=task.PASS_TO_PASS,
        log_parser="parse_log_pytest",
        eval_type="pass_and_fail",
    )
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(f"{START_TEST_OUTPUT}\n{log}\n{END_TEST_OUTPUT}\n")
        file.flush()
        prediction = {"instance_id": task.instance_id, "model_name_or_path": "", "model_patch": "a patch"}
        return get_eval_report(spec, prediction, file.name, False)[task.instance_id]["resolved"]


async def make(out: Path, console: Console, releases: Sequence[Release] = RELEASES) -> list[Task]:
    """Make the tasks of the releases in `out`."""
    async with Bench(RuntimeSpec(name="bubblewrap"), cache_dir()) as bench:
        for release in releases:
            started = time.monotonic()
            try:
                await from_releases(release, bench, out, lambda text: None)
            except CurationError as error:
                console.print(f"{release.instance_id}: {error}", style="red", markup=False)
                continue
            console.print(f"made {release.instance_id} in {time.monotonic() - started:.0f} s", style="dim")
    return load_tasks(out, Selection())


async def grade(tasks: Sequence[Task], runtime: str, cache: Path) -> list[Graded]:
    """Grade both changes of each task, and have swebench grade the same logs: without twins, whose tests have other
    names."""
    graded: list[Graded] = []
    async with Bench(RuntimeSpec(name=runtime), cache) as bench:
        for task in tasks:
            started = time.monotonic()
            verdict = await validate(task.model_copy(update={"twins": {}}), bench)
            seconds = time.monotonic() - started
            logs = [each.log for each in (verdict.gold, verdict.no_op) if each is not None]
            graded.append(Graded(verdict, [swebench_resolves(task, log) for log in logs], seconds))
    return graded


def table(graded: Sequence[Graded], runtime: str) -> Table:
    right = sum(one.right for one in graded)
    table = Table(title=f"{runtime}: {right} of {len(graded)} as they must be", title_justify="left")
    table.add_column("task", overflow="fold")
    for heading in ("F2P", "P2P", "gold", "swebench", "no-op", "swebench", "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("instruction from")
    table.add_column("problem", overflow="fold")
    for one in graded:
        verdict = one.verdict
        rewards = ["failed" if each is None else f"{each.reward:.0f}" for each in (verdict.gold, verdict.no_op)]
        theirs = [f"{resolved:d}" for resolved in one.swebench] + ["", ""]
        counts = [str(len(verdict.task.FAIL_TO_PASS)), str(len(verdict.task.PASS_TO_PASS))]
        cells = [*counts, rewards[0], theirs[0], rewards[1], theirs[1], f"{one.seconds:.0f}"]
        source = str((verdict.task.model_extra or {}).get("problem_statement_source", ""))
        table.add_row(verdict.task.instance_id, *cells, source, verdict.problem)
    return table


def check(graded: Sequence[Graded], runtime: str, wanted: int, result: Result) -> None:
    """Hold the verdicts of one runtime against the laws."""
    result.check(MADE, [f"{runtime}: {len(graded)} of {wanted}"] * (len(graded) != wanted))
    for one in graded:
        name = f"{runtime}: {one.verdict.task.instance_id}"
        result.check(SOLVED, [f"{name}: {one.verdict.problem}"] * bool(one.verdict.problem))
        result.check(SAME, [f"{name}: {one.swebench}"] * (one.swebench != [True, False]))
    result.figures[runtime] = {
        "tasks": len(graded),
        "right": sum(one.right for one in graded),
        "seconds": {one.verdict.task.instance_id: round(one.seconds, 1) for one in graded},
    }


def tasks_of(options: argparse.Namespace, console: Console) -> list[Task]:
    """Make the tasks, or take those of the last run."""
    kept, releases = (KEPT_QUICK, QUICK) if options.quick else (KEPT, RELEASES)
    if not options.keep:
        shutil.rmtree(kept.parent, ignore_errors=True)
    return load_tasks(kept, Selection()) if kept.exists() else asyncio.run(make(kept, console, releases))


def main() -> int:
    parser = make_parser("pypi-tasks", __doc__, quick=f"docker, and all releases except {QUICK[0].instance_id}")
    parser.add_argument("--keep", action="store_true", help="take the tasks of the last run")
    parser.add_argument("--runtime", action="append", choices=RUNTIMES, help="only this one; may be given repeatedly")
    parser.set_defaults(runtime=RUNTIMES)
    options = parse(parser, quick={"runtime": ["bubblewrap"]})
    if importlib.util.find_spec("swebench") is None:
        sys.exit(f"swebench is missing; install it with: {how_to_install('swe')}")
    result, console = Result("pypi-tasks", LAWS, options), make_console()
    tasks = tasks_of(options, console)
    with contextlib.ExitStack() as stack:
        if "docker" in options.runtime and docker_daemon.running_daemon() is None:
            if not shutil.which("dockerd"):
                sys.exit(f"no Docker daemon answers; install one with: {docker_daemon.INSTALL}")
            os.environ["DOCKER_HOST"] = stack.enter_context(docker_daemon.own_daemon())
        results = {runtime: asyncio.run(grade(tasks, runtime, cache_dir())) for runtime in options.runtime}
    for runtime, graded in results.items():
        console.print(table(graded, runtime))
        check(graded, runtime, len(QUICK if options.quick else RELEASES), result)
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
