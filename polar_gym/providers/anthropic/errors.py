"""Anthropic's form of an error, in a response body and inside a stream.

Clients decide by status and `type` whether to ask again. They know an overflow of the context by its wording alone,
with both numbers in it: Claude Code compacts its history for no other error.
"""

from __future__ import annotations

from typing import Any

from polar_gym.providers.http import sse
from polar_gym.providers.overflow import overflow

_TYPES = {
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "overloaded": "overloaded_error",
    "server": "api_error",
}

_TYPES_BY_STATUS = {413: "request_too_large", 429: "rate_limit_error"}


def error_body(status: int, kind: str, message: str) -> dict[str, Any]:
    """Return the body of an error response. A kind that is not in the list is the code of a `BadRequestError`."""
    type_ = _TYPES_BY_STATUS.get(status) or _TYPES.get(kind, "invalid_request_error")
    if kind == "context_length":
        message = _too_long(message)
    return {"type": "error", "error": {"type": type_, "message": message}, "request_id": None}


def _too_long(message: str) -> str:
    """Return an engine's complaint in Anthropic's words. The engine may not name the prompt's length, or may complain
    of an answer that does not fit after the prompt. The prompt is then called one token too long: no more is known."""
    prompt, maximum = overflow(message)
    if maximum is None:
        return f"prompt is too long: {message}"
    return f"prompt is too long: {max(prompt or 0, maximum + 1)} tokens > {maximum} maximum"


def error_event(kind: str, message: str) -> bytes:
    """Return the event that ends a stream. The status line was sent, so only the kind can say what happened."""
    return sse(error_body(200, kind, message), "error")
