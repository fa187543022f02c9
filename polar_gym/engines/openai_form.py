"""Shared by engines with an OpenAI-compatible API: options, the chat request, the answer, the model."""

from __future__ import annotations

from collections.abc import Sized
from math import isfinite
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from polar_gym.chat import ChatRequest
from polar_gym.chat.messages import assistant_message
from polar_gym.engines import EngineError
from polar_gym.engines.http import PATIENCE_SECONDS, Body, Http
from polar_gym.http.urls import engine_url, is_http_url
from polar_gym.registry import Options
from polar_gym.schema import Message

CHAT = "/v1/chat/completions"

ABOVE_ZERO = 1e-3
"""How far rounding may carry the logarithm of a probability, or of a sum of probabilities, above 0. In float32 the
normaliser is off by less than 1e-4 for logits up to 2,000. A logit is seldom so close to 0, and never in each of many
tokens."""
LEAST_TOTAL = -14.0
"""The logprob of the likeliest of a million tokens is greater. All logits of some models (GPT-2) are far below zero."""


class ServerOptions(Options):
    """The options of an engine behind a URL."""

    url: str | list[str] = ""
    """Where the engine's server listens, e.g. `http://127.0.0.1:8000`, with or without `/v1`; of SGLang a worker. A
    list names several servers of the same model, and so does a host name that has several addresses at the start. Each
    session stays with one of them."""
    api_key: str | None = None
    """Sent as a bearer token, where the server wants one."""
    model: str | None = None
    """Default: the first model that the server names."""
    max_model_len: int | None = Field(default=None, gt=0)
    """Context length in tokens, where the server does not state the model's."""
    patience_seconds: float = Field(default=PATIENCE_SECONDS, ge=0)
    """How long a call waits for a server that is away or busy, before it fails."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Given to the chat template with every call, e.g. `enable_thinking`. A harness has no say in it."""

    @field_validator("url")
    @classmethod
    def _http(cls, value: str | list[str]) -> str | list[str]:
        urls = [value] if isinstance(value, str) else value
        for url in filter(None, urls):
            if not is_http_url(url):
                raise ValueError(f"expected a URL, e.g. http://127.0.0.1:8000, not {url!r}")
        if isinstance(value, list) and (not value or not all(value) or len(set(map(engine_url, value))) < len(value)):
            raise ValueError("expected one or more URLs, each of them once")
        return value


def chat_body(model: str, request: ChatRequest, fields: dict[str, Any], template_kwargs: dict[str, Any]) -> Body:
    """Return a request for one whole answer with ids and logprobs; `fields` are those of the sampling.

    `parallel_tool_calls` is left out: vLLM keeps to one call by a grammar, which would bend the distribution.
    """
    body: Body = {
        "model": model,
        "messages": request.messages,
        "stream": False,
        "return_token_ids": True,
        "logprobs": True,
        **fields,
    }
    if request.tools:
        body["tools"] = request.tools
        if request.tool_choice is not None:
            body["tool_choice"] = request.tool_choice
    if request.response_format is not None:
        body["response_format"] = request.response_format
    if template_kwargs:
        body["chat_template_kwargs"] = template_kwargs
    return body


def message_of(message: Message) -> Message:
    """Return the engine's message without its empty fields. Some engines call reasoning `reasoning_content`."""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    tool_calls = message.get("tool_calls") or []
    return assistant_message(message.get("content") or (None if tool_calls else ""), reasoning, tool_calls)


def stop_sequence(choice: Body) -> str | None:
    """Return the stop string that ended the answer, or None where a stop token did, whose id engines name."""
    reason = choice.get("stop_reason") or choice.get("matched_stop")
    return reason if isinstance(reason, str) else None


def logprobs_of(url: str, choice: Body, ids: list[int]) -> list[float]:
    """Return one logprob for each sampled id. Raises `EngineError` where one is missing, no number, or above 0."""
    logprobs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]
    check_count(url, logprobs, ids)
    check_logprobs(url, logprobs)
    return logprobs


def check_count(url: str, logprobs: list[float], ids: list[int]) -> None:
    """Check that there is one logprob for each sampled id. Raises `EngineError` where there is not."""
    if len(logprobs) != len(ids):
        raise EngineError(
            502,
            f"the engine at {url} answered with {len(ids)} ids but {len(logprobs)} logprobs: it must "
            "honour `logprobs: true` for every sampled token",
        )


def check_whole(url: str, counted: int | None, ids: Sized) -> None:
    """Check that a whole answer holds an id for each token that the engine counted, if it counted any. Raises
    `EngineError`: tokens after a gap would be trained in a context in which they were not sampled."""
    if counted not in (None, len(ids)):
        raise EngineError(
            502,
            f"the engine at {url} sampled {counted} tokens and answered with {len(ids)} ids: it leaves out the ids of "
            "text that a parser holds back, as vLLM does before its pull request 29074; use a newer version",
        )


def check_logprobs(url: str, logprobs: list[float]) -> None:
    """Check the logprobs of sampled tokens. Raises `EngineError` where one is not a number, or above 0."""
    if not logprobs or (None not in logprobs and isfinite(sum(logprobs)) and max(logprobs) <= ABOVE_ZERO):
        return  # streams bring a few at a time, for which arrays cost more
    wrong = np.flatnonzero(~np.isfinite(np.asarray(logprobs, np.float64)))
    if len(wrong):
        raise EngineError(
            502,
            f"the engine at {url} answered with the logprob {logprobs[wrong[0]]} for token {wrong[0]} of "
            f"{len(logprobs)}: the model's weights or activations overflow; serve it in a dtype with more range "
            "(bfloat16, float32)",
        )
    for place in np.flatnonzero(np.asarray(logprobs) > ABOVE_ZERO)[:1]:
        raise _logits(url, f"the logprob {logprobs[place]:.2f} for token {place} of {len(logprobs)}, which is above 0")


def check_normalised(url: str, likeliest: list[float], *, kept: bool = False) -> None:
    """Check the logprobs of the likeliest tokens in one place. `kept`: no other token could be sampled. Raises
    `EngineError` where their probabilities cannot be those of one distribution."""
    least = -ABOVE_ZERO if kept else LEAST_TOTAL
    if likeliest and not least <= (total := float(np.logaddexp.reduce(likeliest))) <= ABOVE_ZERO:
        which = "all tokens" if kept else f"{len(likeliest)} tokens"
        raise _logits(url, f"logprobs of {which} whose probabilities add up to exp({total:.2f})")


def _logits(url: str, answered: str) -> EngineError:
    return EngineError(
        502,
        f"the engine at {url} answered with {answered}: these are logits. vLLM sends them with --logprobs-mode "
        "processed_logits or raw_logits; start it with --logprobs-mode processed_logprobs",
    )


async def served_model(http: Http, wanted: str | None) -> Body:
    """Return the entry of the model `wanted`, by default of the first model served. Raises `EngineError` when the
    server does not list the model."""
    served = {entry["id"]: entry for entry in (await http.get("/v1/models"))["data"]}
    model = wanted or next(iter(served), "")
    if model not in served:
        raise EngineError(
            404,
            f"{http.name} at {http.url} does not serve engine.model={model!r}; it serves: {', '.join(served)}",
            kind="not_found",
        )
    return served[model]


def context_length(http: Http, entry: Body, configured: int | None) -> int:
    """Return the length that the server states, else the configured one. Raises `EngineError` where both differ: the
    server would go on to its own length, of which harness and splicing know nothing."""
    stated = entry.get("max_model_len")
    if stated and configured not in (None, stated):
        raise EngineError(
            400,
            f"engine.max_model_len={configured}: {http.url} states {stated} for {entry['id']!r}; leave the setting "
            "out, or start the server with this length",
        )
    length = stated or configured
    if not length:
        raise EngineError(
            502, f"{http.url}/v1/models names no max_model_len for {entry['id']!r}; set engine.max_model_len"
        )
    return length


def as_ids(ids: list[int]) -> np.ndarray:
    return np.asarray(ids, np.int32)
