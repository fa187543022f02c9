"""Google's form of an error: the HTTP status again, its name, and a message.

Inside a stream the same object stands alone, without `data:`, as Google's servers send it. Clients read it there as
they read the body of an error response, and ask again or stop as they would for that status.
"""

from __future__ import annotations

from typing import Any

import orjson

from polar_gym.providers.overflow import overflow

_STATUS = {
    "authentication": "UNAUTHENTICATED",
    "permission": "PERMISSION_DENIED",
    "not_found": "NOT_FOUND",
    "overloaded": "UNAVAILABLE",
    "server": "INTERNAL",
}

_IN_STREAM = {"authentication": 401, "permission": 403, "not_found": 404, "overloaded": 503, "server": 500}


def error_body(status: int, kind: str, message: str) -> dict[str, Any]:
    """Return the body of an error response. A kind that is not in the list is the request's fault."""
    name = "RESOURCE_EXHAUSTED" if status == 429 else _STATUS.get(kind, "INVALID_ARGUMENT")
    if kind == "context_length":
        message = _too_long(message)
    return {"error": {"code": status, "message": message, "status": name}}


def error_event(kind: str, message: str) -> bytes:
    return orjson.dumps(error_body(_IN_STREAM.get(kind, 400), kind, message)) + b"\n\n"


def _too_long(message: str) -> str:
    """Return an engine's complaint in Google's words, which clients know. Where it names no numbers, its words
    follow."""
    used, maximum = overflow(message)
    if used is not None and maximum is not None:
        return f"The input token count ({used}) exceeds the maximum number of tokens allowed ({maximum})."
    return f"The input token count exceeds the maximum number of tokens allowed. {message}"
