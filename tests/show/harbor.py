"""Grade task directories of Harbor: reference solutions, doing nothing, and a real harness: `make show-harbor`.

The tests' own tasks are graded, some broken ones, and those of your data sets: `ARGS="--directories DIR..."`. Base
images that no registry gives are imported: `--bases debian:bookworm-slim` names a Debian of debootstrap so.
`--network full` lets verifiers download what they need. `--quick` has a busybox as the base of its own tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from polar_gym.config.loading import load_config
from polar_gym.console import make_console
from polar_gym.curation.bench import Bench
from polar_gym.curation.validation import Verdict, validate
from polar_gym.gateway.node.assemble import make_node, make_request
from polar_gym.paths import cache_dir
from polar_gym.schema import Episode, RuntimeSpec
from polar_gym.tasks import Task
from polar_gym.tasks.harbor import HarborOptions, read_directories
from polar_gym.tasks.rows import Selection, select
from tests.lifecycle.harbor_base import base_image
from tests.show.result import Result, make_parser, parse
from tests.support import docker_daemon
from tests.support.debootstrap import import_debian
from tests.support.harbor_tasks import BASE, TASKS, write_task

READ, VALID, SAID, HARNESS = LAWS = (
    "every directory is a task, or one line says why not",
    "the reference solution of each own task is rewarded, and doing nothing is not",
    "a broken task has one line that says so",
    "a real harness is rewarded for the solution, and not for another change",
)

BROKEN = {
    "broken-dockerfile": {"dockerfile": f"FROM {BASE}\nRUN missing-program\nWORKDIR /work\n"},
    "hanging-verifier": {"test": "#!/bin/sh\nsleep 3600\n", "toml": "[verifier]\ntimeout_sec = 2\n"},
    "silent-verifier": {"test": "#!/bin/sh\n"},
    "no-number": {"test": "#!/bin/sh\necho nan > /logs/verifier/reward.txt\n"},
}


async def validated(tasks: Sequence[Task], network: str) -> list[Verdict]:
    async with Bench(RuntimeSpec.model_validate({"name": "docker", "network": network}), cache_dir()) as bench:
        return [await validate(task, bench) for task in tasks]


async def played(harness: str, script: str | None) -> Episode:
    """Return the episode of a harness on the task `greet`; without a script the policy plays the reference solution."""
    own = {} if script is None else {"scripts": [{"match": "", "commands": [script], "final_message": "Done."}]}
    config = load_config(
        settings={
            "harness": harness,
            "tasks": {"name": "harbor", "path": str(TASKS / "greet")},
            "engine": {"name": "embedded", **own},
        }
    )
    (task,) = tasks_in(TASKS / "greet")[0]
    with tempfile.TemporaryDirectory() as state:
        async with make_node(config.with_rollout(state=Path(state)), [task]) as node:
            return await node.rollout(make_request(config, task))


def tasks_in(path: Path) -> tuple[list[Task], list[str]]:
    rows, problems = read_directories(HarborOptions(path=path))
    return select(str(path), rows, path, Selection()), problems


def table(title: str, verdicts: Sequence[Verdict]) -> Table:
    shown = Table(title=title, title_justify="left")
    for heading in ("task", "gold", "no-op", "problem"):
        shown.add_column(heading, overflow="fold")
    for each in verdicts:
        rewards = [f"{grade.reward:g}" if grade else "-" for grade in (each.gold, each.no_op)]
        shown.add_row(each.task.instance_id, *rewards, each.problem)
    return shown


def main() -> int:
    parser = make_parser("harbor", __doc__, quick="debootstrap, and all harnesses but pi")
    parser.add_argument("--directories", nargs="*", type=Path, default=[], help="data sets of Harbor")
    parser.add_argument("--bases", nargs="*", default=[], help="names under which a Debian is imported")
    parser.add_argument("--network", choices=["none", "full"], default="none", help="of solutions and verifiers")
    parser.add_argument("--harness", nargs="*", default=["pi", "codex"])
    options = parse(parser, quick={"harness": ["pi"]})
    if (not options.quick or options.bases) and not shutil.which("debootstrap"):
        sys.exit("debootstrap is missing; install it with: apt-get install debootstrap")
    with contextlib.ExitStack() as stack:
        host = docker_daemon.running_daemon()
        if host is None:
            if not shutil.which("dockerd"):
                sys.exit(f"no Docker daemon answers; install one with: {docker_daemon.INSTALL}")
            host = stack.enter_context(docker_daemon.own_daemon())
        os.environ["DOCKER_HOST"] = host
        stack.enter_context(base_image(host))
        import_debian(host, options.bases if options.quick else [BASE, *options.bases])
        return show(options)


def show(options: argparse.Namespace) -> int:
    result, console = Result("harbor", LAWS, options), make_console()
    own, problems = tasks_in(TASKS)
    result.check(READ, problems)
    verdicts = asyncio.run(validated(own, "none"))
    console.print(table("own tasks", verdicts))
    result.check(VALID, [f"{each.task.instance_id}: {each.problem}" for each in verdicts if each.problem])
    with tempfile.TemporaryDirectory() as directory:
        for name, files in BROKEN.items():
            write_task(Path(directory), name, **files)
        broken = asyncio.run(validated(tasks_in(Path(directory))[0], "none"))
    console.print(table("broken tasks", broken))
    bad = [each for each in broken if not each.problem or "\n" in each.problem or each.gold or each.no_op]
    result.check(SAID, [f"{each.task.instance_id}: {each.problem}" for each in bad])
    for path in options.directories:
        tasks, problems = tasks_in(path)
        result.check(READ, [problem for problem in problems if "\n" in problem])
        verdicts = asyncio.run(validated(tasks, options.network))
        console.print(table(f"{path}: {len(tasks)} tasks, {len(problems)} left out", verdicts))
        console.print("\n".join(problems), markup=False, highlight=False)
        valid = sum(not each.problem for each in verdicts)
        result.figures[str(path)] = {"tasks": len(tasks), "valid": valid, "left out": problems}
    for harness in options.harness:
        rewards = [asyncio.run(played(harness, script)).reward for script in (None, "echo Hello > greet")]
        console.print(f"{harness}: {rewards[0]} for the solution, {rewards[1]} for another change")
        result.check(HARNESS, [] if rewards == [1, 0] else [f"{harness}: {rewards}"])
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
