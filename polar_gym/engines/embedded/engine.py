"""The embedded engine: vLLM's token-level behaviour in the gateway's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar_gym.chat import ChatRequest, Completion, OnDelta
from polar_gym.engines import EngineError, Replay
from polar_gym.engines.context_length import no_space
from polar_gym.engines.embedded.answers import cut_at_stop, first_stop, opens_thinking, parse_answer
from polar_gym.engines.embedded.local_model import LocalModelPolicy
from polar_gym.engines.embedded.options import EmbeddedOptions
from polar_gym.engines.embedded.policy import TOKENS_AT_ONCE, Generation, Policy
from polar_gym.engines.embedded.scripted import ScriptedPolicy
from polar_gym.engines.embedded.speech import Speech
from polar_gym.engines.sampling import sampling_fields
from polar_gym.engines.weights import after_failure
from polar_gym.schema import EngineInfo, Message, Sampling, SamplingMask, ToolDefinition, WeightVersion

OPENING = 16
"""How many ids at the end of a prompt may open the answer's thinking."""


class EmbeddedEngine:
    Options = EmbeddedOptions
    takes_prefix_only = False

    def __init__(self, options: EmbeddedOptions) -> None:
        self.model = options.model
        self.max_model_len = 0
        self.weight_version: str | None = None
        self._record = options.record
        self._policy: Policy = (LocalModelPolicy if options.policy == "transformers" else ScriptedPolicy)(options)

    async def start(self) -> None:
        await asyncio.to_thread(self._policy.load)
        self.max_model_len = self._policy.max_model_len

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            name="embedded",
            model=self.model,
            scripted=isinstance(self._policy, ScriptedPolicy),
            max_model_len=self.max_model_len,
            tokenizer=self._policy.tokenizer,
            logprobs_mode="processed",
            stream_interval=TOKENS_AT_ONCE,
            records=self._record,
        )

    async def score(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return await self._policy.replay(ids, Replay.neutral(len(ids)))

    async def replay(self, ids: NDArray[np.int32], replay: Replay) -> NDArray[np.float32]:
        return await self._policy.replay(ids, replay)

    async def set_weights(self, weights: Path | Mapping[str, Any], version: str) -> None:
        """See `polar_gym.engines.Updating`."""
        if not isinstance(self._policy, LocalModelPolicy):
            raise EngineError(400, "engine.policy=scripted has no weights; set engine.policy=transformers")
        try:
            await self._policy.set_weights(weights, version)
        except asyncio.CancelledError:  # the worker may go on with the update
            self.weight_version = after_failure(version)
            raise
        self.weight_version = version

    async def close(self) -> None:
        self._policy.close()

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        return np.asarray(await asyncio.to_thread(self._policy.prompt_ids, list(messages), list(tools)), np.int32)

    async def decode(self, ids: Sequence[int]) -> str:
        return self._policy.decode(ids)

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        _check(request)
        prompt_ids = request.prompt_ids
        if prompt_ids is None:
            prompt_ids = await self.template(request.messages, request.tools)
        longest = self._longest_answer(len(prompt_ids), request.max_tokens)
        policy, stop = self._policy, request.stop
        calls = bool(request.tools) and request.tool_choice != "none"
        thinking = opens_thinking(policy.pieces(prompt_ids[-OPENING:].tolist()))
        speech = None
        if on_delta is not None:
            live = request.stream
            speech = Speech(on_delta, prompt_ids, policy.pieces, stop=stop, calls=calls, thinking=thinking, live=live)
        on_ids = speech.add if speech else None
        asked = replace(request, prompt_ids=prompt_ids, max_tokens=longest)
        try:
            generation = await policy.generate(asked, sampling, on_ids)
        except BaseException:
            if speech:
                speech.cut_off()
            raise
        pieces = policy.pieces(generation.ids)
        message = parse_answer(cut_at_stop(pieces, stop), calls=calls, thinking=thinking)
        stopped = first_stop(pieces, stop)
        if speech:
            speech.finish(message)
        return Completion(
            message=message,
            finish_reason="tool_calls" if message.get("tool_calls") else generation.finish_reason,
            stop_sequence=stopped[1] if stopped else None,
            prompt_ids=prompt_ids,
            response_ids=np.asarray(generation.ids, np.int32),
            logprobs=np.asarray(generation.logprobs, np.float32),
            sampling=sampling_fields(sampling, request),
            weight_versions=_spans(generation),
            engine_tokens=len(generation.ids),
            routed_experts=generation.routed_experts,
            sampling_mask=None if generation.kept is None else SamplingMask.of(generation.kept),
        )

    def _longest_answer(self, prompt_length: int, max_tokens: int | None) -> int:
        space = self.max_model_len - prompt_length
        if space <= 0:
            raise no_space(self.max_model_len, f"contains {prompt_length} input tokens")
        return space if max_tokens is None else min(max_tokens, space)


def _spans(generation: Generation) -> list[WeightVersion]:
    """Return the spans that each version of the weights sampled."""
    versions = [*generation.versions, (len(generation.ids), "")]
    return [
        WeightVersion(version=version, engine_version=version, start=start, end=end)
        for (start, version), (end, _) in pairwise(versions)
        if start < end
    ]


def _check(request: ChatRequest) -> None:
    """Raise the `EngineError`s with which vLLM refuses a request."""
    if request.max_tokens is not None and request.max_tokens < 1:
        raise EngineError(400, f"max_tokens must be at least 1, got {request.max_tokens}", kind="invalid_request")
    if request.tool_choice in (None, "auto", "none"):
        return
    names = [tool["function"]["name"] for tool in request.tools]
    if not names:
        raise EngineError(400, f"tool_choice={request.tool_choice!r} needs tools", kind="invalid_request")
    if isinstance(request.tool_choice, dict) and request.tool_choice["function"]["name"] not in names:
        raise EngineError(
            400,
            f"tool_choice names {request.tool_choice['function']['name']!r}, which is not among the tools: "
            f"{', '.join(names)}",
            kind="invalid_request",
        )
