"""Ctrl-C while a synchronous caller waits for a loop in another thread."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from polar_gym.background_loop import BackgroundLoop


def test_ctrl_c_ends_the_callers_work_and_no_other_task() -> None:
    """Guards against an engine that is never taken back: the task that waited for it ended with a step of the env."""
    loop, ended = BackgroundLoop(), list[str]()
    go_on = asyncio.Event()

    async def waiting() -> str:
        try:
            await go_on.wait()
            return "taken back"
        finally:
            ended.append("the node's own task")

    async def begin() -> asyncio.Task[str]:
        return asyncio.create_task(waiting())

    async def step() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("the step")

    async def take_back() -> str:
        go_on.set()
        return await own

    own = loop.run(begin())
    with pytest.raises(KeyboardInterrupt):
        loop.run(step())
    assert ended == ["the step"]
    assert loop.run(take_back()) == "taken back"
    go_on.clear()
    loop.run(begin())
    loop.close()
    assert ended[1:] == ["the node's own task"] * 2
