"""How Anthropic says that something went wrong, in a response body and inside a stream.

Clients decide by status and `type` whether to ask again. An overflow of the context is known by its wording alone, with
both numbers in it: Claude Code compacts its history on nothing else.
"""

from __future__ import annotations

import re
from typing import Any

from polar_gym.providers.http import sse

_TYPES = {
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "overloaded": "overloaded_error",
    "server": "api_error",
}

_TYPES_BY_STATUS = {413: "request_too_large", 429: "rate_limit_error"}

_LIMIT = re.compile(r"context length is (?:only )?(\d+)")
_PROMPT = re.compile(r"(?:contains|has|passed) (?:at least )?(\d+) input tokens")


def error_body(status: int, kind: str, message: str) -> dict[str, Any]:
    """The body of an error response. A kind that is not in the list is a `BadRequestError`'s own code."""
    type_ = _TYPES_BY_STATUS.get(status) or _TYPES.get(kind, "invalid_request_error")
    if kind == "context_length":
        message = _too_long(message)
    return {"type": "error", "error": {"type": type_, "message": message}, "request_id": None}


def _too_long(message: str) -> str:
    """An engine's complaint in Anthropic's words. Where it does not say how long the prompt is, or complains of the
    answer that does not fit behind it, it is one token too long: that is what is known."""
    limit = _LIMIT.search(message)
    if limit is None:
        return f"prompt is too long: {message}"
    prompt = _PROMPT.search(message)
    maximum = int(limit[1])
    length = max(int(prompt[1]) if prompt else 0, maximum + 1)
    return f"prompt is too long: {length} tokens > {maximum} maximum"


def error_event(kind: str, message: str) -> bytes:
    """The event that ends a stream. The status line is sent, so only the kind can say what happened."""
    return sse(error_body(200, kind, message), "error")
