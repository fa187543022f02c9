"""The stage machine's laws, on a clock that jumps: nobody waits while a place is free, and tasks are served in turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.virtual_clock import VirtualClock
from polar_gym.config.run_config import Pools
from polar_gym.gateway.session.stages import Pool, Stages


def simulate(work: Callable[[], Coroutine[Any, Any, Any]]) -> float:
    """Run `work`; how long it took on its own clock."""
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(work())
        return runner.get_loop().time()


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Simulated:
    """A session that takes its time in each stage, and writes down when."""

    task: str = "t"
    init: float = 1.0
    running: float = 10.0
    postrun: float = 1.0
    runnable: bool = True
    prewarm_takes: float = 0.0
    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)

    async def _stage(self, name: str, seconds: float) -> None:
        self.began[name] = now()
        await asyncio.sleep(seconds)
        self.ended[name] = now()

    async def initialize(self) -> str | None:
        await self._stage("init", self.init)
        return "ready" if self.runnable else None

    def ready(self) -> None:
        self.began["ready"] = now()

    async def run(self, ready: str) -> None:
        await self._stage("run", self.running)

    async def prewarm(self, ready: str) -> None:
        await self._stage("prewarm", self.prewarm_takes)

    async def finish(self, ready: str | None) -> Simulated:
        await self._stage("postrun", self.postrun)
        return self


def conduct(sizes: Pools, sessions: list[Simulated]) -> Stages:
    """All of them at once, to their end; the stages as they are left."""
    stages: list[Stages] = []

    async def all_of_them() -> None:
        stages.append(Stages(sizes))
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(stages[0].conduct(session.task, session))

    simulate(all_of_them)
    return stages[0]


def overlap(sessions: list[Simulated], begin: Callable[[Simulated], float], end: Callable[[Simulated], float]) -> int:
    """The most that were in between at once."""
    changes = sorted([(end(s), -1) for s in sessions] + [(begin(s), 1) for s in sessions])
    most = current = 0
    for _, change in changes:
        current += change
        most = max(most, current)
    return most


seconds = st.integers(0, 20).map(float)
simulated = st.builds(Simulated, task=st.sampled_from("abc"), init=seconds, running=seconds, postrun=seconds)
sizes = st.integers(1, 4)


@given(
    st.lists(simulated, min_size=1, max_size=25),
    st.builds(Pools, init=sizes, ready=sizes, run=sizes, postrun=sizes),
)
def test_no_pool_holds_more_than_its_size_and_nothing_is_left(sessions: list[Simulated], pools: Pools) -> None:
    stages = conduct(pools, sessions)
    for name, size in (("init", pools.init), ("run", pools.run), ("postrun", pools.postrun)):
        assert overlap(sessions, lambda s: s.began[name], lambda s: s.ended[name]) <= size  # noqa: B023
    assert overlap(sessions, lambda s: s.began["ready"], lambda s: s.began["run"]) <= pools.ready
    waiting = overlap(sessions, lambda s: s.ended["init"], lambda s: s.began["run"])
    assert waiting <= pools.ready + pools.init, "sandboxes that are up and do not run are bounded"
    assert not any(stages.held.model_dump().values())


@given(
    st.lists(simulated, min_size=1, max_size=25),
    st.builds(Pools, init=sizes, ready=sizes, run=sizes, postrun=sizes),
)
def test_a_run_place_is_free_only_while_nobody_is_ready(sessions: list[Simulated], pools: Pools) -> None:
    """READY and POSTRUN never keep a RUN place from being used."""
    conduct(pools, sessions)
    for waiting in sessions:
        moment = waiting.began["ready"]
        if waiting.began["run"] > moment:
            busy = [s for s in sessions if s.began["run"] <= moment < s.ended["run"] or s.began["run"] == moment]
            assert len(busy) >= pools.run


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 30), st.integers(0, 5)), min_size=1), sizes)
def test_tasks_are_served_in_turn_and_their_sessions_in_order(arrivals: list[tuple[str, int, int]], size: int) -> None:
    """While a session waits that is its task's next, no other task is served twice."""
    events: list[tuple[str, str, int]] = []

    async def session(pool: Pool, number: int, task: str, at: float, holds: int) -> None:
        await asyncio.sleep(at)
        events.append(("comes", task, number))
        async with pool.place(task):
            events.append(("served", task, number))
            await asyncio.sleep(holds)

    async def all_of_them() -> None:
        pool = Pool(size)
        async with asyncio.TaskGroup() as group:
            for number, (task, at, holds) in enumerate(arrivals):
                # nobody comes in the moment in which a place is given on: who was first could not be told
                group.create_task(session(pool, number, task, at + number / 1024, holds))
        assert (pool.held, pool.waiting) == (0, 0)

    simulate(all_of_them)
    waiting: dict[str, list[int]] = {}
    served_since: dict[str, Counter[str]] = {}
    for kind, task, number in events:
        if kind == "comes":
            waiting.setdefault(task, []).append(number)
            served_since.setdefault(task, Counter())
            continue
        assert waiting[task].pop(0) == number, "first come, first served"
        for other, counts in served_since.items():
            if other != task and waiting.get(other):
                counts[task] += 1
                assert counts[task] <= 1, f"{task} was served twice while {other} waited"
        served_since[task] = Counter()
        if not waiting[task]:
            del served_since[task]


@given(st.data())
def test_cancelling_loses_no_place(data: st.DataObject) -> None:
    """Whoever is cancelled, and whenever, in the very moment of being served included."""
    size = data.draw(sizes)
    times = data.draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 9)), min_size=1))

    async def session(pool: Pool, at: int, holds: int) -> None:
        await asyncio.sleep(at)
        async with pool.place("t"):
            await asyncio.sleep(holds)

    async def all_of_them() -> None:
        pool = Pool(size)
        tasks = [asyncio.create_task(session(pool, at, holds)) for at, holds, _ in times]
        for task, (_, _, cancelled_at) in zip(tasks, times, strict=True):
            asyncio.get_running_loop().call_at(cancelled_at, task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (pool.held, pool.waiting) == (0, 0)

    simulate(all_of_them)


async def test_a_place_that_is_given_to_a_cancelled_session_goes_on_to_the_next() -> None:
    """Guards against a place that nobody holds: cancelled after it was served and before it knew."""
    pool = Pool(1)
    await pool.acquire("a")
    first, second = (asyncio.create_task(pool.acquire(task)) for task in "ab")
    await asyncio.sleep(0)
    pool.release()
    first.cancel()
    await asyncio.wait_for(second, 60)
    assert (pool.held, pool.waiting) == (1, 0)


def test_slow_evaluation_delays_no_agent() -> None:
    sessions = [Simulated(running=1, postrun=1000) for _ in range(10)]
    conduct(Pools(init=2, ready=1, run=1, postrun=1), sessions)
    assert max(session.ended["run"] for session in sessions) == 1 + 10


def test_a_session_that_cannot_run_takes_no_place_to_run() -> None:
    agent, broken = Simulated(running=1000), Simulated(runnable=False)
    conduct(Pools(init=2, ready=1, run=1, postrun=1), [agent, broken])
    assert broken.ended["postrun"] == 2


def test_every_init_worker_works_although_ready_is_small() -> None:
    """Guards against taking the place in READY before INIT begins: then one worker of four would work."""
    sessions = [Simulated(init=10, running=5) for _ in range(40)]
    conduct(Pools(init=8, ready=1, run=4, postrun=4), sessions)
    assert max(session.ended["run"] for session in sessions) == 10 + 40 / 4 * 5


def test_agents_of_varied_length_keep_the_places_busy() -> None:
    """95 % of the ideal schedule with READY a tenth of the slots, INIT as slow as half a run."""
    lengths = [10 + 7 * (number % 13) for number in range(400)]
    sessions = [Simulated(init=20, running=length, postrun=30) for length in lengths]
    conduct(Pools(init=20, ready=4, run=40, postrun=32), sessions)
    last_begun = max(session.began["run"] for session in sessions)
    first_begun = min(session.began["run"] for session in sessions)
    busy = sum(min(s.ended["run"], last_begun) - s.began["run"] for s in sessions if s.began["run"] < last_begun)
    assert busy / (40 * (last_begun - first_begun)) >= 0.95


@pytest.mark.parametrize(("places", "expected"), [(1, 1), (0, 0), (4, 3)])
def test_what_grading_needs_is_prepared_while_the_agent_runs(places: int, expected: int) -> None:
    sessions = [Simulated(prewarm_takes=1000) for _ in range(3)]
    conduct(Pools(init=3, ready=3, run=3, postrun=3, prewarm=places), sessions)
    early = [s for s in sessions if s.began.get("prewarm", 1000) < s.ended["run"]]
    assert len(early) == expected
    assert max(session.ended["postrun"] for session in sessions) == 12, "and delays nothing"
