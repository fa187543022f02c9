"""The context length of an engine, and the errors of a request that does not fit into it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from polar_gym.chat import ChatRequest, Completion
from polar_gym.engines import EngineError

SMALLEST_SPACE = 64
"""The context counts as full where fewer tokens are left for an answer, unless the request's limit is lower."""


def check_space(request: ChatRequest, max_model_len: int) -> None:
    """Raise `EngineError` where an answer would be cut off at its beginning. Most harnesses take such an answer for
    the last one, and they compact when they are told that the context is full. Without `prompt_ids` we cannot count:
    the engine rejects the request itself."""
    if request.prompt_ids is None:
        return
    used, wanted = len(request.prompt_ids), min(SMALLEST_SPACE, request.max_tokens or SMALLEST_SPACE)
    if used + wanted > max_model_len:
        raise no_space(max_model_len, f"contains {used} input tokens", "too little space")


def no_space(max_model_len: int, prompt: str = "fills it to the last token", left: str = "no space") -> EngineError:
    """Return the error for a prompt that leaves no space for an answer, in words that harnesses look for."""
    return EngineError(
        400,
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt {prompt}, "
        f"which leaves {left} for an answer. Shorten the prompt.",
        kind="context_length",
    )


def leaves_no_space(error: EngineError, fields: dict[str, Any]) -> bool:
    """Return whether vLLM found no space for an answer. vLLM first lowers `max_tokens` to the remaining context, and
    then complains of a 0 that was not sent."""
    complains = error.status == 400 and "max_tokens must be at least 1" in error.message
    return complains and fields.get("max_tokens", 1) >= 1


async def within_the_space(
    complete: Callable[[dict[str, Any]], Awaitable[Completion]], fields: dict[str, Any]
) -> Completion:
    """Return what `complete` answers. Where the engine refuses `max_tokens` because of the context length, ask again
    without it: vLLM's default is exactly the space that the prompt leaves. A prompt that is itself too long is refused
    the same way."""
    try:
        return await complete(fields)
    except EngineError as error:
        of_length = error.kind == "context_length" or (error.status == 400 and "max_model_len" in error.message)
        if "max_tokens" not in fields or not of_length:
            raise
        return await complete({name: value for name, value in fields.items() if name != "max_tokens"})
