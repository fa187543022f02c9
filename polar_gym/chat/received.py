"""The received part of an answer: its deltas put together, complete or cut off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar_gym.chat import Completion, Delta
from polar_gym.chat.messages import assistant_message
from polar_gym.schema import Message


class Received:
    """The deltas of an answer so far, put together. `response_ids` and `logprobs` have the same length."""

    def __init__(self) -> None:
        self.prompt_ids: NDArray[np.int32] | None = None
        """None until the first delta."""
        self.response_ids: list[int] = []
        self.logprobs: list[float] = []
        self.engine_tokens: int | None = None
        """The engine's own count. None until the engine gave it."""
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._tool_calls: list[dict[str, Any]] = []

    def add(self, delta: Delta) -> None:
        if delta.prompt_ids is not None:
            self.prompt_ids = delta.prompt_ids
        self.response_ids += delta.response_ids
        self.logprobs += delta.logprobs
        if delta.engine_tokens is not None:
            self.engine_tokens = delta.engine_tokens
        self._reasoning.append(delta.reasoning)
        self._content.append(delta.content)
        for fragment in delta.tool_calls:
            self._add_fragment(fragment)

    def message(self) -> Message:
        """Return the assistant message received so far. The arguments of its last tool call may be cut off."""
        content = "".join(self._content) or (None if self._tool_calls else "")
        calls = [{**call, "function": dict(call["function"])} for call in self._tool_calls]
        return assistant_message(content, "".join(self._reasoning), calls)

    def _add_fragment(self, fragment: dict[str, Any]) -> None:
        function = fragment["function"]
        if fragment["index"] == len(self._tool_calls):
            named = {"name": function["name"], "arguments": ""}
            self._tool_calls.append({"id": fragment["id"], "type": "function", "function": named})
        self._tool_calls[fragment["index"]]["function"]["arguments"] += function.get("arguments") or ""


def text_delta(message: Message) -> Delta:
    """Return the text and tool calls of a whole answer as one delta, without ids."""
    return Delta(
        reasoning=message.get("reasoning") or "",
        content=message.get("content") or "",
        tool_calls=[{**call, "index": index} for index, call in enumerate(message.get("tool_calls") or [])],
    )


def whole_delta(completion: Completion) -> Delta:
    """Return a whole answer as one delta, for an engine that cannot give its answer in pieces."""
    return replace(
        text_delta(completion.message),
        prompt_ids=completion.prompt_ids,
        response_ids=completion.response_ids.tolist(),
        logprobs=completion.logprobs.tolist(),
        engine_tokens=completion.engine_tokens,
    )
