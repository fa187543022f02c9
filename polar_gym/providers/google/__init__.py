"""Google's generateContent: the Gemini API and Vertex AI, whose bodies are the same.

The URL names the model and says whether to stream, so these two become fields of the body (`Route.path`). Any model is
the policy, whatever its name. Google has two forms of a stream. Only events (`?alt=sse`) are sent here, the form that
Google's libraries ask for. Fields may be spelled in camelCase or snake_case.

Ignored, because the policy's distribution is ours: `temperature`, `topP`, `topK`, `seed`, `presencePenalty`,
`frequencyPenalty`, `thinkingConfig`. Ignored, because nothing is lost: `safetySettings`, `labels`, the rest of
`generationConfig`, and every field that Google does not know. Refused, because the answer would not be what was asked
for: see `_refuse_unsupported`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from polar_gym.chat import ChatRequest
from polar_gym.providers import BadRequestError, Provider, Route
from polar_gym.providers.fields import optional, positive, refuse, required, shown
from polar_gym.providers.google import output
from polar_gym.providers.google.contents import messages_of
from polar_gym.providers.google.errors import error_body, error_event
from polar_gym.providers.google.json import camel, message_at, strings_at
from polar_gym.providers.google.tools import choice_of, schema_of, tools_of
from polar_gym.providers.http import bearer_key, header


def parse(body: dict[str, Any]) -> ChatRequest:
    """Return the request in chat form. Raises `BadRequestError`."""
    try:
        return _parse(camel(body))
    except RecursionError:
        raise BadRequestError("body", "is nested too deeply; send a flatter one") from None


def _parse(body: dict[str, Any]) -> ChatRequest:
    model = required(body, "model", str).removeprefix("models/")
    streams = body.get("stream") is not None
    config = message_at(body, "generationConfig")
    _refuse_unsupported(body, config, streams)
    tools = tools_of(body)
    choice, offered = choice_of(body, tools)
    messages, origins = messages_of(body)
    return ChatRequest(
        model=model,
        messages=messages,
        origins=origins,
        tools=offered,
        tool_choice=choice,
        max_tokens=positive(config, "maxOutputTokens"),
        stop=strings_at(config, "stopSequences", "generationConfig"),
        response_format=_response_format(config),
        stream=streams,
        withheld_tools=tools.withheld,
    )


def parse_countable(body: dict[str, Any]) -> ChatRequest:
    """Return a request whose tokens are to be counted, which may be wrapped in another. Raises `BadRequestError`."""
    wrapped = message_at(camel(body), "generateContentRequest")
    return parse(wrapped | {"model": body.get("model")} if wrapped else body)


def _refuse_unsupported(body: dict[str, Any], config: dict[str, Any], streams: bool) -> None:
    if streams and body.get("alt") != "sse":
        raise BadRequestError("alt", f"{shown(body.get('alt'))} is not supported for streams; send `?alt=sse`")
    if cached := optional(body, "cachedContent", str):
        raise BadRequestError(
            "cachedContent",
            f"CachedContent not found (or permission denied): nothing is cached here, not {shown(cached)}; "
            "send the whole conversation in `contents`",
        )
    refuse(config, "candidateCount", (1,), "one answer is sampled per request; send 1, or send the request again")
    refuse(config, "responseModalities", ([], ["TEXT"], ["text"]), "answers are text; leave it out")
    refuse(config, "responseLogprobs", (False,), "logprobs are recorded, not sent to clients; leave it out")


def _response_format(config: dict[str, Any]) -> dict[str, Any] | None:
    path = "generationConfig"
    mime = optional(config, "responseMimeType", str, path)
    if mime in (None, "text/plain"):
        return None
    if mime != "application/json":
        raise BadRequestError(
            f"{path}.responseMimeType", f"{shown(mime)} is not supported; use text/plain or application/json"
        )
    json_key = next((key for key in ("responseJsonSchema", "_responseJsonSchema") if key in config), "")
    schema = schema_of(config, json_key, "responseSchema", path)
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}


def session_key(headers: Mapping[str, str]) -> str | None:
    return header(headers, "x-goog-api-key") or bearer_key(headers)


def models(name: str, context_length: int) -> dict[str, Any]:
    """Return the model listing."""
    methods = ["generateContent", "countTokens"]
    entry = {"name": f"models/{name}", "displayName": name, "inputTokenLimit": context_length}
    return {"models": [entry | {"outputTokenLimit": context_length, "supportedGenerationMethods": methods}]}


_MODEL = r"/models/(?P<model>.+):"

PROVIDER = Provider(
    name="google",
    routes=(
        Route(
            method="POST",
            path=re.compile(rf"{_MODEL}(?P<stream>stream)?[gG]enerateContent$"),
            query=("alt",),
            operation="chat",
        ),
        Route(method="POST", path=re.compile(rf"{_MODEL}countTokens$"), operation="count_tokens"),
        Route(method="GET", path=re.compile(r"/v1(alpha|beta\d*)/(.+/)?models/?$"), operation="models"),
        Route(method="GET", path=re.compile(r"/models/?$"), header="x-goog-api-key", operation="models"),
    ),
    session_key=session_key,
    key_parameter="key",
    parse=parse,
    parse_countable=parse_countable,
    render=output.render,
    stream=output.Stream,
    models=models,
    error=error_body,
    error_event=error_event,
    keep_alive=b"\n\n",
    token_count=lambda count: {"totalTokens": count},
)
