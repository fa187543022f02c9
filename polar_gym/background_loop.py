"""An asyncio loop in a thread of its own, for callers that are not asynchronous, and the end of a loop's tasks.

The thread must outlive every sandbox that it started: a sandbox's processes die with the thread that forked them.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401 - exit functions run in reverse order of registration: see below
import threading
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

before_exit: Callable[[Callable[[], object]], object] = getattr(threading, "_register_atexit", atexit.register)
"""Register a function that is called when the interpreter exits, while threads can still be used.

`atexit` runs only after every thread pool was shut down, and stopping a sandbox needs thread pools.
`concurrent.futures` registers its own shutdown the same way.
"""


class BackgroundLoop:
    """Runs coroutines for a synchronous caller."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="polar-gym", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`.

        Ctrl-C cancels `work` and lets it clean up before `KeyboardInterrupt` is raised here. Other tasks go on.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("an environment cannot be used from its own sessions: they would wait for themselves")
        begun: list[asyncio.Task[T]] = []

        async def begin() -> T:
            begun.append(asyncio.create_task(work))
            return await begun[0]

        try:
            return asyncio.run_coroutine_threadsafe(begin(), self._loop).result()
        except KeyboardInterrupt:
            asyncio.run_coroutine_threadsafe(cancel_all(begun), self._loop).result()
            raise

    def close(self) -> None:
        """Cancel all tasks, then end the loop and its thread. May be called twice."""
        if self._loop.is_closed():
            return
        self._drain()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _drain(self) -> None:
        """Cancel every task of the loop and wait until each has cleaned up."""

        async def drain() -> None:
            await cancel_all(asyncio.all_tasks() - {asyncio.current_task()})

        asyncio.run_coroutine_threadsafe(drain(), self._loop).result()


async def cancel_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and return when each has cleaned up. What they raise is dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
