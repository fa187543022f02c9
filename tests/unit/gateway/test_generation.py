"""The gate before the engine: what a pause holds up, what counts as in flight, and the clock that stands still."""

from __future__ import annotations

import asyncio

import pytest

from polar_gym.gateway.proxy.generation import GenerationGate


async def settle() -> None:
    """Let every task run until it waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)


def begin_call(gate: GenerationGate) -> tuple[asyncio.Task[None], asyncio.Event]:
    """Begin a call, and return its task and whether the gate let it through."""
    passed = asyncio.Event()

    async def call() -> None:
        async with gate.call():
            passed.set()

    return asyncio.create_task(call()), passed


async def test_a_call_waits_while_generation_is_paused() -> None:
    gate = GenerationGate()
    gate.pause()
    calling, passed = begin_call(gate)
    await settle()
    assert (gate.paused, passed.is_set(), gate.in_flight) == (True, False, 0)
    gate.resume()
    await asyncio.wait_for(calling, 60)
    assert (gate.paused, passed.is_set(), gate.in_flight) == (False, True, 0)


async def test_a_pause_that_follows_at_once_holds_the_calls_that_a_resumption_let_go() -> None:
    """Guards against an acknowledged pause under which calls begin: the trainer changes the weights meanwhile."""
    gate = GenerationGate()
    gate.pause()
    calling, passed = begin_call(gate)
    await settle()
    gate.resume()
    gate.pause()
    await settle()
    assert (passed.is_set(), gate.in_flight) == (False, 0)
    gate.resume()
    await asyncio.wait_for(calling, 60)


async def test_a_pause_lets_calls_in_flight_end_and_idle_waits_for_the_last() -> None:
    gate = GenerationGate()
    async with gate.call():
        async with gate.call():
            gate.pause()
            assert gate.in_flight == 2
        waiting = asyncio.create_task(gate.idle(60))
        await settle()
        assert not waiting.done()
        await gate.idle(0)
        assert gate.in_flight == 1
    await asyncio.wait_for(waiting, 30)


async def test_a_call_that_fails_is_in_flight_no_more() -> None:
    gate = GenerationGate()
    with pytest.raises(ConnectionError):
        async with gate.call():
            raise ConnectionError
    assert gate.in_flight == 0
    await asyncio.wait_for(gate.idle(60), 30)


async def test_a_call_that_is_cancelled_before_the_engine_is_never_in_flight() -> None:
    gate = GenerationGate()
    gate.pause()

    async def call() -> None:
        async with gate.call():
            raise AssertionError

    calling = asyncio.create_task(call())
    await settle()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    gate.resume()
    assert gate.in_flight == 0


async def test_the_clock_stands_still_while_generation_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, loop, ahead = GenerationGate(), asyncio.get_running_loop(), [0.0]
    real_time = loop.time
    monkeypatch.setattr(loop, "time", lambda: real_time() + ahead[0])

    async def pass_time(seconds: float) -> None:
        await settle()
        ahead[0] += seconds
        await settle()

    began = gate.seconds
    gate.pause()
    sleeping = asyncio.create_task(gate.sleep(3600))
    await pass_time(7200)
    gate.resume()
    await pass_time(3000)
    assert not sleeping.done(), "a pause before the beginning takes nothing of the time"
    gate.pause()
    await pass_time(7200)
    gate.resume()
    await pass_time(500)
    assert not sleeping.done(), "nor does a pause in the middle"
    await pass_time(101)
    assert sleeping.done()
    assert 3601 <= gate.seconds - began < 7200
