"""The stages that sessions pass through: pools with sizes of their own, and which session is next.

    queue -> [INIT] -> [READY] -> [RUN] -> queue -> [POSTRUN] -> done

RUN is scarce: it takes the engine's throughput, and most of a session's time. A RUN place must never be free while a
session could use it. So sandboxes are made ahead, as far as READY has free places. POSTRUN is apart: a session in
POSTRUN neither holds a RUN place nor waits for one.

INIT begins when an INIT worker is free, even while READY has no free place: a session needs that place at the end of
its INIT, and by then one is mostly free. A session that finds none keeps its INIT worker until a place is free. So at
most `ready + init` sandboxes are up and do not run, no INIT begins later than this bound demands, and a session in
READY holds no worker. (If a session took its place in READY before its INIT, only `ready` workers could work, and RUN
places would be empty after every burst of sessions that end.)

Every pool serves the tasks in turn, and the sessions of one task in the order of their arrival: a task of a thousand
samples does not delay a task of one sample.

The module knows no HTTP, no file, and no clock except the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol, TypeVar

from polar_gym.background_loop import cancel_all
from polar_gym.config.run_config import Pools
from polar_gym.gateway.session.turns import FairQueue
from polar_gym.protocol import StageCounts

R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Pool:
    """A number of places, given to the tasks in turn.

    Invariant: no session waits while a place is free. While a session waits, any other task gets at most one place more
    than the session's own task.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.held = 0
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

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
        self._waiting.push(task, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(task, [turn])
            else:  # the pool gave the place in the same moment
                self.release()
            raise

    def release(self) -> None:
        """Give a place to the next session that waits, else back to the pool."""
        while self._waiting:
            _, turn = self._waiting.pop()
            if not turn.cancelled():
                turn.set_result(None)
                return
        self.held -= 1


class Staged(Protocol[R, T_co]):
    """A session, as the stages see it. R: the value that `initialize` makes for the later stages."""

    async def initialize(self) -> R | None:
        """Prepare the session; None: there is nothing to run, and `finish` is next."""
        ...

    def ready(self) -> None:
        """Note that the session is in READY from now on."""
        ...

    async def run(self, ready: R) -> None: ...

    async def prewarm(self, ready: R) -> None:
        """Prepare what `finish` will need, while `run` runs.

        This is called if there is a place, and holds the place until it returns. It is cancelled when `finish` is done.
        """
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
        """The number of sessions in each stage; POSTRUN includes the sessions that wait for it."""
        return StageCounts(
            init=self.init.held,
            ready=self.ready.held,
            run=self.run.held,
            postrun=self.postrun.held + self.postrun.waiting,
        )

    async def conduct(self, task: str, session: Staged[R, T]) -> T:
        """Take a session of this task through all stages, and return what `finish` returns."""
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
        """Run `session.prewarm` beside the body of the context, and cancel it at the end of the body."""

        async def prewarm() -> None:
            async with self._prewarm.place(task):
                await session.prewarm(ready)

        prewarming = asyncio.create_task(prewarm())
        try:
            yield
        finally:
            await cancel_all([prewarming])
