"""How much the service holds: it refuses tasks that are too many, and evicts episodes and journals that are
old or take too much disk."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import Field

from polar_gym.record import Record
from polar_gym.schema import TaskRequest
from polar_gym.service.book import Book

log = logging.getLogger(__name__)

OPEN_SAMPLES = 200_000
"""The largest number of samples that have not ended. A task that would exceed this number is refused."""
EVICT_SECONDS = 60.0
"""The pause between two evictions."""


class Limits(Record):
    """How much the service holds, and for how long."""

    lease_seconds: float = Field(default=20.0, gt=0)
    """A node that was silent for this time is dead: its sessions are tried on other nodes."""
    keep_seconds: float = Field(default=7 * 86400.0, ge=0)
    """How long the server keeps ended tasks and fetched episodes."""
    keep_bytes: int = Field(default=50 * 2**30, ge=0)
    """How much disk fetched episodes may use before the oldest are deleted."""
    refuse_bytes: int = Field(default=200 * 2**30, gt=0)
    """The server refuses new tasks while it stores this many bytes."""
    journal_bytes: int = Field(default=32 * 2**20, ge=0, le=48 * 2**20)
    """How much of its journals nodes send of each running session, in bytes, so that the session goes on where its node
    is gone for good; 0: none."""


class OverloadedError(Exception):
    """The server takes no more tasks for now."""


class Bounds:
    """Keeps the tasks and episodes of a book within limits."""

    def __init__(self, book: Book, limits: Limits) -> None:
        self._book = book
        self._limits = limits

    @contextmanager
    def room_for(self, request: TaskRequest) -> Iterator[None]:
        """Count the samples of a task as open while the task is written: others may be submitted meanwhile. Raise
        `OverloadedError` where the service is full."""
        book, limits = self._book, self._limits
        if book.stored_bytes > limits.refuse_bytes:
            raise OverloadedError(
                f"{book.stored_bytes} bytes of episodes are stored, the limit is {limits.refuse_bytes}: fetch them, or "
                "raise it"
            )
        if book.open_samples + request.num_samples > OPEN_SAMPLES:
            raise OverloadedError(
                f"{book.open_samples} samples have not ended, the limit is {OPEN_SAMPLES}: submit again later"
            )
        book.open_samples += request.num_samples
        try:
            yield
        finally:
            book.open_samples -= request.num_samples

    async def keep_evicting(self) -> None:
        while True:
            try:
                await self._evict()
            except OSError as error:
                log.error("episodes or journals could not be evicted: %s", error)
            await asyncio.sleep(EVICT_SECONDS)

    async def _evict(self) -> None:
        book, store = self._book, self._book.store
        before = time.time() - self._limits.keep_seconds
        while await book.guard(store.evict(before, self._limits.keep_bytes)):
            pass  # the store evicts a thousand episodes at a time
        book.stored_bytes = await book.guard(store.stored_bytes())
        open_ids = {sample.session.session_id for task in book.live.values() for sample in task.open_samples()}
        await asyncio.to_thread(store.journals.keep_only, open_ids)
