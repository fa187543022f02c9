"""Anthropic Messages.

Not shown to the model: `cache_control`, and the system block in which Claude Code bills its traffic
(`x-anthropic-billing-header: ...`), which is addressed to the server. A tool result's `is_error` is shown: the text
then begins with a line `[tool error]`, because the chat form has no flag for it. Tools that Anthropic's servers execute
are withheld (see `tools`).

Ignored, because the policy's distribution is ours: `temperature`, `top_p`, `top_k`, `thinking`, `output_config.effort`.
Ignored, because nothing is lost: `metadata`, `context_management` (nothing is ever cleared), `service_tier`,
`container`, `speed`, and every field that Anthropic does not know. Refused: a `thread` that continues a
conversation of the server's, and `compaction`, which asks for something else than a message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from polar_gym.chat import ChatRequest
from polar_gym.providers import BadRequestError, Provider, Route
from polar_gym.providers.anthropic import output
from polar_gym.providers.anthropic.errors import error_body, error_event
from polar_gym.providers.anthropic.input import messages_of
from polar_gym.providers.anthropic.tools import parallel_tool_calls, tool_choice, translate
from polar_gym.providers.fields import expect, optional, positive, refuse, required, shown
from polar_gym.providers.http import bearer_key, header

_VERSION_HEADER = "anthropic-version"
"""Every client of this API sends it, to every endpoint."""


def session_key(headers: Mapping[str, str]) -> str | None:
    """Return the key in `x-api-key`, or a bearer key with Anthropic's version header. A bearer key alone may belong to
    another API."""
    if key := header(headers, "x-api-key"):
        return key
    return bearer_key(headers) if header(headers, _VERSION_HEADER) is not None else None


def parse(body: dict[str, Any]) -> ChatRequest:
    """Return a request for an answer in chat form. Raises `BadRequestError`."""
    required(body, "max_tokens", int)
    refuse(body, "compaction", (), "nothing is compacted here; ask for a summary in a message")
    return parse_countable(body)


def parse_countable(body: dict[str, Any]) -> ChatRequest:
    """Return a request whose tokens are to be counted. It asks for no answer, so `max_tokens` may be missing. Raises
    `BadRequestError`."""
    model = required(body, "model", str)
    refuse(body, "fallbacks", ([],), "there is one model; leave it out")
    previous = (optional(body, "thread", dict) or {}).get("previous_message_id")
    if previous is not None:
        raise BadRequestError(
            "thread.previous_message_id",
            f"{shown(previous)} is not stored; send the whole conversation in `messages`",
        )
    tools = translate(body)
    messages, origins = messages_of(body)
    return ChatRequest(
        model=model,
        messages=messages,
        origins=origins,
        tools=tools.definitions,
        tool_choice=tool_choice(body, tools),
        parallel_tool_calls=parallel_tool_calls(body),
        max_tokens=positive(body, "max_tokens"),
        stop=[
            expect(word, str, f"stop_sequences[{i}]")
            for i, word in enumerate(optional(body, "stop_sequences", list) or [])
        ],
        response_format=_response_format(body),
        stream=optional(body, "stream", bool) or False,
        withheld_tools=tools.withheld,
    )


def _response_format(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the chat form of `output_config.format`, which earlier betas call `output_format`."""
    path = "output_config.format"
    wanted = optional(optional(body, "output_config", dict) or {}, "format", dict, "output_config")
    if wanted is None:
        path, wanted = "output_format", optional(body, "output_format", dict)
    if wanted is None:
        return None
    refuse(wanted, "type", ("json_schema",), "use json_schema")
    schema = required(wanted, "schema", dict, path)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def models(name: str, context_length: int) -> dict[str, Any]:
    """Return the model listing: one page with one model."""
    entry = {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "max_input_tokens": context_length,
        "max_tokens": context_length,
    }
    return {"data": [entry], "has_more": False, "first_id": name, "last_id": name}


PROVIDER = Provider(
    name="anthropic",
    routes=(
        Route(method="POST", path=re.compile(r"/messages/?$"), operation="chat"),
        Route(method="POST", path=re.compile(r"/messages/count_tokens/?$"), operation="count_tokens"),
        Route(method="GET", path=re.compile(r"/models/?$"), operation="models", header=_VERSION_HEADER),
    ),
    session_key=session_key,
    parse=parse,
    parse_countable=parse_countable,
    render=output.render,
    stream=output.MessageStream,
    models=models,
    error=error_body,
    error_event=error_event,
    keep_alive=output.PING,
    token_count=lambda count: {"input_tokens": count},
)
