"""A node in a background loop, and the sessions that are open on the node: one for each place of an environment.

The node's pools bound INIT and POSTRUN. The number of places bounds the sessions that are READY or run at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import gymnasium as gym
from rich.status import Status as RichStatus

from polar_gym.background_loop import BackgroundLoop, before_exit, cancel_all
from polar_gym.console import errors
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.session.life import Ready, SessionLife
from polar_gym.schema import Episode, Session, Status, TaskRequest

log = logging.getLogger(__name__)

T = TypeVar("T")

_open: set[Sessions] = set()
"""The objects that must be closed before the interpreter exits."""


class Sessions:
    """Sessions by place. The node starts with the first session; `close` leaves no process, container or file."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._loop: BackgroundLoop | None = None
        self._lives: dict[int, SessionLife] = {}
        self._ready: dict[int, Ready] = {}
        """Of the sessions whose sandbox is up."""
        self._samples: Counter[str] = Counter()
        """The number of times that each task was begun."""
        self._stages: dict[int, Status] = {}
        """The stage of each place, for the line that is shown meanwhile."""
        self._line: RichStatus | None = None
        self._closing = threading.Lock()
        self.closed = False

    def open(self, place: int) -> SessionLife | None:
        """Return the session that waits in a place to be played. Raises `ClosedEnvironmentError`."""
        self._check_open()
        return self._lives.get(place)

    def prepare(
        self, requests: Mapping[int, TaskRequest], samples: Mapping[int, int | None] | None = None
    ) -> dict[int, SessionLife]:
        """Bring up a sandbox in each of these places, and end the session that was open in a place. `samples`: place ->
        the session's sample index; None: one more than the largest that the task was begun with, or 0.

        A sandbox that does not come up is noted in the session's `failure`. Raises `polar_gym.engines.EngineError` when
        the engine does not start; the caller may try again.
        """
        with self._shown():
            return self._running_loop().run(self._prepare(requests, samples or {}))

    def play(self, places: Collection[int]) -> dict[int, Episode]:
        """Run the open sessions of these places to their ends, all at once."""
        with self._shown():
            return self._running_loop().run(self._play(places))

    def abandon(self, place: int) -> None:
        """End the open session of a place without playing it."""
        self._running_loop().run(self._end(place))

    def set_weights(self, weights: str | Path | Mapping[str, Any], version: str) -> None:
        """See `Node.set_weights`."""
        self._running_loop().run(self._node.set_weights(weights, version))

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Show on a terminal how many sessions are in which stage, until the body ends."""
        if not errors.is_terminal or self._line is not None:
            yield
            return
        with errors.status("starting") as self._line:
            try:
                yield
            finally:
                self._line = None

    def _at(self, place: int, session: Session) -> None:
        self._stages[place] = session.status
        if (line := self._line) is not None:
            counts = Counter("done" if status.final else status.lower() for status in self._stages.values())
            line.update("sessions: " + ", ".join(f"{count} {stage}" for stage, count in counts.items()))

    def _check_open(self) -> None:
        if self.closed:
            raise gym.error.ClosedEnvironmentError("the environment is closed: make another one")

    def _running_loop(self) -> BackgroundLoop:
        self._check_open()
        if self._loop is None:
            loop = BackgroundLoop()
            try:
                loop.run(self._node.__aenter__())
            except BaseException:
                loop.close()
                raise
            self._loop = loop
            _open.add(self)
        return self._loop

    async def _prepare(
        self, requests: Mapping[int, TaskRequest], samples: Mapping[int, int | None]
    ) -> dict[int, SessionLife]:
        try:
            await _together([self._begin(place, request, samples.get(place)) for place, request in requests.items()])
        except BaseException:
            await asyncio.gather(*map(self._end, requests))
            raise
        return {place: self._lives[place] for place in requests}

    async def _begin(self, place: int, request: TaskRequest, sample: int | None) -> None:
        await self._end(place)
        index = self._samples[request.task_id] if sample is None else sample
        life = self._node.open_session(request, index, partial(self._at, place))
        self._samples[request.task_id] = max(self._samples[request.task_id], index) + 1
        self._lives[place] = life
        async with self._node.stages.init.place(request.task_id):
            if (ready := await life.initialize()) is not None:
                self._ready[place] = ready
                life.ready()

    async def _play(self, places: Collection[int]) -> dict[int, Episode]:
        episodes = await _together([self._to_its_end(place) for place in places])
        return dict(zip(places, episodes, strict=True))

    async def _to_its_end(self, place: int) -> Episode:
        """Return the episode of a place's session. An error here costs this session only, as everywhere in a node."""
        life, ready = self._lives[place], self._ready.get(place)
        try:
            with life.failing(life.session.status, life.request.timeout_seconds):
                await self._node.note(life)  # only now: an action may have changed the request
            if ready is not None and life.session.failure is None:
                with life.failing(Status.RUNNING, life.request.timeout_seconds):
                    await life.run(ready)
            async with self._node.stages.postrun.place(life.request.task_id):
                episode = await life.finish(ready)
            await self._node.ended(life, episode)
            return episode
        finally:
            await self._end(place)

    async def _end(self, place: int) -> None:
        """End the session of a place, if there is one. An error is logged, and costs no episode."""
        self._ready.pop(place, None)
        life = self._lives.pop(place, None)
        if life is None:
            return
        try:
            await self._node.close_session(life)
        except Exception:
            log.exception("session %s: it could not be ended as a whole", life.session.session_id)

    def close(self) -> None:
        """End all sessions and the node. May be called twice, at exit, and from any thread except the loop's own."""
        with self._closing:
            self.closed = True
            loop, self._loop = self._loop, None
            if loop is None:
                return
            try:
                loop.run(self._leave())
            finally:
                loop.close()
                _open.discard(self)

    async def _leave(self) -> None:
        await asyncio.gather(*map(self._end, list(self._lives)))
        await self._node.__aexit__(None, None, None)

    def let_go(self) -> None:
        """Close in another thread, without waiting: for a finaliser.

        The garbage collector may call a finaliser in any thread, also in the loop's own or in one that the loop waits
        for.
        """
        if self._loop is not None:
            threading.Thread(target=self.close, name="polar-gym-close").start()


async def _together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results. The first error cancels the other works, and is raised itself, not in an exception group."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await cancel_all(tasks)
        raise


@before_exit
def _close_all() -> None:
    for sessions in list(_open):
        sessions.close()
