"""Runs the stage machine on a virtual clock: how busy RUN is, against the schedule that never leaves RUN idle:
`python -m benchmarks stages`.

`polar_gym.gateway.session.stages` conducts simulated sessions; only time is simulated. The times are drawn from
distributions like those of agentic coding workloads. Sandboxes take a minute to come up and sometimes ten. Harnesses
run for ten minutes with a long tail. Evaluations take between seconds and many minutes. INIT and POSTRUN have the
workers that their mean times ask for: just as many, or a quarter more.

Utilisation is the share of all RUN places that is in use. It counts from the time at which RUN can have been filled to
the time at which the work runs out. *From cold* counts from the first second, against a schedule whose sandboxes all
come up at once.

The contrasts are one pool for everything: each worker takes a session from its beginning to its end. With as many
workers as RUN has places, workers that set up or grade leave the engine idle. With as many workers as INIT, RUN and
POSTRUN have together, and a gate before the engine, the engine is as busy as with stages. But nothing limits the other
work: at a start, all workers set up a sandbox at once, on one machine. The simulation does not count that cost.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.report import Figure, Goal, Plot, Section, Table
from benchmarks.virtual_clock import VirtualClock
from polar_gym.config.run_config import Pools
from polar_gym.gateway.session.stages import Pool, Stages

SLOTS = (64, 128, 256, 512, 1024)
READY_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
"""READY's size as shares of the RUN places; READY has at least one place."""
ROUNDS = 12
"""Sessions for each RUN place."""
MORE = 1.25
WARM_AFTER = 1200.0
"""The time in seconds at which RUN can have been filled."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A distribution of seconds with this median; `sigma` is the spread of their logarithm."""

    median: float
    sigma: float

    @property
    def mean(self) -> float:
        return self.median * math.exp(self.sigma**2 / 2)

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        return random.lognormal(math.log(self.median), self.sigma, count)


INIT, AGENT, EVALUATION = LogNormal(60, 0.8), LogNormal(600, 0.6), LogNormal(120, 1.0)


@dataclass
class Log:
    """The times at which places were taken (+1) and given back (-1)."""

    runs: list[tuple[float, int]] = field(default_factory=list)
    sandboxes: list[tuple[float, int]] = field(default_factory=list)
    inits: list[tuple[float, int]] = field(default_factory=list)

    def busy(self, begin: float, end: float) -> float:
        """Return the seconds of RUN places in use between two times, summed over all places."""
        total, level, since = 0.0, 0, 0.0
        for time, change in sorted(self.runs):
            total += level * max(0.0, min(time, end) - max(since, begin))
            level, since = level + change, time
        return total


def most(events: list[tuple[float, int]]) -> int:
    """Return the highest number of places in use at once."""
    return int(np.cumsum([change for _, change in sorted(events)]).max())


@dataclass
class Simulated:
    """A session that takes its time in each stage."""

    init: float
    agent: float
    evaluation: float
    log: Log

    async def initialize(self) -> Log:
        self.log.sandboxes.append((now(), 1))
        self.log.inits.append((now(), 1))
        await asyncio.sleep(self.init)
        self.log.inits.append((now(), -1))
        return self.log

    def ready(self) -> None:
        """Do nothing: the stage of a simulated session is not reported."""

    async def run(self, ready: Log) -> None:
        self.log.runs.append((now(), 1))
        await asyncio.sleep(self.agent)
        self.log.runs.append((now(), -1))

    async def prewarm(self, ready: Log) -> None:
        """Do nothing: a simulated session has no grading sandbox."""

    async def finish(self, ready: Log | None) -> None:
        await asyncio.sleep(self.evaluation)
        self.log.sandboxes.append((now(), -1))


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Load:
    """Sessions for a number of RUN places, the same each time."""

    slots: int
    log: Log = field(default_factory=Log)

    def __post_init__(self) -> None:
        random, count = np.random.default_rng(0), self.slots * ROUNDS
        init, agent, evaluation = (times.draw(random, count).tolist() for times in (INIT, AGENT, EVALUATION))
        drawn = zip(init, agent, evaluation, strict=True)
        self.sessions = [Simulated(*times, self.log) for times in drawn]
        self.end = sum(each.agent for each in self.sessions) / self.slots - 3 * AGENT.mean
        """The end of the time in which every place has work, under any schedule."""

    @property
    def utilisation(self) -> float:
        return self.log.busy(WARM_AFTER, self.end) / (self.slots * (self.end - WARM_AFTER))

    def conduct(self, one: Callable[[Simulated], Coroutine[Any, Any, None]]) -> Load:
        async def every() -> None:
            await asyncio.gather(*(one(session) for session in self.sessions))

        with asyncio.Runner(loop_factory=VirtualClock) as runner:
            runner.run(every())
        return self


def workers(slots: int, times: LogNormal, more: float) -> int:
    return math.ceil(more * slots * times.mean / AGENT.mean)


def staged(slots: int, ready: int, more: float = MORE, init: int | None = None) -> Load:
    post = workers(slots, EVALUATION, more)
    sizes = Pools(init=init or workers(slots, INIT, more), ready=max(1, ready), run=slots, postrun=post, prewarm=0)
    stages = Stages(sizes)
    return Load(slots).conduct(lambda session: stages.conduct("task", session))


def one_pool(slots: int, size: int) -> Load:
    """Simulate workers that do all of a session. The engine serves as many sessions as RUN has places."""
    pool, engine = Pool(size), Pool(slots)

    async def whole(session: Simulated) -> None:
        async with pool.place("task"):
            ready = await session.initialize()
            async with engine.place("task"):
                await session.run(ready)
            await session.finish(ready)

    return Load(slots).conduct(whole)


def measure(quick: bool) -> Section:
    slots = SLOTS[:2] if quick else SLOTS
    sizes, least = _by_size(slots)
    swept, curves = _by_ready((slots[0], slots[-1]))
    return Section(
        title="Stages",
        text=(__doc__ or "").partition("\n\n")[2].strip(),
        tables=[sizes, swept],
        goals=[
            Goal(
                claim="stages: at least 95 % of the ideal with READY >= 10 % of the slots, 64 to 1,024 slots",
                measured=f"{least:.1%} at least",
                held=least >= 0.95,
            )
        ],
        plots=[
            Plot(name="stages", title="RUN utilisation", x="READY, % of RUN places", y="% of places", curves=curves)
        ],
    )


def _by_size(slots: Sequence[int]) -> tuple[Table, float]:
    """Return a table of all sizes with READY at a tenth of RUN, and the least utilisation."""
    rows: list[tuple[Figure, ...]] = []
    least = 1.0
    for each in slots:
        stages, at_once = staged(each, each // 10), staged(each, each * ROUNDS, init=each * ROUNDS)
        cold = stages.log.busy(0, stages.end) / at_once.log.busy(0, stages.end)
        everybody = each + sum(workers(each, times, MORE) for times in (INIT, EVALUATION))
        few, many = one_pool(each, each), one_pool(each, everybody)
        least = min(least, stages.utilisation, cold)
        busy = (stages.utilisation, cold, few.utilisation, many.utilisation)
        rows.append((each, *busy, most(stages.log.inits), most(many.log.inits)))
    columns = (
        "RUN places",
        "stages",
        "stages, from cold",
        "one pool, RUN's size",
        "one pool, all workers",
        "set up at once: stages",
        "one pool, all workers",
    )
    return Table(columns=columns, rows=rows, caption="READY is a tenth of RUN, a quarter more workers:"), least


def _by_ready(slots: Sequence[int]) -> tuple[Table, dict[str, Sequence[tuple[float, float]]]]:
    rows: list[tuple[Figure, ...]] = []
    curves: dict[str, Sequence[tuple[float, float]]] = {}
    for each in slots:
        just = [staged(each, round(share * each), 1.0) for share in READY_SHARES]
        more = [staged(each, round(share * each)) for share in READY_SHARES]
        for name, loads in (("workers just enough", just), ("a quarter more", more)):
            points = zip(READY_SHARES, loads, strict=True)
            curves[f"{each} RUN places, {name}"] = [(100 * share, 100 * load.utilisation) for share, load in points]
        for share, one, other in zip(READY_SHARES, just, more, strict=True):
            rows.append((each, f"{share:.0%}", one.utilisation, other.utilisation, most(other.log.sandboxes)))
    columns = ("RUN places", "READY", "workers just enough", "a quarter more", "sandboxes at most")
    return Table(columns=columns, rows=rows, caption="READY against utilisation:"), curves
