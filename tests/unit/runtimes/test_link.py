"""What drives a relay's stream waits in a way that a cancellation ends."""

from __future__ import annotations

import asyncio

import pytest

from polar_gym.runtimes.relay.link import within


@pytest.mark.parametrize("steps", range(6))
async def test_a_cancellation_that_comes_as_the_wait_ends_is_not_lost(steps: int) -> None:
    """Guards against relays that never ended on Python 3.11, whose `asyncio.wait_for` loses such a cancellation."""
    event = asyncio.Event()

    async def endless() -> None:
        while True:
            event.clear()
            await within(60, event.wait())

    waiting = asyncio.create_task(endless())
    for _ in range(6):
        await asyncio.sleep(0)
    event.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    waiting.cancel()
    done, _ = await asyncio.wait({waiting}, timeout=10)
    assert done


async def test_time_that_is_up_is_said() -> None:
    with pytest.raises(TimeoutError):
        await within(0.01, asyncio.Event().wait())
