"""One model call on its way through the proxy: its request, the answer received so far, and the record of both."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from aiohttp import web

from polar_gym.chat import ChatRequest, Completion, Delta
from polar_gym.chat.received import Received, whole_delta
from polar_gym.engines import Engine
from polar_gym.engines.replicas import Replicas
from polar_gym.gateway.proxy.capture import SessionCapture
from polar_gym.providers import Provider
from polar_gym.schema import ModelCall, Replayed, Sampling
from polar_gym.splicing.plan import Plan

NO_IDS = np.empty(0, np.int32)
DIED = "the gateway process died while the engine answered"
"""The error of a call in a journal that holds the call's beginning and not its end."""


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
    engine: Engine
    """The policy's engine, or a frozen one."""
    server: Engine
    """The replica of the engine that is asked; where there are none, the engine."""
    frozen: bool
    sampling_mismatch: list[str]
    call_id: str
    index: int
    started_at: float
    weight_version: str | None = None
    """The version that was set when the engine was asked."""
    live: bool = False
    """Whether the harness reads along while the engine samples; not where a handle of the answer may be another one."""
    received: Received = field(default_factory=Received)
    """The part of the answer that the engine has sent."""
    deltas: asyncio.Queue[Delta | None] = field(default_factory=asyncio.Queue)
    """The deltas that wait for a harness that reads along, at most those of one answer; None at their end."""
    call: ModelCall | None = None
    """The record of the call, from the first delta on, or from the call's end where no delta came. It becomes the
    record of the answer at the answer's end."""

    @property
    def sampling(self) -> Sampling:
        """Return the session's sampling, with the call's own seed."""
        capture, recording = self.capture, self.capture.recording
        state = recording.state if recording is not None else ()
        return capture.sampling.of_call(capture.task_id, capture.sample_index, self.index, state)

    def begin(self) -> ModelCall:
        """Return the record of a call whose answer has begun, with the first delta: in the journal, it stands if this
        process dies."""
        self.call = self._record(outcome="failed", error=DIED)
        return self.call

    def take(self, delta: Delta) -> None:
        """Keep the next piece of the answer, and hand it to a harness that reads along."""
        self.received.add(delta)
        if self.live:
            self.deltas.put_nowait(delta)

    def answered(self, completion: Completion) -> ModelCall:
        """Return the record of a call with its whole answer, whose first delta was taken."""
        assert self.call is not None
        return self._ended(
            self.call,
            outcome="delivered",
            error=None,
            response=completion.message,
            sampling=completion.sampling,
            response_ids=completion.response_ids,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            stop_sequence=completion.stop_sequence,
            weight_versions=completion.weight_versions,
            engine_tokens=completion.engine_tokens,
            cached_tokens=completion.cached_tokens,
            routed_experts=completion.routed_experts,
            sampling_mask=completion.sampling_mask,
        )

    def replay(self, recorded: ModelCall, how: Replayed) -> Completion:
        """Return the recorded answer, which becomes the answer of this call, under the recorded call's id."""
        assert recorded.response is not None
        changes = {"session_id": self.capture.session_id, "messages": list(recorded.messages), "replayed": how}
        others = {} if how.owned else {"scores": [], "cached_tokens": None}
        self.call = recorded.model_copy(update=changes | others)
        self.call_id = recorded.call_id
        completion = Completion(
            message=recorded.response,
            finish_reason=recorded.finish_reason or "stop",
            stop_sequence=recorded.stop_sequence,
            prompt_ids=recorded.prompt_ids,
            response_ids=recorded.response_ids,
            logprobs=recorded.logprobs,
            sampling=recorded.sampling,
        )
        if self.live:
            self.take(whole_delta(completion))
        return completion

    def for_harness(self, completion: Completion) -> Completion:
        """Return the answer with the harness's own handles."""
        return replace(completion, message=self.capture.handles.for_harness(completion.message))

    def cut_off(self, outcome: Literal["abandoned", "failed"], error: str, kind: str | None) -> ModelCall:
        """Return the record of a call whose answer did not come to its end, with the received part of the answer."""
        received = self.received
        return self._ended(
            self.call or self._record(),
            outcome=outcome,
            error=error,
            error_kind=kind,
            response=received.message() if self.call else None,
            response_ids=np.asarray(received.response_ids, np.int32),
            logprobs=np.asarray(received.logprobs, np.float32),
            engine_tokens=received.engine_tokens,
        )

    def _ended(self, call: ModelCall, **answer: Any) -> ModelCall:
        for name, value in answer.items():
            setattr(call, name, value)
        call.duration = time.time() - self.started_at
        call.agent_seconds = self.capture.agent_seconds
        return call

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
            frozen=self.engine.info.model if self.frozen else None,
            engine_url=self.engine.url_of(self.server) if isinstance(self.engine, Replicas) else None,
            edited_answers=self.plan.edited_answers,
            started_at=self.started_at,
            duration=time.time() - self.started_at,
            agent_seconds=self.capture.agent_seconds,
            prompt_ids=NO_IDS if self.received.prompt_ids is None else self.received.prompt_ids,
            response_ids=np.asarray(self.received.response_ids, np.int32),
            logprobs=np.asarray(self.received.logprobs, np.float32),
            **answer,
        )
