"""Providers: the wire formats in which harnesses ask for model calls.

A plug-in is one module or package here that defines a constant `PROVIDER`, a `Provider`: a pure two-way translation
between its wire format and the chat form. It knows no harness, no engine and no session.

The other modules are shared by the providers. `fields` and `json_text` read untrusted JSON, `messages` and `tools` hold
rules of the chat form. `http` reads keys and writes server-sent events, and `openai_errors` writes errors as OpenAI
does. The room uses `chat`, `registry` and `schema`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from polar_gym.chat import ChatRequest, Completion, Delta
from polar_gym.chat.received import whole_delta
from polar_gym.registry import Registry

Operation = Literal["chat", "models", "count_tokens"]


class BadRequestError(ValueError):
    """A request body that this wire format does not allow. The message names the field, the value and the fix."""

    def __init__(self, field: str, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.code = field, code


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One endpoint of a provider, after any base-path prefix."""

    method: str
    path: re.Pattern[str]
    """Matched against the end of the request path with `search`. Its named groups become fields of the request's body,
    for wire formats whose URL says what the body says in other formats (`said`)."""
    query: tuple[str, ...] = ()
    """Query parameters that become fields of the body likewise."""
    operation: Operation
    header: str | None = None
    """A header that the request must carry, for a path that other providers answer too. A route with a header is tried
    before the others."""

    def matches(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        wanted = self.header is None or any(name.lower() == self.header for name in headers)
        return wanted and method == self.method and self.path.search(path) is not None

    def said(self, path: str, query: Mapping[str, str]) -> dict[str, str | None]:
        """Return the fields that the URL of a request to this route adds to its body."""
        found = self.path.search(path)
        return (found.groupdict() if found else {}) | {name: query.get(name) for name in self.query}


class EventStream(Protocol):
    """One answer on its way out as the provider's server-sent events. Each method returns the bytes to send now (maybe
    none). Called in the order `begin`, `feed` any number of times, `end`; `end` without any `feed` is an empty answer.
    """

    def begin(self, prompt_tokens: int) -> bytes:
        """Return the events before the first word."""
        ...

    def feed(self, delta: Delta) -> bytes:
        """Return the delta's parts in the order reasoning, content, tool calls."""
        ...

    def end(self, completion: Completion) -> bytes:
        """Close the open part, and return the terminal events. All of `completion`, the whole answer, was fed
        before."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A wire format as plain functions over plain data."""

    name: str
    routes: tuple[Route, ...]
    session_key: Callable[[Mapping[str, str]], str | None]
    """Request headers -> the API key they carry."""
    key_parameter: str | None = None
    """The query parameter that may carry the key instead."""
    parse: Callable[[dict[str, Any]], ChatRequest]
    """Request body -> chat form. Raises `BadRequestError`."""
    parse_countable: Callable[[dict[str, Any]], ChatRequest] | None = None
    """Like `parse`, for the body of the token-counting endpoint, where its form differs."""
    render: Callable[[ChatRequest, Completion, str], dict[str, Any]]
    """Chat form -> the provider's whole (non-streaming) answer. The last argument is the call id, which every minted id
    names."""
    stream: Callable[[ChatRequest, str], EventStream]
    """(request, call id) -> a new stream of the provider's server-sent events."""
    models: Callable[[str, int], dict[str, Any]]
    """(model name, context length) -> the provider's model listing."""
    error: Callable[[int, str, str], dict[str, Any]]
    """(HTTP status, kind, message) -> the provider's error body. Kinds: `authentication`, `permission`, `not_found`,
    `invalid_request`, `context_length`, `overloaded`, `server`."""
    error_event: Callable[[str, str], bytes]
    """(kind, message) -> an in-stream error event, for a stream whose status line is already sent."""
    keep_alive: bytes
    """Bytes that every client of this format tolerates between events."""
    stream_headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Headers of a stream, beside those of all streams."""
    token_count: Callable[[int], dict[str, Any]] | None = None
    """Prompt length -> the answer of the provider's token-counting endpoint, where it has one."""


PROVIDERS: Registry[Provider] = Registry("provider", __name__)


def routes(providers: Iterable[Provider]) -> list[tuple[Provider, Route]]:
    """Return the routes of all providers in the order in which they are tried."""
    every = [(provider, route) for provider in providers for route in provider.routes]
    return sorted(every, key=lambda pair: pair[1].header is None)


def whole_answer(stream: EventStream, completion: Completion) -> bytes:
    """Return a complete answer as one stream of events, for a streaming client where the engine did not stream."""
    return stream.begin(len(completion.prompt_ids)) + stream.feed(whole_delta(completion)) + stream.end(completion)
