"""One model call on its way through the proxy: what was asked, what has come of the answer, and the record of both."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from aiohttp import web

from polar_gym.chat import ChatRequest, Delta
from polar_gym.chat.received import Received
from polar_gym.gateway.proxy.capture import SessionCapture, make_call
from polar_gym.providers import Provider
from polar_gym.schema import ModelCall
from polar_gym.splicing.plan import Plan


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A call, from the parsed request on."""

    http: web.BaseRequest
    provider: Provider
    capture: SessionCapture
    request: ChatRequest
    """As the harness asked, within the budget."""
    plan: Plan
    hints: dict[str, str]
    sampling_mismatch: list[str]
    call_id: str
    index: int
    started_at: float
    weight_version: str | None = None
    """The one that was set when the engine was asked."""
    received: Received = field(default_factory=Received)
    """What has come of an answer that the engine streams."""
    deltas: asyncio.Queue[Delta | None] = field(default_factory=asyncio.Queue)
    """Those that wait for the harness, at most one answer; None when the engine is done."""

    def take(self, delta: Delta) -> None:
        self.received.add(delta)
        self.deltas.put_nowait(delta)

    def call(self, **fields: Any) -> ModelCall:
        return make_call(
            capture=self.capture,
            call_id=self.call_id,
            index=self.index,
            provider=self.provider.name,
            request=self.plan.request,
            hints=self.hints,
            sampling_mismatch=self.sampling_mismatch,
            plan=self.plan,
            started_at=self.started_at,
            duration=time.time() - self.started_at,
            **fields,
        )

    def cut_off(self, outcome: Literal["abandoned", "failed"], error: str, kind: str | None) -> ModelCall:
        """The record of an answer that did not come to its end, with what was received of it."""
        call, received = self.call(outcome=outcome, error=error, error_kind=kind), self.received
        if received.prompt_ids is not None:
            call.prompt_ids = received.prompt_ids
            call.response_ids = np.asarray(received.response_ids, np.int32)
            call.logprobs = np.asarray(received.logprobs, np.float32)
            call.response = received.message()
        return call
