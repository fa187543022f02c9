"""The sampling fields of a request, all of them explicit: an absent field would mean the model's default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from polar_gym.chat import ChatRequest
from polar_gym.schema import Sampling


def sampling_fields(sampling: Sampling, request: ChatRequest) -> dict[str, Any]:
    """Return the sampling under vLLM's names, with the request's limits. `seed` and `max_tokens` only where set."""
    fields = sampling.model_dump(exclude_none=True)
    if request.max_tokens is not None:
        fields["max_tokens"] = request.max_tokens
    if request.stop:
        fields["stop"] = list(request.stop)
    return fields


def truncating_fields(sampling: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that leave only a part of the vocabulary to be drawn from."""
    return [name for name in Sampling.shaping(sampling) if name in ("top_k", "top_p", "min_p")]


def logprobs_problem(mode: Literal["raw", "processed"] | None, sampling: Sampling) -> str | None:
    """Return why logprobs taken in `mode` are not those of the distribution that `sampling` samples from, or None where
    they are."""
    if mode == "processed" or not (shaped := Sampling.shaping(sampling.model_dump())):
        return None
    how = "raw: taken before" if mode == "raw" else "taken in an unknown way, which may be before"
    return f"the engine's logprobs are {how} {', '.join(shaped)}"
