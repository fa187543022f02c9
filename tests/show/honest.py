"""Grade correct solutions, and run honest sessions: what do the guards of the grader cost? `make show-honest`.

Each task's reference solution is graded three times. Three other correct solutions (`tests/honest/`) are graded once
each. A solution without the reward is a false alarm. Afterwards, sessions on the bundled tasks run through the whole
machinery with a scripted policy. Two sessions of three solve their task. A session whose reward is missing was masked
or failed by the machinery.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from polar_gym.config.loading import load_config
from polar_gym.console import make_console
from polar_gym.curation.bench import Bench
from polar_gym.curation.from_pypi import Release
from polar_gym.gateway.node.assemble import make_node, make_request
from polar_gym.paths import cache_dir
from polar_gym.schema import Episode, EvaluationResult, RuntimeSpec
from polar_gym.tasks import Task
from polar_gym.tasks.bundled import SUITE
from polar_gym.tasks.request import reference_script
from polar_gym.tasks.rows import Selection, load_tasks
from tests.show.pypi_tasks import make
from tests.show.result import Result, make_parser, parse
from tests.support.honest import Solution, gold, solutions

THERE, REWARDED, USABLE, UNSOLVED = LAWS = (
    "every task is there, with three solutions other than the reference solution",
    "every honest solution is rewarded",
    "at most 0.5 % of honest sessions are masked or failed by the machinery",
    "no session that leaves its task unsolved is rewarded",
)

RELEASES = [
    Release(package="semver", old="3.0.1", new="3.0.2"),
    Release(package="deepmerge", old="1.1.0", new="1.1.1"),
    Release(package="simpleeval", old="0.9.13", new="1.0.0"),
    Release(package="pathspec", old="0.12.0", new="0.12.1"),
    Release(package="h11", old="0.13.0", new="0.14.0"),
    Release(package="unidiff", old="0.7.4", new="0.7.5"),
    Release(package="geojson", old="3.0.1", new="3.1.0"),
    Release(package="tinydb", old="4.7.1", new="4.8.0"),
    Release(package="json5", old="0.9.25", new="0.9.28"),
    Release(package="marshmallow", old="3.21.0", new="3.21.1"),
]
KEPT = cache_dir() / "honest-tasks" / "pypi.jsonl"
"""The tasks made of `RELEASES`, which stay for later runs."""

SOLUTIONS, GOLD_RUNS = 3, 3
MOST_LOST = 0.005
"""The share of sessions that the machinery may mask or fail."""

AGENT = """
import json, os, subprocess, sys, urllib.request
shell = {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}
messages = [{"role": "user", "content": sys.stdin.read()}]
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
while messages[-1]["role"] != "assistant":
    body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": shell}]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        messages.append(json.load(response)["choices"][0]["message"])
    for call in messages[-1].get("tool_calls") or []:
        command = ["bash", "-c", json.loads(call["function"]["arguments"])["command"]]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = done.stdout.decode(errors="replace")[-4000:]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
"""
"""An agent with a shell tool: lighter than the agent CLIs."""


@dataclass(kw_only=True)
class Graded:
    """A task and the grades of its solutions."""

    task: Task
    grades: list[tuple[Solution, EvaluationResult]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def alarms(self) -> list[str]:
        return [
            f"{self.task.instance_id}: {solution.name}: {grade.reward:g}, {grade.detail} ({solution.style})"
            for solution, grade in self.grades
            if grade.reward != 1.0
        ]

    def row(self) -> list[str]:
        rewards = Counter(
            "gold" if solution.name == "gold" else "other" for solution, grade in self.grades if grade.reward == 1.0
        )
        return [
            self.task.instance_id,
            "pytest" if self.task.log_parser == "pytest" else "unittest",
            str(len(self.task.FAIL_TO_PASS)),
            f"{rewards['gold']}/{GOLD_RUNS}",
            f"{rewards['other']}/{SOLUTIONS}",
            f"{sum(self.seconds) / len(self.seconds):.1f}",
            "\n".join(self.alarms) or "none",
        ]


async def grade(tasks: Sequence[Task], console: Console) -> list[Graded]:
    """Grade the solutions of each task as a rollout does, one after the other, so that the seconds mean something."""
    found: list[Graded] = []
    async with Bench(RuntimeSpec(name="bubblewrap"), cache_dir()) as bench:
        for task in tasks:
            async with bench.sandbox(task):
                pass  # the repository and the virtual environment are made now, not in the first grading
            graded = Graded(task=task)
            for solution in [*[gold(task)] * GOLD_RUNS, *solutions(task)]:
                begun = time.monotonic()
                graded.grades.append((solution, await bench.evaluate(task, solution.diff)))
                graded.seconds.append(time.monotonic() - begun)
            found.append(graded)
            console.print(f"{task.instance_id}: {len(graded.alarms)} false alarms", style="dim")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A task as one session finds it, and what the policy does about it."""

    task: Task
    script: dict[str, Any]
    solves: bool


def works(task: Task) -> Iterator[Work]:
    """Yield sessions of the task: each solution, one that gives up, and one that breaks a source file."""
    title, _, rest = task.problem_statement.strip().partition("\n")
    for solution in [gold(task), *solutions(task)]:
        own = f"{title} ({task.instance_id}, {solution.name})"  # one script for each: scripts are found by the title
        named = task.model_copy(update={"problem_statement": f"{own}\n{rest}", "patch": solution.diff.decode()})
        yield Work(task=named, script=reference_script(named), solves=True)
    source = next(line.removeprefix("--- a/") for line in task.patch.splitlines() if line.startswith("--- a/"))
    for name, command in (("gives up", "echo 'No idea.' > notes.txt"), ("breaks", f"echo 'def (' >> '{source}'")):
        own = f"{title} ({task.instance_id}, {name})"
        named = task.model_copy(update={"problem_statement": f"{own}\n{rest}"})
        script = {"match": own, "commands": ["ls -a", command, "git status"], "final_message": "I am not sure."}
        yield Work(task=named, script=script, solves=False)


async def run_sessions(tasks: Sequence[Task], count: int, harness: str, console: Console) -> list[tuple[Work, Episode]]:
    """Run sessions of all kinds of work in turn, through the gateway, the sandboxes and the grader."""
    kinds = [work for group in zip(*map(works, tasks), strict=True) for work in group]
    agent: dict[str, Any] = {"name": harness}
    if harness == "command":
        agent["command"] = ["python3", "-c", AGENT]
    with tempfile.TemporaryDirectory(prefix="polar-gym-honest-") as state:
        config = load_config(
            settings={
                "harness": agent,
                "runtime": "bubblewrap",
                "engine": {"name": "embedded", "scripts": [work.script for work in kinds]},
                "rollout": {"state": state, "timeout_seconds": 300},
            }
        )
        done: list[tuple[Work, Episode]] = []
        async with make_node(config, [work.task for work in kinds]) as node, asyncio.TaskGroup() as group:

            async def one(work: Work, index: int) -> None:
                done.append((work, await node.rollout(make_request(config, work.task), index)))
                if len(done) % 100 == 0:
                    lost = sum(episode.session.failure is not None for _, episode in done)
                    console.print(f"{len(done)} sessions, {lost} of them masked or failed", style="dim")

            for index, work in enumerate(islice(cycle(kinds), count)):
                group.create_task(one(work, index))
    return done


def check_sessions(done: Sequence[tuple[Work, Episode]], seconds: float, result: Result) -> Table:
    """Hold the sessions against the laws."""
    lost = [f"{work.script['match']}: {episode.session.failure}" for work, episode in done if episode.session.failure]
    graded = [(work, episode) for work, episode in done if not episode.session.failure]
    allowed = math.floor(len(done) * MOST_LOST)
    result.check(USABLE, lost if len(lost) > allowed else [])
    for law, wanted, solves in ((REWARDED, 1.0, True), (UNSOLVED, 0.0, False)):
        wrong = [(work, episode) for work, episode in graded if work.solves == solves and episode.reward != wanted]
        details = [(work, episode.evaluation.detail if episode.evaluation else "") for work, episode in wrong]
        result.check(law, [f"session: {work.script['match']}: {detail}" for work, detail in details])
    figures = {
        "sessions": len(done),
        "solved": sum(episode.reward == 1.0 for _, episode in graded),
        "unsolved": sum(episode.reward == 0.0 for _, episode in graded),
        "masked or failed": len(lost),
        "seconds": round(seconds, 1),
    }
    result.figures["sessions"] = {**figures, "lost": lost}
    table = Table(*figures, title="Honest sessions through the whole machinery", title_justify="left")
    table.add_row(*map(str, figures.values()))
    return table


def show_grades(found: Sequence[Graded], result: Result) -> Table:
    """Hold the grades against the laws."""
    table = Table(title="False alarms on honest solutions", title_justify="left")
    for heading in ("task", "tests", "F2P", "gold", "other solutions", "seconds a grading", "false alarms"):
        table.add_column(heading, overflow="fold")
    for graded in found:
        others = sum(solution.name != "gold" for solution, _ in graded.grades)
        result.check(THERE, [f"{graded.task.instance_id}: {others}"] * (others != SOLUTIONS))
        result.check(REWARDED, graded.alarms)
        table.add_row(*graded.row())
    result.figures["grades"] = {
        graded.task.instance_id: {
            "rewards": [[solution.name, grade.reward, grade.detail] for solution, grade in graded.grades],
            "seconds": [round(seconds, 2) for seconds in graded.seconds],
        }
        for graded in found
    }
    return table


def tasks_of(options: argparse.Namespace, console: Console) -> list[Task]:
    """Return the bundled tasks, and those made of releases, which are made where they are missing."""
    bundled = load_tasks(SUITE, Selection())
    if options.quick:
        return bundled
    if options.tasks:
        return [*bundled, *load_tasks(options.tasks, Selection())]
    known = {task.instance_id for task in load_tasks(KEPT, Selection())} if KEPT.exists() else set[str]()
    missing = [release for release in RELEASES if release.instance_id not in known]
    return [*bundled, *asyncio.run(make(KEPT, console, missing))]


def main() -> int:
    parser = make_parser("honest", __doc__, quick="the tasks made of releases, and all sessions except 30")
    parser.add_argument("--sessions", type=int, default=1000, help="how many (default: %(default)s; 0: none)")
    parser.add_argument("--harness", choices=["command", "pi"], default="command", help="default: %(default)s")
    parser.add_argument("--tasks", type=Path, help="take the tasks of this file instead of those made of releases")
    options = parse(parser, quick={"sessions": 30})
    result, console = Result("honest", LAWS, options), make_console()
    tasks = tasks_of(options, console)
    wanted = [] if options.quick or options.tasks else [release.instance_id for release in RELEASES]
    result.check(THERE, sorted({*wanted} - {task.instance_id for task in tasks}))
    console.print(show_grades(asyncio.run(grade(tasks, console)), result))
    begun = time.monotonic()
    done = asyncio.run(run_sessions(load_tasks(SUITE, Selection()), options.sessions, options.harness, console))
    console.print(check_sessions(done, time.monotonic() - begun, result))
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
