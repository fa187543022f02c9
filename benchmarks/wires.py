"""The same conversation in each wire format: the requests of harnesses, and how they continue after an answer.

A conversation is a system prompt, an instruction and turns that each call a tool and return its result. Its first turns
were not answered by a gateway, like the first turns of a conversation that a harness resumes. Therefore one call may
have any size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from benchmarks.mock_engine import PIECE

Body = dict[str, Any]

EARLIER_TURNS = 8
RESULT_TOKENS = 100
"""Tokens of a tool's result that follows an answer."""
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
DESCRIPTION = "Run a command in the shell and return what it prints."
ARGUMENTS = '{"command": "ls"}'


def text(tokens: int, seed: int = 0) -> str:
    """Return a text of so many tokens, as the mock engine counts. No two pieces of the text are the same."""
    return "".join(f"{(seed + index) % 99_991:05d} " for index in range(tokens))[: tokens * PIECE]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The parts of one wire format that a conversation of tool calls needs."""

    name: str
    path: str
    streaming_path: str
    key: Callable[[str], dict[str, str]]
    """API key -> headers."""
    opening: Callable[[int], Body]
    """Prompt tokens -> the first request of a conversation."""
    following: Callable[[Body, Body, str], Body]
    """(request, its answer, the tool's result) -> the next request."""

    def streamed(self, body: Body) -> Body:
        """Return the body of a request for events. Where the path asks for events, the body stays the same."""
        return body if self.path != self.streaming_path else {**body, "stream": True}

    def request(self, key: str, body: Body, *, stream: bool = False) -> bytes:
        """Return the whole HTTP request."""
        said = orjson.dumps(self.streamed(body) if stream else body)
        head = [f"POST {self.streaming_path if stream else self.path} HTTP/1.1", "Host: localhost"]
        head += [f"{name}: {value}" for name, value in self.key(key).items()]
        head += ["Content-Type: application/json", f"Content-Length: {len(said)}", "", ""]
        return "\r\n".join(head).encode() + said


def _parts(tokens: int) -> tuple[str, str, list[str]]:
    """Return the system prompt, the instruction and the results of the earlier turns."""
    a_turn = tokens // (2 * EARLIER_TURNS)
    return text(tokens // 4), text(tokens // 4, 1), [text(a_turn, 7 * turn) for turn in range(EARLIER_TURNS)]


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# Chat Completions -----------------------------------------------------------------------------------------------------


def _chat_opening(tokens: int) -> Body:
    system, user, results = _parts(tokens)
    messages: list[Body] = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    for turn, result in enumerate(results):
        call = {"id": f"earlier{turn}", "type": "function", "function": {"name": "bash", "arguments": ARGUMENTS}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    function = {"name": "bash", "description": DESCRIPTION, "parameters": SCHEMA}
    return {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": function}]}


def _chat_following(body: Body, answer: Body, result: str) -> Body:
    turn = answer["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in turn["tool_calls"]]
    return {**body, "messages": [*body["messages"], turn, *results]}


# Responses ------------------------------------------------------------------------------------------------------------


def _responses_opening(tokens: int) -> Body:
    system, user, results = _parts(tokens)
    items: list[Body] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": user}]}]
    for turn, result in enumerate(results):
        called = {"call_id": f"earlier{turn}", "name": "bash", "arguments": ARGUMENTS}
        items.append({"type": "function_call", **called})
        items.append({"type": "function_call_output", "call_id": called["call_id"], "output": result})
    tool = {"type": "function", "name": "bash", "description": DESCRIPTION, "parameters": SCHEMA}
    return {"model": "policy", "instructions": system, "input": items, "tools": [tool]}


def _responses_following(body: Body, answer: Body, result: str) -> Body:
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": result} for call in calls]
    return {**body, "input": [*body["input"], *answer["output"], *results]}


# Anthropic ------------------------------------------------------------------------------------------------------------


def _anthropic_opening(tokens: int) -> Body:
    system, user, results = _parts(tokens)
    messages: list[Body] = [{"role": "user", "content": [{"type": "text", "text": user}]}]
    for turn, result in enumerate(results):
        use = {"type": "tool_use", "id": f"earlier{turn}", "name": "bash", "input": {"command": "ls"}}
        messages.append({"role": "assistant", "content": [use]})
        back = {"type": "tool_result", "tool_use_id": use["id"], "content": result}
        messages.append({"role": "user", "content": [back]})
    tool = {"name": "bash", "description": DESCRIPTION, "input_schema": SCHEMA}
    return {"model": "policy", "max_tokens": 16384, "system": system, "messages": messages, "tools": [tool]}


def _anthropic_following(body: Body, answer: Body, result: str) -> Body:
    uses = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use, "content": result} for use in uses]
    turn = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
    return {**body, "messages": [*body["messages"], *turn]}


# Gemini ---------------------------------------------------------------------------------------------------------------


def _google_opening(tokens: int) -> Body:
    system, user, results = _parts(tokens)
    contents: list[Body] = [{"role": "user", "parts": [{"text": user}]}]
    for turn, result in enumerate(results):
        named = {"id": f"earlier{turn}", "name": "bash"}
        contents.append({"role": "model", "parts": [{"functionCall": {**named, "args": {"command": "ls"}}}]})
        contents.append(_google_result(named, result))
    declared = {"name": "bash", "description": DESCRIPTION, "parametersJsonSchema": SCHEMA}
    return {
        "systemInstruction": {"parts": [{"text": system}]},
        "contents": contents,
        "tools": [{"functionDeclarations": [declared]}],
    }


def _google_following(body: Body, answer: Body, result: str) -> Body:
    turn = answer["candidates"][0]["content"]
    calls = [part["functionCall"] for part in turn["parts"] if "functionCall" in part]
    return {**body, "contents": [*body["contents"], turn, *(_google_result(call, result) for call in calls)]}


def _google_result(call: Body, result: str) -> Body:
    named = {"id": call["id"], "name": call["name"]}
    return {"role": "user", "parts": [{"functionResponse": {**named, "response": {"output": result}}}]}


CHAT = Wire(
    name="openai_chat",
    path="/v1/chat/completions",
    streaming_path="/v1/chat/completions",
    key=_bearer,
    opening=_chat_opening,
    following=_chat_following,
)
WIRES = (
    CHAT,
    Wire(
        name="openai_responses",
        path="/v1/responses",
        streaming_path="/v1/responses",
        key=_bearer,
        opening=_responses_opening,
        following=_responses_following,
    ),
    Wire(
        name="anthropic",
        path="/v1/messages",
        streaming_path="/v1/messages",
        key=lambda key: {"x-api-key": key},
        opening=_anthropic_opening,
        following=_anthropic_following,
    ),
    Wire(
        name="google",
        path="/v1beta/models/policy:generateContent",
        streaming_path="/v1beta/models/policy:streamGenerateContent?alt=sse",
        key=lambda key: {"x-goog-api-key": key},
        opening=_google_opening,
        following=_google_following,
    ),
)
