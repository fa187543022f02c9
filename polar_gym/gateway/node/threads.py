"""The threads in which an event loop does blocking work."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

WORKERS = 64
"""Threads for blocking work. Such work mostly waits for disks and subprocesses, and slow work (an npm install) must not
hold up the episodes of other sessions."""

_given: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
"""The loops that have their threads."""


def give_threads() -> None:
    """Give the running event loop `WORKERS` threads for blocking work, once."""
    loop = asyncio.get_running_loop()
    if loop not in _given:
        loop.set_default_executor(ThreadPoolExecutor(WORKERS, "blocking"))
        _given.add(loop)
