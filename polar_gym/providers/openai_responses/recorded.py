"""Recorded calls as the items of a Responses answer, which is the form that NeMo Gym's servers read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from polar_gym.chat.messages import text_of
from polar_gym.schema import ModelCall

Item = dict[str, Any]
"""An output item of the Responses API."""


def response(
    name: str, created_at: float, model: str, output: Sequence[Item], metadata: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return a finished Responses object with these items."""
    return {
        "id": f"resp_{name}",
        "created_at": created_at,
        "model": model,
        "object": "response",
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "metadata": dict(metadata),
    }


def exchanges(calls: Sequence[ModelCall]) -> Iterator[tuple[ModelCall, list[Item], list[Item]]]:
    """Yield each call, the items of its answer, and the results of its tool calls as a request first states them."""
    stated: dict[str, str] = {}
    for call in calls:
        for message in call.messages:
            if message["role"] == "tool" and message.get("tool_call_id"):
                stated.setdefault(message["tool_call_id"], text_of(message))
    for call in calls:
        answer = answer_items(call)
        asked = {item["call_id"] for item in answer if item["type"] == "function_call"}
        results = [
            {"type": "function_call_output", "call_id": call_id, "output": output}
            for call_id, output in stated.items()
            if call_id in asked
        ]
        yield call, answer, results


def answer_items(call: ModelCall) -> list[Item]:
    """Return the answer of one call as items: reasoning, text, tool calls; an empty message for an empty answer."""
    message = call.response or {}
    items: list[Item] = []
    if reasoning := message.get("reasoning"):
        summary = [{"type": "summary_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{call.call_id}", "summary": summary})
    tool_calls = message.get("tool_calls") or []
    if message.get("content") or not tool_calls:
        items.append(message_item(call.call_id, message.get("content") or ""))
    items += [_function_call(tool_call) for tool_call in tool_calls]
    return items


def message_item(name: str, text: str) -> Item:
    return {
        "type": "message",
        "id": f"msg_{name}",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def _function_call(tool_call: dict[str, Any]) -> Item:
    function = tool_call["function"]
    return {
        "type": "function_call",
        "call_id": tool_call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
        "status": "completed",
    }
