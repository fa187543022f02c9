"""Fresh sandboxes for grading: the first may be made while the agent still runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from polar_gym.runtimes import Sandbox

log = logging.getLogger(__name__)


class GradingSandboxes:
    """Those of one session. `start` makes one, `stop` removes one that nobody took and raises nothing."""

    def __init__(
        self, session_id: str, start: Callable[[], Awaitable[Sandbox]], stop: Callable[[Sandbox], Awaitable[None]]
    ) -> None:
        self._session_id = session_id
        self._start = start
        self._stop = stop
        self._spare: asyncio.Future[Sandbox | None] | None = None
        """One that comes up, or is up; its result is None where it could not."""
        self._asked = asyncio.Event()
        """Set once grading has asked for a sandbox: it has the spare one then, or one of its own."""

    async def prewarm(self) -> None:
        """Have one at hand. Returns when it is taken; cancelled, removes it again."""
        if self._asked.is_set():
            return
        self._spare = spare = asyncio.get_running_loop().create_future()
        sandbox = None
        try:
            sandbox = await self._start()
            spare.set_result(sandbox)
            await self._asked.wait()
        except Exception as error:  # noqa: BLE001 - grading starts one of its own, and says why if that cannot be
            log.warning("session %s: no sandbox could be prepared for grading: %s", self._session_id, error)
        finally:
            if not spare.done():
                spare.set_result(None)
            if sandbox is not None and not self._asked.is_set():
                await self._stop(sandbox)

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[Sandbox]:
        """A sandbox that nobody has used. Raises what the runtime does."""
        spare, self._spare = self._spare, None
        sandbox = await spare if spare is not None else None
        self._asked.set()
        if sandbox is None:
            sandbox = await self._start()
        try:
            yield sandbox
        finally:
            await sandbox.stop()
