"""An engine for tests of online scoring that needs no model."""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.schema import EngineInfo


class ScoredEngine(EmbeddedEngine):
    """Plays a script, and says that a model did. All logprobs are 0, those of a second pass too, unless `bent`."""

    def __init__(self, script: Script | None = None, *, bent: float = 0.0) -> None:
        script = script or Script(final_message="word " * 40)
        super().__init__(EmbeddedOptions(scripts=[script]))
        self.bent = bent
        self.passes = 0
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    @property
    def info(self) -> EngineInfo:
        return super().info.model_copy(update={"scripted": False})

    async def score(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        self.passes += 1
        self.asked.set()
        await self.go_on.wait()
        return np.full(len(ids), -self.bent, np.float32)
