"""Show how busy the places to run are, with staged pools and with one pool for everything: `make show-utilisation`.

The node and its sandboxes are real: INIT takes seconds, harnesses take from one second to many, and grading takes
seconds too. Each harness's time is drawn beforehand and is the same in both runs. The ideal schedule has the same runs,
as long as they took, in the same order on the same places, and begins each one at the moment when a place is free. The
law bounds the share of the ideal: the ideal schedule's time over the real time, from the first run's beginning to the
last run's end.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from polar_gym.config.run_config import Pools
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.session.stages import Staged, Stages
from polar_gym.schema import EvaluatorSpec, RuntimeSpec, Session, Status, TaskRequest
from tests.show.result import Result, make_parser, parse
from tests.support.sessions import asking, task

R = TypeVar("R")
T = TypeVar("T")
WANTED = 0.95
BUSY, COMPLETED = LAWS = (f"staged pools reach {WANTED:.0%} of the ideal schedule", "every session completes")


class OnePool(Stages):
    """No stages: a worker takes a session from its beginning to its end."""

    async def conduct(self, task: str, session: Staged[R, T]) -> T:
        async with self.run.place(task):
            if (ready := await session.initialize()) is not None:
                session.ready()
                await session.run(ready)
            return await session.finish(ready)


@dataclass(frozen=True, slots=True)
class Runs:
    """The times in which each harness ran, in the order of their beginnings."""

    spans: Sequence[tuple[float, float]]
    places: int
    seconds: float
    """From the first INIT to the last POSTRUN."""
    completed: int

    @property
    def window(self) -> float:
        return max(end for _, end in self.spans) - self.spans[0][0]

    @property
    def busy(self) -> float:
        """The share of the places' time, from the first run to the last one's end, in which a harness ran."""
        return sum(end - start for start, end in self.spans) / (self.places * self.window)

    @property
    def ideal_window(self) -> float:
        free = [0.0] * self.places
        for start, end in self.spans:
            heapq.heappush(free, heapq.heappop(free) + end - start)
        return max(free)

    @property
    def of_the_ideal(self) -> float:
        return self.ideal_window / self.window


async def measure(given: argparse.Namespace, pools: Pools, staged: bool) -> Runs:
    dice = random.Random(given.seed)
    started: dict[str, float] = {}
    ended: dict[str, float] = {}

    def watch(session: Session) -> None:
        if session.status is Status.RUNNING:
            started[session.session_id] = time.monotonic()
        elif session.status in (Status.BUILDING, Status.ERROR):
            ended.setdefault(session.session_id, time.monotonic())

    engine = EmbeddedEngine(EmbeddedOptions(scripts=[Script(final_message="Done.")]))
    with tempfile.TemporaryDirectory(prefix="pg-utilisation-") as directory:
        async with Node(engine, cache=Path(directory) / "cache", pools=pools) as node:
            node.stages = node.stages if staged else OnePool(pools)
            begun = time.monotonic()
            requests = [_request(given, dice, number) for number in range(given.sessions)]
            episodes = await asyncio.gather(*(node.rollout(request, 0, watch) for request in requests))
            seconds = time.monotonic() - begun
    spans = sorted((start, ended[session_id]) for session_id, start in started.items())
    return Runs(spans, pools.run, seconds, sum(episode.reward == 1.0 for episode in episodes))


def _request(given: argparse.Namespace, dice: random.Random, number: int) -> TaskRequest:
    agent_seconds = min(given.longest, 1 + dice.expovariate(1 / given.agent_seconds))
    grading = {"name": "test_on_output", "command": f"sleep {dice.uniform(0.5, 1.5) * given.grading_seconds:.2f}"}
    runtime = {"name": "tests.faults.slow_start:SlowStart", "start_seconds": given.start_seconds}
    return task(
        task_id=f"t{number}",
        agent=asking(f"ask(); import time; time.sleep({agent_seconds:.2f})"),
        runtime=RuntimeSpec.model_validate(runtime),
        evaluator=EvaluatorSpec.model_validate(grading),
    )


def table_of(both: Mapping[str, Runs], options: argparse.Namespace) -> Table:
    """Return the two runs side by side."""
    table = Table("", *both, title=f"{options.sessions} sessions, {options.run} places to run")
    rows = {
        "completed": lambda runs: str(runs.completed),
        "all done after (s)": lambda runs: f"{runs.seconds:.1f}",
        "first run's beginning to last run's end (s)": lambda runs: f"{runs.window:.1f}",
        "the ideal schedule of these runs (s)": lambda runs: f"{runs.ideal_window:.1f}",
        "busy share of the places to run": lambda runs: f"{runs.busy:.1%}",
        "of the ideal": lambda runs: f"{runs.of_the_ideal:.1%}",
    }
    for what, say in rows.items():
        table.add_row(what, *map(say, both.values()))
    return table


async def measure_both(options: argparse.Namespace) -> dict[str, Runs]:
    """Run the sessions with staged pools, then with one pool."""
    pools = Pools(init=options.run, ready=options.run, run=options.run, postrun=options.run, prewarm=0)
    return {"staged pools": await measure(options, pools, True), "one pool": await measure(options, pools, False)}


def main() -> int:
    parser = make_parser("utilisation", __doc__, quick="most sessions")
    parser.add_argument("--sessions", type=int, default=80)
    parser.add_argument("--run", type=int, default=8, help="places to run")
    parser.add_argument("--start-seconds", type=float, default=2.0)
    parser.add_argument("--agent-seconds", type=float, default=3.0, help="more than one second, on average")
    parser.add_argument("--grading-seconds", type=float, default=2.0)
    parser.add_argument("--longest", type=float, default=12.0, help="the most seconds that a harness takes")
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, quick={"sessions": 24})
    result = Result("utilisation", LAWS, options)
    both = asyncio.run(measure_both(options))
    Console(width=100).print(table_of(both, options))
    share = both["staged pools"].of_the_ideal
    result.check(BUSY, [f"{share:.1%}"] * (share < WANTED))
    for name, runs in both.items():
        result.check(
            COMPLETED, [f"{name}: {runs.completed} of {options.sessions}"] * (runs.completed < options.sessions)
        )
        result.figures[name] = {"seconds": runs.seconds, "busy": runs.busy, "of_the_ideal": runs.of_the_ideal}
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
