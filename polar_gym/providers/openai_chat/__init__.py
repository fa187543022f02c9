"""OpenAI Chat Completions, which is also the chat form that all other formats are translated to.

Parsing therefore changes as little as possible. `developer` becomes `system`, the system messages that open a
conversation become one, and an assistant's `reasoning_content` becomes `reasoning`. The rest is checked and kept, lists
of content parts included.

Ignored, because the policy's distribution is ours: `temperature`, `top_p`, `presence_penalty`, `frequency_penalty`,
`logit_bias`, `seed`, `reasoning_effort`. Ignored, because nothing is lost: `store`, `metadata`, `user`,
`service_tier`, `prompt_cache_key`, `safety_identifier`, `prediction`, `verbosity`, and every field that OpenAI does not
know. Refused, because the answer would not be what was asked for: see `_refuse_unsupported`.
"""

from __future__ import annotations

import re
from typing import Any

from polar_gym.chat import ChatRequest
from polar_gym.providers import BadRequestError, Provider, Route
from polar_gym.providers.fields import expect, objects, optional, positive, refuse, required, shown
from polar_gym.providers.http import bearer_key
from polar_gym.providers.messages import arranged, file_left_out
from polar_gym.providers.openai_chat import output
from polar_gym.providers.openai_errors import error_body
from polar_gym.providers.tools import Tools, openai_choice
from polar_gym.schema import Message, ToolDefinition

_MEDIA = ("image_url", "input_audio", "audio_url", "video_url", "file")
"""Content parts other than text: those that an engine may understand, and files, of which the model is told only."""


def parse(body: dict[str, Any]) -> ChatRequest:
    """Return the request in chat form. Raises `BadRequestError`."""
    model = required(body, "model", str)
    _refuse_unsupported(body)
    required(body, "messages", list)
    messages = [_message(message, path) for path, message in objects(body, "messages")]
    if not messages:
        raise BadRequestError("messages", "is empty; send at least one message", code="empty_array")
    tools = Tools([_tool(tool, path) for path, tool in objects(body, "tools")])
    stream_options = optional(body, "stream_options", dict) or {}
    return ChatRequest(
        model=model,
        messages=arranged(messages),
        tools=tools.definitions,
        tool_choice=openai_choice(body.get("tool_choice"), tools, _named_tool),
        parallel_tool_calls=optional(body, "parallel_tool_calls", bool),
        max_tokens=positive(body, "max_completion_tokens") or positive(body, "max_tokens"),
        stop=_stop(body.get("stop")),
        response_format=_response_format(body),
        stream=optional(body, "stream", bool) or False,
        wire={"include_usage": optional(stream_options, "include_usage", bool, "stream_options") or False},
        withheld_tools=["web_search"] if body.get("web_search_options") is not None else [],
    )


def _refuse_unsupported(body: dict[str, Any]) -> None:
    refuse(body, "n", (1,), "one answer is sampled per request; send 1, or send the request again")
    refuse(body, "logprobs", (False,), "logprobs are recorded, not sent to clients; leave it out")
    refuse(body, "top_logprobs", (0,), "logprobs are recorded, not sent to clients; leave it out")
    refuse(body, "modalities", (["text"],), "answers are text; leave it out")
    refuse(body, "audio", (), "answers are text; leave it out")
    refuse(body, "functions", ([],), "it was replaced by `tools`; use that")
    refuse(body, "function_call", ("auto", "none"), "it was replaced by `tool_choice`; use that")


def _message(message: dict[str, Any], path: str) -> Message:
    role = required(message, "role", str, path)
    if role in ("system", "developer"):
        return _named({"role": "system", "content": _content(message, path, media=())}, message, path)
    if role == "user":
        return _named({"role": "user", "content": _content(message, path, media=_MEDIA)}, message, path)
    if role == "assistant":
        return _named(_assistant(message, path), message, path)
    if role == "tool":
        tool_call_id = required(message, "tool_call_id", str, path)
        content = _content(message, path, media=_MEDIA)
        return _named({"role": "tool", "tool_call_id": tool_call_id, "content": content}, message, path)
    raise BadRequestError(
        f"{path}.role", f"{shown(role)} is not a role; use system, developer, user, assistant or tool"
    )


def _named(translated: Message, message: dict[str, Any], path: str) -> Message:
    name = optional(message, "name", str, path)
    return translated if name is None else {**translated, "name": name}


def _assistant(message: dict[str, Any], path: str) -> Message:
    if message.get("function_call") is not None:
        raise BadRequestError(f"{path}.function_call", "it was replaced by `tool_calls`; use that")
    if message.get("audio") is not None:
        raise BadRequestError(f"{path}.audio", "spoken answers are not stored; send the text in `content`")
    if message.get("content") is None:
        translated: Message = {"role": "assistant", "content": optional(message, "refusal", str, path)}
    else:
        translated = {"role": "assistant", "content": _content(message, path, media=())}
    if reasoning := optional(message, "reasoning", str, path) or optional(message, "reasoning_content", str, path):
        translated["reasoning"] = reasoning
    if calls := objects(message, "tool_calls", path):
        translated["tool_calls"] = [_tool_call(call, call_path) for call_path, call in calls]
    return translated


def _tool_call(call: dict[str, Any], path: str) -> dict[str, Any]:
    _function_type(call, path)
    function = required(call, "function", dict, path)
    name = required(function, "name", str, f"{path}.function")
    arguments = required(function, "arguments", str, f"{path}.function")
    call_id = required(call, "id", str, path)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _content(message: dict[str, Any], path: str, media: tuple[str, ...]) -> str | list[dict[str, Any]]:
    content, field = message.get("content"), f"{path}.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError(field, f"expected a string or a list of parts, got {shown(content)}", code="invalid_type")
    return [_part(part, part_path, media) for part_path, part in objects(message, "content", path)]


def _part(part: dict[str, Any], path: str, media: tuple[str, ...]) -> dict[str, Any]:
    kind = required(part, "type", str, path)
    if kind == "text":
        required(part, "text", str, path)
        return part
    if kind == "refusal":
        return {"type": "text", "text": required(part, "refusal", str, path)}
    if kind not in media:
        raise BadRequestError(f"{path}.type", f"{shown(kind)} is not supported here; use {', '.join(('text', *media))}")
    medium = required(part, kind, dict, path)
    return file_left_out(medium, f"{path}.{kind}") if kind == "file" else part


def _function_type(entry: dict[str, Any], path: str) -> None:
    kind = entry.get("type", "function")
    if kind != "function":
        raise BadRequestError(f"{path}.type", f"{shown(kind)} is not supported; use function")


def _tool(tool: dict[str, Any], path: str) -> ToolDefinition:
    _function_type(tool, path)
    function = required(tool, "function", dict, path)
    required(function, "name", str, f"{path}.function")
    optional(function, "description", str, f"{path}.function")
    optional(function, "parameters", dict, f"{path}.function")
    return {"type": "function", "function": function}


def _named_tool(choice: dict[str, Any]) -> str | None:
    if choice.get("type") != "function":
        return None
    return required(required(choice, "function", dict, "tool_choice"), "name", str, "tool_choice.function")


def _stop(stop: Any) -> list[str]:
    if stop is None:
        return []
    if isinstance(stop, str):
        return [stop]
    return [expect(entry, str, f"stop[{i}]") for i, entry in enumerate(expect(stop, list, "stop"))]


def _response_format(body: dict[str, Any]) -> dict[str, Any] | None:
    wanted = optional(body, "response_format", dict)
    if wanted is None:
        return None
    kind = required(wanted, "type", str, "response_format")
    if kind == "json_schema":
        schema = required(wanted, "json_schema", dict, "response_format")
        required(schema, "schema", dict, "response_format.json_schema")
    elif kind not in ("text", "json_object"):
        raise BadRequestError(
            "response_format.type", f"{shown(kind)} is not supported; use text, json_object or json_schema"
        )
    return wanted


def models(name: str, context_length: int) -> dict[str, Any]:
    """Return the model listing. `max_model_len` is vLLM's name of the context length in it."""
    entry = {"id": name, "object": "model", "created": 0, "owned_by": "polar-gym", "max_model_len": context_length}
    return {"object": "list", "data": [entry]}


PROVIDER = Provider(
    name="openai_chat",
    routes=(
        Route(method="POST", path=re.compile(r"/chat/completions/?$"), operation="chat"),
        Route(method="GET", path=re.compile(r"/models/?$"), operation="models"),
    ),
    session_key=bearer_key,
    parse=parse,
    render=output.render,
    stream=output.Chunks,
    models=models,
    error=error_body,
    error_event=output.error_event,
    keep_alive=b": keep-alive\n\n",
)
