"""The acting engines in a process that dies while one of its calls is answered: SIGKILL, sent by the engine itself."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from polar_gym.chat import ChatRequest, Completion, OnDelta
from polar_gym.schema import Sampling
from tests.e2e.branching_engine import Branching, BranchingOptions, Compacting, Delegating


class DyingOptions(BranchingOptions):
    branch_at: int = 1_000_000
    """No answer says a sample's number."""
    dies_in_call: int | None = None
    """The call, of those that the engine is asked for, in which the process dies; None: it does not."""
    in_answer: bool = False
    """True: the first tokens of that call's answer are in the journal. False: it has none."""
    waits: bool = False
    """True: the call waits for the process to be killed."""
    once: Path | None = None
    """A file that the first death makes, after which no process dies: a run goes on with the settings it began with."""


class Dying(Branching):
    Options = DyingOptions

    def __init__(self, options: DyingOptions) -> None:
        super().__init__(options)
        self._dies = options
        self._asked = 0

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        last, self._asked = self._asked == self._dies.dies_in_call, self._asked + 1
        if not last or (self._dies.once is not None and self._dies.once.exists()):
            return await super().chat(request, sampling, on_delta)
        if self._dies.once is not None:
            self._dies.once.touch()
        if self._dies.waits:
            await asyncio.Event().wait()
        if self._dies.in_answer and on_delta is not None:
            await super().chat(request, sampling, lambda delta: (on_delta(delta), _die())[0])
        return _die()


class DyingDelegating(Dying, Delegating): ...


class DyingCompacting(Dying, Compacting): ...


def _die() -> Completion:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the process outlives SIGKILL")
