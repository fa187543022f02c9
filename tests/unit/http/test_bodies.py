"""How long the body of a request may take to come, on a clock that does not wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from benchmarks.virtual_clock import VirtualClock
from polar_gym.http.edge import BODY_SECONDS, LEAST_BYTES_A_SECOND, read_body


class Slow:
    """A request whose body comes in pieces, each after some seconds."""

    client_max_size = 100 * LEAST_BYTES_A_SECOND

    def __init__(self, pieces: int, size: int, pause: float) -> None:
        self.content, self._pieces, self._size, self._pause = self, pieces, size, pause

    async def iter_any(self) -> AsyncIterator[bytes]:
        for _ in range(self._pieces):
            await asyncio.sleep(self._pause)
            yield bytes(self._size)


def came(pieces: int, size: int, pause: float) -> int:
    """Return how many bytes of a body came in time."""
    request: Any = Slow(pieces, size, pause)
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        return len(runner.run(read_body(request)))


def test_a_large_body_has_more_time_than_a_small_one() -> None:
    """Guards against an episode that needs more than a minute to arrive, and is refused each time."""
    size = 10 * LEAST_BYTES_A_SECOND
    assert came(9, size, pause=9.0) == 9 * size


@pytest.mark.parametrize(("pieces", "size", "pause"), [(10**6, 1, 0.5), (1, 100, BODY_SECONDS + 1), (10, 100, 7.0)])
def test_a_client_cannot_hold_a_handler_by_sending_slowly(pieces: int, size: int, pause: float) -> None:
    with pytest.raises(TimeoutError):
        came(pieces, size, pause)


def test_a_body_that_is_too_large_is_refused_before_its_end() -> None:
    with pytest.raises(web.HTTPRequestEntityTooLarge):
        came(102, LEAST_BYTES_A_SECOND, pause=0.1)
