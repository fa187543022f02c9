"""The stages that sessions pass through: pools with sizes of their own, and who is let in next.

    queue -> [INIT] -> [READY] -> [RUN] -> queue -> [POSTRUN] -> done

What is scarce is RUN: the engine's throughput, and most of a session's time. A RUN place must never be free while a
session could use it, so sandboxes are made ahead, as far as READY has room, and POSTRUN is apart: it neither holds a
RUN place nor waits for one.

INIT begins when an INIT worker is free, and not only when there is room in READY already: a session needs that room at
the end of its INIT, and by then there mostly is some. One that finds none keeps its INIT worker until there is. So the
sandboxes that are up and do not run are at most `ready + init`, no INIT begins later than that bound makes it, and a
session in READY holds no worker. (To take the place in READY before INIT begins would let only `ready` workers work,
and leave RUN places empty after every burst of sessions that end.)

Every pool serves the tasks in turn, and the sessions of one task first come, first served: a task of a thousand samples
does not keep one with a single sample waiting.

There is no HTTP here, no file, and no clock but the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from typing import Protocol, TypeVar

from polar_gym.config.run_config import Pools
from polar_gym.protocol import StageCounts

R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Pool:
    """A number of places, given to the tasks in turn.

    Invariant: nobody waits while a place is free. While a session waits, no other task is served more often than its
    own is, plus one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.held = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """The tasks in the order of their turns; none is empty."""

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def place(self, task: str) -> AsyncIterator[None]:
        await self.acquire(task)
        try:
            yield
        finally:
            self.release()

    async def acquire(self, task: str) -> None:
        if self.held < self.size:
            self.held += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(task, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(task, turn)
            else:  # the place was given to it in the same moment
                self.release()
            raise

    def release(self) -> None:
        """Give a place back, or on to who is next."""
        while self._waiting:
            task, turns = next(iter(self._waiting.items()))
            turn = turns.popleft()
            if turns:
                self._waiting.move_to_end(task)
            else:
                del self._waiting[task]
            if not turn.cancelled():
                turn.set_result(None)
                return
        self.held -= 1

    def _forget(self, task: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(task)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[task]


class Staged(Protocol[R, T_co]):
    """What passes through the stages. R: what `initialize` makes for the stages after it."""

    async def initialize(self) -> R | None:
        """None: there is nothing to run, go on with `finish`."""
        ...

    def ready(self) -> None:
        """It is in READY from now on."""
        ...

    async def run(self, ready: R) -> None: ...

    async def prewarm(self, ready: R) -> None:
        """Called while `run` runs, if there is a place: prepare what `finish` will need. Holds its place until it
        returns; cancelled when `finish` is done."""
        ...

    async def finish(self, ready: R | None) -> T_co: ...


class Stages:
    """The pools of one node. A place in READY is a sandbox that is up and waits for a place in RUN."""

    def __init__(self, sizes: Pools) -> None:
        self.init = Pool(sizes.init)
        self.ready = Pool(sizes.ready)
        self.run = Pool(sizes.run)
        self.postrun = Pool(sizes.postrun)
        self._prewarm = Pool(sizes.prewarm)

    @property
    def places(self) -> StageCounts:
        return StageCounts(init=self.init.size, ready=self.ready.size, run=self.run.size, postrun=self.postrun.size)

    @property
    def held(self) -> StageCounts:
        """Sessions by stage; POSTRUN with those that wait for it."""
        return StageCounts(
            init=self.init.held,
            ready=self.ready.held,
            run=self.run.held,
            postrun=self.postrun.held + self.postrun.waiting,
        )

    async def conduct(self, task: str, session: Staged[R, T]) -> T:
        """`session`, of this task, through all stages."""
        async with self.init.place(task):
            ready = await session.initialize()
            if ready is not None:
                await self.ready.acquire(task)
        if ready is None:
            return await self._finish(task, session, None)
        try:
            session.ready()
            await self.run.acquire(task)
        finally:
            self.ready.release()
        async with self._beside(task, session, ready):
            try:
                await session.run(ready)
            finally:
                self.run.release()
            return await self._finish(task, session, ready)

    async def _finish(self, task: str, session: Staged[R, T], ready: R | None) -> T:
        async with self.postrun.place(task):
            return await session.finish(ready)

    @contextlib.asynccontextmanager
    async def _beside(self, task: str, session: Staged[R, T], ready: R) -> AsyncIterator[None]:
        """`session.prewarm` beside what is in the context: in its own time, and over when that is over."""

        async def prewarm() -> None:
            async with self._prewarm.place(task):
                await session.prewarm(ready)

        prewarming = asyncio.create_task(prewarm())
        try:
            yield
        finally:
            prewarming.cancel()
            await asyncio.gather(prewarming, return_exceptions=True)
