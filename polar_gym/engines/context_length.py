"""The context length: telling apart the ways in which a request does not fit an engine's."""

from __future__ import annotations

from typing import Any

from polar_gym.chat import ChatRequest
from polar_gym.engines import EngineError

SMALLEST_ROOM = 64
"""Tokens for an answer, unless its own limit is lower: where fewer are left of the context, it is full."""


def check_room(request: ChatRequest, max_model_len: int) -> None:
    """Raises `EngineError` where an answer would be cut off at its beginning. Most harnesses take that for the last
    answer, and when they are told that the context is full they compact. (Of a prompt without ids the engine knows.)"""
    if request.prompt_ids is None:
        return
    used, wanted = len(request.prompt_ids), min(SMALLEST_ROOM, request.max_tokens or SMALLEST_ROOM)
    if used + wanted > max_model_len:
        raise EngineError(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {used} "
            "input tokens, which leaves too little room for an answer. Shorten the prompt.",
            kind="context_length",
        )


def no_room(max_model_len: int) -> EngineError:
    return EngineError(
        400,
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt fills it to "
        "the last token, which leaves no room for an answer. Shorten the prompt.",
        kind="context_length",
    )


def leaves_no_room(error: EngineError, fields: dict[str, Any]) -> bool:
    """vLLM clamps `max_tokens` to the room first, and then complains of a 0 that nobody sent."""
    complains = error.status == 400 and "max_tokens must be at least 1" in error.message
    return complains and fields.get("max_tokens", 1) >= 1


def asks_for_more_than_the_room(error: EngineError, fields: dict[str, Any]) -> bool:
    """Whether the engine refused `max_tokens` because of the context length. Versions word it differently; should the
    prompt itself be too long, asking again without `max_tokens` is refused the same way."""
    return (
        error.status == 400
        and "max_tokens" in fields
        and ("max_model_len" in error.message or "maximum context length" in error.message)
    )
