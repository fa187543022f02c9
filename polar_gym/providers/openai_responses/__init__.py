"""OpenAI Responses, without the server's memory: a request carries its whole conversation.

Ignored, because the policy's distribution is ours: `temperature`, `top_p`, `reasoning`, `text.verbosity`. Ignored,
because nothing is lost: `store` (nothing is stored), `include` (reasoning always comes with `encrypted_content`),
`truncation` (nothing is ever dropped), `max_tool_calls` (counts server-side tools). Likewise `prompt_cache_key`,
`client_metadata`, `user`, `service_tier`, and every field that OpenAI does not know. Refused: fields that need a server
with a memory (see `_refuse_unsupported`).
"""

from __future__ import annotations

import re
from typing import Any

from polar_gym.chat import ChatRequest
from polar_gym.providers import BadRequestError, Provider, Route
from polar_gym.providers.fields import optional, positive, refuse, required, shown
from polar_gym.providers.http import bearer_key
from polar_gym.providers.openai_chat import models
from polar_gym.providers.openai_errors import error_body
from polar_gym.providers.openai_responses import output, stream
from polar_gym.providers.openai_responses.input import messages_of
from polar_gym.providers.openai_responses.tools import flat_name, translate
from polar_gym.providers.tools import openai_choice


def parse(body: dict[str, Any]) -> ChatRequest:
    """Return the request in chat form. Raises `BadRequestError`."""
    model = required(body, "model", str)
    _refuse_unsupported(body)
    tools = translate(body)
    messages, origins = messages_of(body)
    return ChatRequest(
        model=model,
        messages=messages,
        origins=origins,
        tools=tools.definitions,
        tool_choice=openai_choice(body.get("tool_choice"), tools, _named_tool),
        parallel_tool_calls=optional(body, "parallel_tool_calls", bool),
        max_tokens=positive(body, "max_output_tokens"),
        response_format=_response_format(body),
        stream=optional(body, "stream", bool) or False,
        wire={
            "surfaces": tools.surfaces,
            "tool_choice": body.get("tool_choice") or "auto",
            "metadata": optional(body, "metadata", dict) or {},
        },
        withheld_tools=tools.withheld,
    )


def _refuse_unsupported(body: dict[str, Any]) -> None:
    previous = optional(body, "previous_response_id", str)
    if previous:
        raise BadRequestError(
            "previous_response_id",
            f"{shown(previous)} is not stored; send the whole conversation in `input`",
            code="previous_response_not_found",
        )
    refuse(body, "background", (False,), "answers are not stored; leave it out")
    refuse(body, "conversation", (), "conversations are not stored; send the whole conversation in `input`")
    refuse(body, "prompt", (), "prompt templates are not stored; send the text in `input`")
    refuse(body, "top_logprobs", (0,), "logprobs are recorded, not sent to clients; leave it out")


def _named_tool(choice: dict[str, Any]) -> str | None:
    if choice.get("type") not in ("function", "custom"):
        return None
    name = required(choice, "name", str, "tool_choice")
    return flat_name(name, optional(choice, "namespace", str, "tool_choice"))


def _response_format(body: dict[str, Any]) -> dict[str, Any] | None:
    wanted = optional(optional(body, "text", dict) or {}, "format", dict, "text")
    if wanted is None:
        return None
    kind = required(wanted, "type", str, "text.format")
    if kind == "json_schema":
        required(wanted, "name", str, "text.format")
        required(wanted, "schema", dict, "text.format")
        kept = {key: wanted[key] for key in ("name", "description", "schema", "strict") if wanted.get(key) is not None}
        return {"type": "json_schema", "json_schema": kept}
    if kind in ("text", "json_object"):
        return {"type": kind}
    raise BadRequestError("text.format.type", f"{shown(kind)} is not supported; use text, json_object or json_schema")


PROVIDER = Provider(
    name="openai_responses",
    routes=(
        Route(method="POST", path=re.compile(r"/responses/?$"), operation="chat"),
        Route(method="POST", path=re.compile(r"/responses/input_tokens/?$"), operation="count_tokens"),
    ),
    session_key=bearer_key,
    parse=parse,
    render=output.render,
    stream=stream.Events,
    models=models,
    error=error_body,
    error_event=output.error_event,
    keep_alive=b": keep-alive\n\n",
    # Codex adds its own estimate of earlier reasoning to the usage elsewhere, and compacts too early.
    stream_headers={"X-Reasoning-Included": "true"},
    token_count=lambda count: {"object": "response.input_tokens", "input_tokens": count},
)
