"""A completion as an Anthropic message, whole or as events.

Every id names the call. Thinking leaves with a `signature` that carries it once more, because clients hand signatures
back untouched. `model` is always the name that was asked for: Claude Code drops the thinking of a model with another
name.

Arguments that are not a JSON object, or one that nests too deeply, cannot be a whole block's `input`. They leave as
`{"__unparsedToolInput": {"raw": ..., "len": ...}}`, which is Claude Code's form for them, and `input` reads them back.
A stream has the raw text itself, so that the client reports the mistake of the model.
"""

from __future__ import annotations

from typing import Any

from polar_gym.chat import ChatRequest, Completion, Delta, ids
from polar_gym.providers.http import sse
from polar_gym.providers.json_text import parsed

UNPARSED = "__unparsedToolInput"

PING = sse({"type": "ping"}, "ping")

Block = dict[str, Any]


def render(request: ChatRequest, completion: Completion, call_id: str) -> dict[str, Any]:
    """Return the whole answer as one message, its blocks in the order thinking, text, tool calls."""
    said = completion.message
    content: list[Block] = []
    if reasoning := said.get("reasoning"):
        signature = ids.carrier(call_id, 0, reasoning)
        content.append({"type": "thinking", "thinking": reasoning, "signature": signature})
    if text := said.get("content"):
        content.append({"type": "text", "text": text, "citations": None})
    for index, call in enumerate(said.get("tool_calls") or []):
        block = _tool_use(call_id, index, call["function"]["name"])
        content.append(block | {"input": _input(call["function"]["arguments"])})
    message = _message(request, call_id, len(completion.prompt_ids))
    return message | _ending(completion) | {"content": content, "usage": _usage(completion)}


def _message(request: ChatRequest, call_id: str, prompt_tokens: int) -> dict[str, Any]:
    """Return the message without any content."""
    return {
        "id": ids.item("msg", call_id, 0),
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _tokens(prompt_tokens, 0),
    }


def _tool_use(call_id: str, index: int, name: str) -> Block:
    return {"type": "tool_use", "id": ids.tool_call(call_id, index), "name": name, "input": {}}


def _input(arguments: str) -> dict[str, Any]:
    given = parsed(arguments or "{}")
    if isinstance(given, dict):
        return given
    return {UNPARSED: {"raw": arguments, "len": utf16_length(arguments)}}


def utf16_length(text: str) -> int:
    """Return a string's length as JavaScript counts it."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def _ending(completion: Completion) -> dict[str, Any]:
    if completion.finish_reason == "length":
        reason = "max_tokens"
    elif completion.stop_sequence is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if completion.message.get("tool_calls") else "end_turn"
    return {"stop_reason": reason, "stop_sequence": completion.stop_sequence}


def _tokens(prompt: int, answer: int) -> dict[str, int]:
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, **cache, "output_tokens": answer}


def _usage(completion: Completion) -> dict[str, int]:
    return _tokens(len(completion.prompt_ids), len(completion.response_ids))


class MessageStream:
    """An answer as events. At most one block is open. A block ends where a part of another kind begins."""

    def __init__(self, request: ChatRequest, call_id: str) -> None:
        self._request, self._call_id = request, call_id
        self._blocks = 0
        """How many blocks were opened. The open one is the last."""
        self._open: str | None = None
        """`thinking`, `text`, or `tool_use <index>`."""
        self._thought = ""
        self._thoughts = 0

    def begin(self, prompt_tokens: int) -> bytes:
        return _event("message_start", message=_message(self._request, self._call_id, prompt_tokens))

    def feed(self, delta: Delta) -> bytes:
        sent = b""
        if delta.reasoning:
            sent += self._in("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            sent += self._say({"type": "thinking_delta", "thinking": delta.reasoning})
            self._thought += delta.reasoning
        if delta.content:
            sent += self._in("text", {"type": "text", "text": "", "citations": None})
            sent += self._say({"type": "text_delta", "text": delta.content})
        for fragment in delta.tool_calls:
            index, function = fragment["index"], fragment.get("function") or {}
            sent += self._in(f"tool_use {index}", _tool_use(self._call_id, index, function.get("name", "")))
            if arguments := function.get("arguments"):
                sent += self._say({"type": "input_json_delta", "partial_json": arguments})
        return sent

    def end(self, completion: Completion) -> bytes:
        ending = _event("message_delta", delta=_ending(completion), usage=_usage(completion))
        return self._close() + ending + _event("message_stop")

    def _in(self, kind: str, block: Block) -> bytes:
        """Open a block of this kind, unless it is open."""
        if self._open == kind:
            return b""
        sent = self._close()
        self._open = kind
        self._blocks += 1
        return sent + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _say(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        sent = b""
        if self._open == "thinking":
            signature = ids.carrier(self._call_id, self._thoughts, self._thought)
            sent = self._say({"type": "signature_delta", "signature": signature})
            self._thought, self._thoughts = "", self._thoughts + 1
        self._open = None
        return sent + _event("content_block_stop", index=self._blocks - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)
