"""An engine that fails as it is told to: the embedded engine's scripted policy, but for some turns of a session.

What an engine may do wrong is one `Fault`, in the engine's own terms (`EngineError`, `Completion`), so that what a
harness gets to see of it is the gateway's doing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from polar_gym.chat import ChatRequest, Completion, Delta, OnDelta
from polar_gym.chat.messages import assistant_message
from polar_gym.engines import EngineError
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.schema import Sampling

FINAL = "All of it is done."
SCRIPT = Script(commands=[f"echo {step} >> steps.txt" for step in range(5)], final_message=FINAL)
SUMMARY = "<analysis>Steps.</analysis><summary>The steps so far are done.</summary>"
CONTEXT_LENGTH = 131_072


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong in a turn."""

    error: EngineError | None = None
    after_headers: bool = False
    """The error comes when the first word is out already."""
    answer: Callable[[Completion], Completion] | None = None
    """The good answer -> the one that is given."""
    slow: bool = False
    """The good answer, late."""
    good_turns: int = 1
    """How many turns of the session there are before it."""
    once: bool = False
    """More than one of them in a row says nothing new."""


def overflow() -> EngineError:
    """In vLLM's words."""
    return EngineError(
        400,
        f"This model's maximum context length is {CONTEXT_LENGTH} tokens. However, you requested 0 output tokens and "
        f"your prompt contains at least {CONTEXT_LENGTH + 1} input tokens, for a total of at least "
        f"{CONTEXT_LENGTH + 1} tokens. Please reduce the length of the input prompt or the number of requested output "
        f"tokens. (parameter=input_tokens, value={CONTEXT_LENGTH + 1})",
        kind="context_length",
    )


def _says(content: str, reasoning: str | None, finish_reason: str) -> Callable[[Completion], Completion]:
    message = assistant_message(content, reasoning, [])
    return lambda good: replace(good, message=message, finish_reason=finish_reason)


def _with_cut_arguments(finish_reason: str) -> Callable[[Completion], Completion]:
    def cut(good: Completion) -> Completion:
        calls = [dict(call) for call in good.message.get("tool_calls") or []]
        if not calls:
            return good
        calls[-1]["function"] = {**calls[-1]["function"], "arguments": calls[-1]["function"]["arguments"][:-4]}
        return replace(good, message={**good.message, "tool_calls": calls}, finish_reason=finish_reason)

    return cut


FAULTS = {
    "400": Fault(error=EngineError(400, "this cannot be", kind="invalid_request")),
    "401": Fault(error=EngineError(401, "the key opens nothing", kind="authentication")),
    "429": Fault(error=EngineError(429, "too many requests")),
    "500": Fault(error=EngineError(500, "the engine fell over")),
    "503": Fault(error=EngineError(503, "the engine is busy", kind="overloaded")),
    "503 after headers": Fault(error=EngineError(503, "the engine is busy", kind="overloaded"), after_headers=True),
    "reset before headers": Fault(error=EngineError(502, "the engine's connection was reset", kind="server")),
    "reset after headers": Fault(
        error=EngineError(502, "the engine's connection was reset", kind="server"), after_headers=True
    ),
    "slow first token": Fault(slow=True, once=True),
    "context overflow": Fault(error=overflow(), good_turns=4, once=True),
    "empty answer": Fault(answer=_says("", None, "stop")),
    "thinking only": Fault(answer=_says("", "Let me think.", "stop")),
    "broken tool JSON": Fault(answer=_with_cut_arguments("tool_calls")),
    "length, text": Fault(answer=_says("The first thing to do is to", None, "length")),
    "length, tool call": Fault(answer=_with_cut_arguments("length")),
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that reached the engine, and what became of it."""

    request: ChatRequest
    messages: list[dict[str, Any]]
    became: Literal["answer", "fault", "summary"]
    at: float
    """Monotonic time, seconds."""


class FaultyEngine(EmbeddedEngine):
    """Plays `SCRIPT`, and after `fault.good_turns` turns the fault, `times` times or (None) for good."""

    def __init__(self, fault: Fault, *, times: int | None, slow_seconds: float) -> None:
        super().__init__(EmbeddedOptions(scripts=[SCRIPT], max_model_len=CONTEXT_LENGTH))
        self._fault, self._times, self._slow_seconds = fault, times, slow_seconds
        self.asked: list[Asked] = []

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        became = self._what_becomes_of(request)
        self.asked.append(Asked(request=request, messages=request.messages, became=became, at=time.monotonic()))
        if became == "answer":
            return await super().chat(request, sampling, on_delta)
        good = await super().chat(request, sampling)
        if became == "summary":
            return _told(_says(SUMMARY, None, "stop")(good), on_delta)
        return _told(await self._failing(good, on_delta), on_delta)

    def _what_becomes_of(self, request: ChatRequest) -> Literal["answer", "fault", "summary"]:
        count = [asked.became for asked in self.asked].count
        if request.max_tokens == 1 and self._times is None:  # the gateway asks whether the engine answers
            return "fault" if count("fault") else "answer"
        if not request.tools or "detailed summary" in str(request.messages[-1]["content"]):
            return "summary"
        due = count("answer") >= self._fault.good_turns and (self._times is None or count("fault") < self._times)
        return "fault" if due else "answer"

    async def _failing(self, good: Completion, on_delta: OnDelta | None) -> Completion:
        fault = self._fault
        if fault.slow:
            await asyncio.sleep(self._slow_seconds)
        if fault.error is not None:
            if fault.after_headers and on_delta is not None:
                sampled = [int(good.response_ids[0])]
                on_delta(Delta(content="I", prompt_ids=good.prompt_ids, response_ids=sampled, logprobs=[0.0]))
            raise EngineError(fault.error.status, fault.error.message, kind=fault.error.kind)
        return fault.answer(good) if fault.answer else good


def _told(completion: Completion, on_delta: OnDelta | None) -> Completion:
    """The answer, streamed in one piece to whoever reads along."""
    if on_delta is not None:
        message = completion.message
        calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or [])]
        on_delta(
            Delta(
                reasoning=message.get("reasoning") or "",
                content=message.get("content") or "",
                tool_calls=calls,
                prompt_ids=completion.prompt_ids,
                response_ids=completion.response_ids.tolist(),
                logprobs=completion.logprobs.tolist(),
            )
        )
    return completion
