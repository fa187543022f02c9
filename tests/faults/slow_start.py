"""A runtime whose sandboxes for agents take seconds to come up, as a container with a large image does."""

from __future__ import annotations

import asyncio

from pydantic import Field

from polar_gym.runtimes import SandboxRequest
from polar_gym.runtimes.bubblewrap import Bubblewrap, BubblewrapOptions, BubblewrapSandbox


class SlowStartOptions(BubblewrapOptions):
    start_seconds: float = Field(ge=0)


class SlowStart(Bubblewrap):
    Options = SlowStartOptions

    def __init__(self, options: SlowStartOptions) -> None:
        super().__init__(options)
        self._start_seconds = options.start_seconds

    async def start(self, request: SandboxRequest) -> BubblewrapSandbox:
        if request.serve is not None:
            await asyncio.sleep(self._start_seconds)
        return await super().start(request)
