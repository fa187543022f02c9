"""One model call on its way through the proxy: its request, the answer received so far, and the record of both."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from aiohttp import web

from polar_gym.chat import ChatRequest, Completion, Delta
from polar_gym.chat.received import Received
from polar_gym.gateway.proxy.capture import SessionCapture
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
    """The request of the harness, with `max_tokens` cut to the budget."""
    plan: Plan
    hints: dict[str, str]
    sampling_mismatch: list[str]
    call_id: str
    index: int
    started_at: float
    weight_version: str | None = None
    """The version that was set when the engine was asked."""
    received: Received = field(default_factory=Received)
    """The part of a streamed answer that the engine has sent."""
    deltas: asyncio.Queue[Delta | None] = field(default_factory=asyncio.Queue)
    """The deltas that wait for the harness, at most those of one answer; None at their end."""

    def take(self, delta: Delta) -> None:
        self.received.add(delta)
        self.deltas.put_nowait(delta)

    def answered(self, completion: Completion) -> ModelCall:
        """Return the record of a call with its whole answer."""
        return self._record(
            response=completion.message,
            sampling=completion.sampling,
            prompt_ids=completion.prompt_ids,
            response_ids=completion.response_ids,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            weight_versions=completion.weight_versions,
        )

    def cut_off(self, outcome: Literal["abandoned", "failed"], error: str, kind: str | None) -> ModelCall:
        """Return the record of a call whose answer did not come to its end, with the received part of the answer."""
        received = self.received
        begun = received.prompt_ids is not None
        return self._record(
            outcome=outcome,
            error=error,
            error_kind=kind,
            response=received.message() if begun else None,
            prompt_ids=received.prompt_ids if begun else np.empty(0, np.int32),
            response_ids=np.asarray(received.response_ids, np.int32),
            logprobs=np.asarray(received.logprobs, np.float32),
        )

    def _record(self, **answer: Any) -> ModelCall:
        asked = self.plan.request
        return ModelCall(
            call_id=self.call_id,
            session_id=self.capture.session_id,
            index=self.index,
            provider=self.provider.name,
            model=asked.model,
            messages=asked.messages,
            tools=asked.tools,
            sampling_mismatch=self.sampling_mismatch,
            single_tool_call=bool(asked.tools) and asked.parallel_tool_calls is False,
            parent_id=self.plan.parent_id,
            continuation=self.plan.continuation,
            splice_cause=self.plan.cause,
            hints=self.hints,
            started_at=self.started_at,
            duration=time.time() - self.started_at,
            **answer,
        )
