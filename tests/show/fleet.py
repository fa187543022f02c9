"""Run the rollout service with a thousand nodes on a virtual clock: `make show-fleet`.

Scheduler, dispatcher, leases, heartbeats, book and store are those of the service. The link is in memory, and nodes and
sessions are stand-ins: a session waits for a place, takes its time and delivers a small episode. Time passes only
while every part waits, and never while the store writes. *calm*: nothing goes wrong. *storm*: nodes die and come back
as other processes, some are slow, a part of them is cut off for longer than a lease, and the server is started again.
Last, on the real clock: how many sessions a second one server process takes, places and stores, among many node
processes that run nothing, with episodes of 200 kB, beside the syncs a second of its disk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import logging
import os
import random
import resource
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from benchmarks.virtual_clock import VirtualClock
from polar_gym.console import make_console
from polar_gym.protocol import Delivery, Dispatch, Generation, GenerationAnswer, Heartbeat, StageCounts, Weights
from polar_gym.schema import Retries, Session, Status, Timing
from polar_gym.service import book, bounds, dispatcher, service
from polar_gym.service.bounds import Limits
from polar_gym.service.fleet import ReplacedError
from polar_gym.service.node_link import NodeBusyError, NodeUnreachableError
from polar_gym.service.service import RolloutService
from polar_gym.service.store import Store
from polar_gym.service.task import Task
from tests.lifecycle.peer_node import ENGINE, episode_of, make_request
from tests.show.result import Result, make_parser, parse
from tests.support.node_processes import over_http

BUSY, ONCE, NOTICED, TAKEN, RATE, REAL = LAWS = (
    "without faults, the nodes' places are as busy as 95 % of the ideal schedule",
    "every sample ends, and exactly one episode of it is accepted",
    "a dead node's sessions are queued again within its lease and two seconds",
    "the server's memory grows by at most 40 kB for each open sample",
    "one server takes, places and stores at least 500 sessions a second",
    "among node processes, every sample has a usable episode",
)
PARTS = {"calm": (BUSY, ONCE, TAKEN), "storm": (ONCE, NOTICED), "real": (RATE, REAL)}
"""Name of a part -> its laws."""
LEASE = 20.0
BEAT = 5.0
SAMPLES = 16
"""Of each task."""
MEAN_SECONDS, LONGEST_SECONDS = 300.0, 1200.0
EPISODE_BYTES = 200_000
RETRIES = Retries(node_death=50)
"""So many that no sample gives up: in a small fleet each node dies often."""
OPEN = 100_000
"""Samples that trainers keep open."""
T = TypeVar("T")


class Clock(VirtualClock):
    """A virtual clock that stands still while threads work."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = 0
        jump = self._selector.select  # pyright: ignore[reportAttributeAccessIssue]
        wait = super(type(self._selector), self._selector).select  # pyright: ignore[reportAttributeAccessIssue]
        self._selector.select = lambda timeout=None: (  # pyright: ignore[reportAttributeAccessIssue]
            wait(None if timeout is None or timeout > 0 else 0) if self.busy else jump(timeout)
        )

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        self.busy += 1
        done = super().run_in_executor(executor, func, *args)  # pyright: ignore[reportArgumentType]
        done.add_done_callback(lambda _: self._ended())
        return done

    def _ended(self) -> None:
        self.busy -= 1

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        with self.working():
            await super().shutdown_default_executor(timeout)  # pyright: ignore[reportCallIssue]

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1.8e9 + self.now


@dataclass(frozen=True, slots=True)
class _Time:
    """What the service's modules take for the module `time`."""

    monotonic: Callable[[], float]
    time: Callable[[], float]


class SimulatedStore(Store):
    """The store, for which the virtual clock waits."""

    async def _run(self, work: Callable[..., T]) -> T:
        clock = asyncio.get_running_loop()
        assert isinstance(clock, Clock)
        with clock.working():
            return await super()._run(work)


@dataclass(eq=False)
class Node:
    """A node of stand-ins: an order waits, takes a place, and ends with an episode."""

    world: World
    name: str
    speed: float
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    reachable: bool = True
    alive: bool = True
    held: dict[tuple[str, int], Session] = field(default_factory=dict)
    waiting: deque[Dispatch] = field(default_factory=deque)
    running: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def beat(self) -> Heartbeat:
        return Heartbeat(
            node=self.name,
            url=self.name,
            incarnation=self.incarnation,
            engine=ENGINE,
            engine_key=str(hash(self.name) % 50),
            places=self.world.places,
            held=StageCounts(run=self.running, ready=len(self.waiting)),
            sessions=list(self.held.values()),
        )

    async def live(self) -> None:
        """Send heartbeats, the first at a chance moment."""
        await asyncio.sleep(self.world.chance.random() * BEAT)
        while self.alive:
            if self.reachable and self.world.service is not None:
                with contextlib.suppress(ReplacedError):
                    answer = await self.world.service.heartbeat(self.beat())
                    for session_id in answer.cancel:
                        self.give_up(session_id)
            await asyncio.sleep(BEAT)

    def give_up(self, session_id: str) -> None:
        for key in [key for key in self.held if key[0] == session_id]:
            del self.held[key]

    def take(self, order: Dispatch) -> None:
        if len(self.waiting) >= self.world.places.ready and self.running >= self.world.places.run:
            raise NodeBusyError("no place")
        key = order.session_id, order.attempt
        if key in self.held:
            return
        self.held[key] = Session(
            session_id=order.session_id,
            attempt=order.attempt,
            task_id=order.request.task_id,
            sample_index=order.sample_index,
            harness="command",
            node=self.name,
            status=Status.READY,
        )
        self.waiting.append(order)
        self.next()

    def next(self) -> None:
        while self.alive and self.waiting and self.running < self.world.places.run:
            order = self.waiting.popleft()
            if (order.session_id, order.attempt) in self.held:
                self.running += 1
                task = asyncio.create_task(self.run(order))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

    async def run(self, order: Dispatch) -> None:
        world, key = self.world, (order.session_id, order.attempt)
        seconds = world.seconds_of(order.session_id) / self.speed
        self.held[key].status, self.held[key].timing = Status.RUNNING, Timing(running=seconds)
        await asyncio.sleep(seconds)
        self.running -= 1
        world.busy_seconds += seconds
        self.next()
        episode = episode_of(order, timing=Timing(running=seconds), node=self.name)
        while self.alive and key in self.held:
            if self.reachable and world.service is not None:
                await world.service.deliver(self.name, Delivery(attempt=order.attempt, episode=episode))
                self.held.pop(key, None)
            else:
                await asyncio.sleep(BEAT)

    def die(self) -> None:
        self.alive = False
        for task in self.tasks:
            task.cancel()


class Link:
    """The server's requests to nodes, in memory."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _node(self, url: str) -> Node:
        node = self._world.nodes[url]
        if not (node.alive and node.reachable):
            raise NodeUnreachableError("it does not answer")
        return node

    async def dispatch(self, url: str, order: Dispatch) -> None:
        self._node(url).take(order)

    async def cancel(self, url: str, session_id: str, attempt: int) -> None:
        self._node(url).held.pop((session_id, attempt), None)

    async def generation(self, url: str, order: Generation) -> GenerationAnswer:
        return GenerationAnswer(paused=order.paused, in_flight=0)

    async def weights(self, url: str, order: Weights) -> GenerationAnswer:
        return GenerationAnswer(paused=False, in_flight=0, weight_version=order.version)


class World:
    """Server, nodes and trainers."""

    def __init__(self, options: argparse.Namespace, directory: Path, *, storm: bool) -> None:
        self.options, self.directory, self.storm = options, directory, storm
        self.chance = random.Random(7)
        self.places = StageCounts(init=0, ready=max(1, options.places // 4), run=options.places, postrun=options.places)
        self.service: RolloutService | None = None
        slow = {name for name in range(options.nodes) if storm and self.chance.random() < 0.05}
        self.nodes = {
            f"n{number}": Node(self, f"n{number}", 0.33 if number in slow else 1.0) for number in range(options.nodes)
        }
        self.busy_seconds = 0.0
        self.notice: list[float] = []
        """How long after a node's death its sessions were queued again."""
        self.open_samples: list[tuple[int, int]] = []
        """Samples in the book, and bytes of this process."""
        self.faults: Counter[str] = Counter()
        self._begun: list[asyncio.Task[None]] = []

    def seconds_of(self, session_id: str) -> float:
        """Return how long a session takes: a few take long."""
        return min(LONGEST_SECONDS, random.Random(session_id).lognormvariate(0, 1) * MEAN_SECONDS / 1.65)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        store = SimulatedStore(self.directory / "state")
        link: Any = Link(self)
        async with RolloutService(store, link, Limits(lease_seconds=LEASE)) as self.service:
            yield
            self.service, ended = None, self.service
        assert not ended.book.failed.done(), ended.book.failed
        await store.close()

    async def go(self) -> float:
        """Run all tasks to their end, and return the virtual seconds that this took."""
        loop = asyncio.get_running_loop()
        started, tasks = loop.time(), self.options.sessions // SAMPLES
        names = deque(f"t{number}" for number in range(tasks))
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.serving())
            self._begun = [asyncio.create_task(node.live()) for node in self.nodes.values()]
            faults = asyncio.create_task(self._storm(stack)) if self.storm else None
            try:
                while names or (self.service is None or self.service.book.live):
                    while names and self.service is not None and self.service.book.open_samples < OPEN:
                        await self.service.submit(make_request(names.popleft(), num_samples=SAMPLES, retries=RETRIES))
                    if self.service is not None:
                        self.open_samples.append((self.service.book.open_samples, _resident()))
                    await asyncio.sleep(1.0)
                return loop.time() - started
            finally:
                for task in (*self._begun, *([faults] if faults else [])):
                    task.cancel()
                for node in self.nodes.values():
                    node.die()
                await asyncio.gather(*self._begun, *([faults] if faults else []), return_exceptions=True)

    async def _storm(self, stack: contextlib.AsyncExitStack) -> None:
        """Let things go wrong, one after another, until the run ends."""
        await asyncio.sleep(60)
        for moment in range(1_000_000):
            await asyncio.sleep(20)
            if moment == 3:
                self.faults["restarts of the server"] += 1
                await stack.aclose()
                await stack.enter_async_context(self.serving())
            elif moment % 20 == 5:
                cut = self.chance.sample(sorted(self.nodes), max(1, len(self.nodes) // 10))
                self.faults["nodes cut off"] += len(cut)
                for name in cut:
                    self.nodes[name].reachable = False
                await asyncio.sleep(3 * LEASE)
                for name in cut:
                    self.nodes[name].reachable = True
            else:
                await self._kill([name for name in sorted(self.nodes) if self.chance.random() < 0.01])

    async def _kill(self, names: Sequence[str]) -> None:
        """Kill nodes, measure how long the server takes to notice, and start them again."""
        loop, before = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        for name in names:
            self.nodes[name].die()
            self.faults["nodes killed"] += 1
        while self.service is not None and any(name in self.service.fleet.members for name in names):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        if names:
            self.notice.append(loop.time() - before)
        for name in names:
            self.nodes[name] = Node(self, name, self.nodes[name].speed)
            self._begun.append(asyncio.create_task(self.nodes[name].live()))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ideal(world: World, ended: Sequence[Task]) -> float:
    """Return the seconds of a schedule in which each session begins, in turn, as soon as any place is free."""
    free = [0.0] * (world.options.nodes * world.options.places)
    for session_id in (sample for task in ended for sample in task.samples):
        heapq.heappush(free, heapq.heappop(free) + world.seconds_of(session_id))
    return max(free)


async def ended_tasks(directory: Path) -> tuple[list[Task], Counter[str]]:
    """Return the tasks of a store, and how many episodes of each sample were accepted."""
    store = SimulatedStore(directory / "state")
    try:
        names = await store.list_tasks(10_000_000, None, None)
        tasks = [task for name in names if (task := await store.find_task(name)) is not None]
        rows = await store._execute("SELECT session_id, SUM(accepted) FROM episodes GROUP BY session_id")
        return tasks, Counter({row[0]: row[1] for row in rows})
    finally:
        await store.close()


def simulate(options: argparse.Namespace, result: Result, *, storm: bool) -> dict[str, Any]:
    """Run one simulation, check its laws, and return its figures."""
    clock, name = Clock(), "storm" if storm else "calm"
    modules: tuple[Any, ...] = (book, bounds, dispatcher, service)
    for module in modules:
        module.time = _Time(clock.monotonic, clock.wall)
    cpu, began = time.process_time(), time.monotonic()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="pg-fleet-") as directory,
            asyncio.Runner(loop_factory=lambda: clock) as run,
        ):
            world = World(options, Path(directory), storm=storm)
            seconds = run.run(world.go())
            cpu, real = time.process_time() - cpu, time.monotonic() - began
            tasks, accepted = run.run(ended_tasks(world.directory))
    finally:
        for module in modules:
            module.time = time
    samples = [sample for task in tasks for sample in task.samples.values()]
    wrong = [f"{name}: {s.session.session_id}: {s.phase}" for s in samples if not s.usable]
    wrong += [f"{name}: {s}: {count} accepted" for s, count in accepted.items() if count != 1]
    if len(samples) != options.sessions // SAMPLES * SAMPLES:
        wrong.append(f"{name}: {len(samples)} samples")
    result.check(ONCE, wrong)
    best = ideal(world, tasks[::-1])
    busy = best / seconds
    if storm:
        late = [f"{each:.1f} s" for each in world.notice if each > LEASE + 2]
        result.check(NOTICED, late if world.notice else ["no node died"])
    else:
        result.check(BUSY, [] if busy >= 0.95 else [f"{busy:.1%}"])
        few, most = min(world.open_samples), max(world.open_samples)
        growth = (most[1] - few[1]) / max(1, most[0] - few[0])
        result.check(TAKEN, [] if growth <= 40_000 else [f"{growth:.0f} bytes"])
    return {
        "nodes": options.nodes,
        "places": options.places,
        "sessions": len(samples),
        "virtual_seconds": round(seconds),
        "of_the_ideal": round(busy, 4),
        "cpu_ms_a_session": round(1000 * cpu / max(1, len(samples)), 2),
        "real_seconds": round(real),
        "resident_mb": round(max(each[1] for each in world.open_samples) / 1e6),
        "noticed_seconds": [round(statistics.median(world.notice), 1), round(max(world.notice), 1)]
        if world.notice
        else None,
        "attempts": sum(sample.session.attempt + 1 for sample in samples),
        "faults": dict(world.faults),
    }


# On the real clock ----------------------------------------------------------------------------------------------------


def syncs(directory: Path, seconds: float = 2.0) -> float:
    """Return how often a second the disk syncs 4 kB."""
    with (directory / "synced").open("wb") as file:
        began, count = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            count += 1
        return count / (time.monotonic() - began)


async def on_the_real_clock(options: argparse.Namespace, result: Result) -> Table:
    """Run sessions among node processes, check their laws, and return a table of the figures."""
    sessions = options.real_sessions // SAMPLES * SAMPLES
    with tempfile.TemporaryDirectory(prefix="pg-fleet-", dir=".") as name:
        found = await over_http(sessions, options.node_processes, SAMPLES, EPISODE_BYTES, Path(name))
        found["disk_syncs_a_second"] = round(syncs(Path(name)))
    result.figures["node_processes"] = found
    result.check(REAL, [f"{found['not_usable']} samples"] if found["not_usable"] else [])
    result.check(RATE, [] if found["sessions_a_second"] >= 500 else [f"{found['sessions_a_second']}"])
    table = Table(title="one server and its nodes, on the real clock", title_justify="left", show_header=False)
    for name, value in found.items():
        table.add_row(name.replace("_", " "), str(value))
    return table


def main() -> int:
    parser = make_parser("fleet", __doc__, quick="most nodes, places and sessions")
    parser.add_argument("--nodes", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--places", type=int, default=64, help="to run, of each node (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=200_000, help="default: %(default)s")
    parser.add_argument("--real-sessions", type=int, default=10_000, help="on the real clock (default: %(default)s)")
    parser.add_argument("--node-processes", type=int, default=100, help="on the real clock (default: %(default)s)")
    parser.add_argument("--only", choices=PARTS, nargs="*", default=list(PARTS), help="only these parts")
    few = {"nodes": 50, "places": 16, "sessions": 8_000, "real_sessions": 1_600, "node_processes": 10}
    options = parse(parser, quick=few)
    logging.disable(logging.WARNING)
    laws = [law for law in LAWS if any(law in PARTS[part] for part in options.only)]
    result, console = Result("fleet", laws, options), make_console()
    table = Table(
        "simulation", "nodes x places", "sessions", "attempts", "of the ideal", "CPU ms a session", "MB", "faults"
    )
    for name in [part for part in options.only if part != "real"]:
        found = result.figures[name] = simulate(options, result, storm=name == "storm")
        counts = (f"{found['nodes']} x {found['places']}", found["sessions"], found["attempts"])
        shown = (f"{found['of_the_ideal']:.1%}", found["cpu_ms_a_session"], found["resident_mb"])
        table.add_row(
            name, *map(str, (*counts, *shown)), ", ".join(f"{n} {what}" for what, n in found["faults"].items())
        )
    if table.rows:
        console.print(table)
    if "real" in options.only:
        console.print(asyncio.run(on_the_real_clock(options, result)))
    result.figures["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
