"""Recorded calls as the items of a Responses answer, which is the form that NeMo Gym's servers read."""

from __future__ import annotations

from collections import defaultdict
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
    """Yield each call, the items of its answer, and the results of its tool calls as a request that goes on with the
    answer first states them.

    An engine's ids need not differ between two conversations of a session: vLLM counts those of Kimi K2 from 0 in each.
    An id that an earlier answer had is given out with the call's own id before it.
    """
    stated = [_results(call) for call in calls]
    following: defaultdict[str | None, list[int]] = defaultdict(list)
    for place, call in enumerate(calls):
        following[call.parent_id].append(place)
    seen: set[str] = set()
    for place, call in enumerate(calls):
        # Without splicing, no call names the one that it goes on with.
        later = following.get(call.call_id) or range(place + 1, len(calls))
        answer, outputs = answer_items(call), []
        for item in (item for item in answer if item["type"] == "function_call"):
            own = item["call_id"]
            item["call_id"] = f"{call.call_id}:{own}" if own in seen else own
            seen.add(own)
            output = next((stated[each][own] for each in later if own in stated[each]), None)
            if output is not None:
                outputs.append({"type": "function_call_output", "call_id": item["call_id"], "output": output})
        yield call, answer, outputs


def _results(call: ModelCall) -> dict[str, str]:
    """Return the results of tool calls that a request states, by the ids of the tool calls."""
    results: dict[str, str] = {}
    for message in call.messages:
        if message["role"] == "tool" and message.get("tool_call_id"):
            results.setdefault(message["tool_call_id"], text_of(message))
    return results


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
