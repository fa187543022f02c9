"""Chat form -> OpenAI Chat Completions: the whole answer, the streamed answer, and the error inside a stream."""

from __future__ import annotations

import time
from typing import Any

from polar_gym.chat import ChatRequest, Completion, Delta, ids
from polar_gym.providers.http import sse
from polar_gym.providers.openai_errors import error_body


def _tool_calls(completion: Completion, call_id: str) -> list[dict[str, Any]]:
    return [
        {"id": ids.tool_call(call_id, index), "type": "function", "function": call["function"]}
        for index, call in enumerate(completion.message.get("tool_calls") or [])
    ]


def _usage(completion: Completion) -> dict[str, int]:
    prompt, answer = len(completion.prompt_ids), len(completion.response_ids)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def render(request: ChatRequest, completion: Completion, call_id: str) -> dict[str, Any]:
    """Return the whole answer as one `chat.completion`."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": completion.message.get("content") or None,
        "refusal": None,
    }
    if reasoning := completion.message.get("reasoning"):
        message["reasoning_content"] = reasoning
    if calls := _tool_calls(completion, call_id):
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "finish_reason": completion.finish_reason, "logprobs": None}
    return {
        "id": f"chatcmpl-{call_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": _usage(completion),
    }


class Chunks:
    """The answer as `chat.completion.chunk`s. Every chunk has `choices`: one client insists on it."""

    def __init__(self, request: ChatRequest, call_id: str) -> None:
        self._call_id = call_id
        self._include_usage = request.wire.get("include_usage")
        self._base = {
            "id": f"chatcmpl-{call_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }
        self._calls_begun = 0

    def begin(self, prompt_tokens: int) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def feed(self, delta: Delta) -> bytes:
        chunks = []
        if delta.reasoning:
            chunks.append(self._chunk({"reasoning_content": delta.reasoning}))
        if delta.content:
            chunks.append(self._chunk({"content": delta.content}))
        chunks += [self._fragment(fragment["index"], fragment["function"]) for fragment in delta.tool_calls]
        return b"".join(chunks)

    def end(self, completion: Completion) -> bytes:
        last = self._chunk({}, completion.finish_reason)
        usage = sse({**self._base, "choices": [], "usage": _usage(completion)}) if self._include_usage else b""
        return last + usage + b"data: [DONE]\n\n"

    def _fragment(self, index: int, function: dict[str, Any]) -> bytes:
        """Return the chunks of a fragment. A call's first chunk names the call and has no arguments. Every server sends
        it so, and some clients rely on that."""
        chunks = b""
        if index == self._calls_begun:
            self._calls_begun += 1
            named = {"name": function["name"], "arguments": ""}
            opening = {"index": index, "id": ids.tool_call(self._call_id, index), "type": "function", "function": named}
            chunks += self._chunk({"tool_calls": [opening]})
        if arguments := function.get("arguments"):
            chunks += self._chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
        return chunks

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        return sse({**self._base, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


def error_event(kind: str, message: str) -> bytes:
    return sse(error_body(500, kind, message))
