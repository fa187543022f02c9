"""Embedded engines that wait: for each other's sessions, or for the test."""

from __future__ import annotations

import asyncio
import threading

from polar_gym.chat import ChatRequest, Completion, OnDelta
from polar_gym.engines.embedded import EmbeddedEngine
from polar_gym.schema import Sampling

PARTIES = 16


class MeetingEngine(EmbeddedEngine):
    """Answers the first request of a session only when so many sessions have asked: they run at once or never end."""

    async def start(self) -> None:
        await super().start()
        self.barrier = asyncio.Barrier(PARTIES)

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        if len(request.messages) == 1:
            async with asyncio.timeout(60):
                await self.barrier.wait()
        return await super().chat(request, sampling, on_delta)


class GatedEngine(EmbeddedEngine):
    """Answers a first request at once, and says of a second that it came; that one waits until it may go on."""

    came = threading.Event()
    go_on = threading.Event()

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        if len(request.messages) > 1:
            self.came.set()
            assert await asyncio.to_thread(self.go_on.wait, 60)
        return await super().chat(request, sampling, on_delta)


MEETING = MeetingEngine
GATED = GatedEngine
