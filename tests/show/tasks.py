"""Make tasks out of git histories, and grade them in two runtimes and by swebench: `make show-tasks`.

Name the histories: `make show-tasks ARGS="--histories DIR OWNER/NAME=DIR"`, each a git repository, bare or with a work
tree. Tasks and journals stay in the cache, and a search goes on where it was. `--quick` makes a small history of its
own.
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
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from polar_gym.console import make_console
from polar_gym.curation.bench import Bench
from polar_gym.curation.from_git import commits, open_history, tried, try_commit
from polar_gym.errors import how_to_install
from polar_gym.paths import cache_dir
from polar_gym.schema import RuntimeSpec
from polar_gym.tasks.rows import Selection, load_tasks
from tests.show.pypi_tasks import RUNTIMES, Graded, grade, table
from tests.show.result import Result, make_parser, parse
from tests.support import docker_daemon
from tests.support.history import make_history

FOUND, SOLVED, SAME = LAWS = (
    "every history gives a task, or its journal says of each candidate why not",
    "the reference solution resolves each task, and doing nothing resolves none",
    "swebench gives the same verdicts on the same logs",
)


async def search(
    repository: Path, name: str | None, out: Path, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """Search one history for `--limit` tasks in `--candidates` commits, and return the figures of the whole search."""
    history = open_history(repository, name, since=options.since)
    every = list(commits(history))
    candidates, done, seconds = [each for each in every if not each.lacks], tried(out, history.options), list[float]()
    async with Bench(RuntimeSpec(name="bubblewrap"), cache_dir()) as bench:
        for commit in candidates:
            if sum(bool(each.task) for each in done.values()) >= options.limit or len(done) >= options.candidates:
                break
            if commit.sha not in done:
                started = time.monotonic()
                done[commit.sha] = result = await try_commit(history, commit, bench, out, lambda text: None)
                seconds.append(time.monotonic() - started)
                console.print(f"{history.name} {commit.sha[:12]}: {result.task or result.why[:150]}", style="dim")
    fell = Counter(each.fell for each in done.values() if not each.task)
    return {
        "history": history.name,
        "commits": len(every),
        "candidates": len(candidates),
        "tried": len(done),
        "tasks": sum(bool(each.task) for each in done.values()),
        "fell": dict(fell),
        "unexplained": sum(not each.task and not each.why for each in done.values()),
        "seconds of a candidate": round(sum(seconds) / len(seconds), 1) if seconds else None,
    }


def searched(figures: Sequence[dict[str, Any]]) -> Table:
    shown = Table(title="Histories", title_justify="left")
    for heading in ("history", "commits", "candidates", "tried", "tasks", "seconds of a candidate", "fell"):
        shown.add_column(heading, justify="left" if heading in ("history", "fell") else "right", overflow="fold")
    for each in figures:
        fell = ", ".join(f"{count} {step}" for step, count in each["fell"].items())
        names = ("history", "commits", "candidates", "tried", "tasks", "seconds of a candidate")
        shown.add_row(*(str(each[name] or "-") for name in names), fell)
    return shown


def check(graded: Sequence[Graded], runtime: str, result: Result) -> None:
    """Hold the verdicts of one runtime against the laws. swebench's parser does not read ids with spaces."""
    for one in graded:
        task = one.verdict.task
        name = f"{runtime}: {task.instance_id}"
        result.check(SOLVED, [f"{name}: {one.verdict.problem}"] if one.verdict.problem else [])
        spaced = any(" " in test for test in task.FAIL_TO_PASS)
        result.check(SAME, [f"{name}: {one.swebench}"] if one.swebench != [True, False] and not spaced else [])
    right = sum(not one.verdict.problem for one in graded)
    result.figures[runtime] = {"tasks": len(graded), "valid": right}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which histories are searched, and how far."""
    parser.add_argument("--histories", nargs="*", default=[], help="git repositories: DIR, or OWNER/NAME=DIR")
    parser.add_argument("--limit", type=int, default=2, help="tasks of each history")
    parser.add_argument("--candidates", type=int, default=10, help="commits of each history that are tried")
    parser.add_argument("--since", type=datetime.fromisoformat, help="leave out commits before this day")
    parser.add_argument("--directory", type=Path, default=cache_dir() / "git-tasks", help="where tasks are kept")


def search_all(options: argparse.Namespace, console: Console) -> tuple[list[dict[str, Any]], list[Path]]:
    """Search all histories, and return the figures, and the files of the tasks that were found."""
    figures, files = list[dict[str, Any]](), list[Path]()
    for text in options.histories:
        name, _, directory = text.rpartition("=")
        path = Path(directory)
        out = options.directory / f"{(name or path.resolve().name).replace('/', '__')}.jsonl"
        figures.append(asyncio.run(search(path, name or None, out, options, console)))
        files += [out] if out.exists() else []
    console.print(searched(figures))
    return figures, files


def main() -> int:
    parser = make_parser("tasks", __doc__, quick="docker, and all histories but a small one of its own")
    add_options(parser)
    parser.set_defaults(runtime=RUNTIMES)
    options = parse(parser, quick={"runtime": ["bubblewrap"]})
    if importlib.util.find_spec("swebench") is None:
        sys.exit(f"swebench is missing; install it with: {how_to_install('swe')}")
    if not options.histories and not options.quick:
        sys.exit("--histories: name at least one git repository")
    options.since = options.since and options.since.astimezone()
    with contextlib.ExitStack() as stack:
        if options.quick:
            options.directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            make_history(options.directory / "doubler")
            options.histories = [str(options.directory / "doubler")]
        return show(options, stack)


def show(options: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    result, console = Result("tasks", LAWS, options), make_console()
    figures, files = search_all(options, console)
    tasks = [task for file in files for task in load_tasks(file, Selection())]
    result.figures["histories"] = figures
    result.check(
        FOUND, [f"{each['history']}: {each['unexplained']} unexplained" for each in figures if each["unexplained"]]
    )
    if "docker" in options.runtime and docker_daemon.running_daemon() is None:
        if not shutil.which("dockerd"):
            sys.exit(f"no Docker daemon answers; install one with: {docker_daemon.INSTALL}")
        os.environ["DOCKER_HOST"] = stack.enter_context(docker_daemon.own_daemon())
    for runtime in options.runtime:
        graded = asyncio.run(grade(tasks, runtime, cache_dir()))
        console.print(table(graded, runtime))
        check(graded, runtime, result)
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
