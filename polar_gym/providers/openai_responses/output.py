"""A completion as a Responses object, and the items that it is made of.

Every id names the call. Reasoning leaves twice: as a summary that people and clients can read, and in
`encrypted_content`, which clients hand back untouched.
"""

from __future__ import annotations

import time
from typing import Any

from polar_gym.chat import ChatRequest, Completion, ids
from polar_gym.providers.http import sse
from polar_gym.providers.openai_errors import failure
from polar_gym.providers.openai_responses.tools import freeform_input, shell_action

Item = dict[str, Any]


def output_items(request: ChatRequest, completion: Completion, call_id: str) -> list[Item]:
    """Return the answer's items in the order reasoning, message, tool calls."""
    message, items = completion.message, []
    if reasoning := message.get("reasoning"):
        items.append(reasoning_item(call_id, 0, reasoning))
    if content := message.get("content"):
        items.append(message_item(call_id, len(items), content))
    for index, call in enumerate(message.get("tool_calls") or []):
        items.append(call_item(request, call_id, index, call["function"]["name"], call["function"]["arguments"]))
    if items and completion.finish_reason == "length":
        items[-1]["status"] = "incomplete"
    return items


def reasoning_item(call_id: str, index: int, text: str) -> Item:
    return {
        "type": "reasoning",
        "id": ids.item("rs", call_id, index),
        "summary": [{"type": "summary_text", "text": text}],
        "encrypted_content": ids.carrier(call_id, index, text),
    }


def message_item(call_id: str, index: int, text: str) -> Item:
    return {
        "type": "message",
        "id": ids.item("msg", call_id, index),
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
    }


def surface_of(request: ChatRequest, name: str) -> dict[str, str]:
    """Return the kind and the name under which the client offered the tool `name`."""
    return request.wire["surfaces"].get(name, {"kind": "function", "name": name})


def call_item(request: ChatRequest, call_id: str, index: int, name: str, arguments: str) -> Item:
    """Return a tool call in the shape of the tool that the client offered."""
    surface = surface_of(request, name)
    common = {"call_id": ids.tool_call(call_id, index), "status": "completed"}
    named = {key: surface[key] for key in ("name", "namespace") if key in surface}
    if surface["kind"] == "custom":
        freeform = {"input": freeform_input(arguments)}
        return {"type": "custom_tool_call", "id": ids.item("ctc", call_id, index), **common, **named, **freeform}
    if surface["kind"] == "local_shell" and (action := shell_action(arguments)) is not None:
        return {"type": "local_shell_call", "id": ids.item("lsh", call_id, index), **common, "action": action}
    return {
        "type": "function_call",
        "id": ids.item("fc", call_id, index),
        **common,
        **named,
        "arguments": arguments,
    }


def _usage(completion: Completion) -> dict[str, Any]:
    prompt, answer = len(completion.prompt_ids), len(completion.response_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + answer,
    }


def response(request: ChatRequest, call_id: str, status: str) -> dict[str, Any]:
    """Return the response object without any output. `tools` are not echoed: they are most of a request, and the object
    travels three times per answer."""
    return {
        "id": f"resp_{call_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "tool_choice": request.wire["tool_choice"],
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
        "metadata": request.wire["metadata"],
    }


def render(request: ChatRequest, completion: Completion, call_id: str) -> dict[str, Any]:
    """Return the whole answer as one response object."""
    return finished(request, completion, call_id, output_items(request, completion, call_id))


def finished(request: ChatRequest, completion: Completion, call_id: str, items: list[Item]) -> dict[str, Any]:
    """Return the response object at the end of the answer."""
    cut = completion.finish_reason == "length"
    done = response(request, call_id, "incomplete" if cut else "completed")
    done |= {"output": items, "usage": _usage(completion)}
    if cut:
        done["incomplete_details"] = {"reason": "max_output_tokens"}
    return done


def error_event(kind: str, message: str) -> bytes:
    """Return the event `response.failed`. Codex retries when its code is `server_error`, and gives up when the code is
    `context_length_exceeded` or `invalid_prompt`."""
    response = {"id": "resp_failed", "object": "response", "status": "failed", "output": []}
    event = {"type": "response.failed", "sequence_number": 0, "response": response | {"error": failure(kind, message)}}
    return sse(event, "response.failed")
