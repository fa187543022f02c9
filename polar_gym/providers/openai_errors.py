"""OpenAI's form of an error, in a response body and inside a stream.

`type` and `code` are chosen by the reaction of clients to them. A transient error must not carry a code that Codex
takes for final (`server_is_overloaded`, `slow_down`), and a final error must not carry a code that Codex retries.
"""

from __future__ import annotations

from typing import Any

_TYPE_AND_CODE: dict[str, tuple[str, str | None]] = {
    "authentication": ("invalid_request_error", "invalid_api_key"),
    "permission": ("invalid_request_error", "permission_denied"),
    "not_found": ("invalid_request_error", "not_found"),
    "invalid_request": ("invalid_request_error", "invalid_value"),
    "context_length": ("invalid_request_error", "context_length_exceeded"),
    "overloaded": ("server_error", "service_unavailable"),
    "server": ("server_error", "server_error"),
}

_RATE_LIMIT = ("requests", "rate_limit_exceeded")

_STREAM_CODE = {"context_length": "context_length_exceeded", "overloaded": "server_error", "server": "server_error"}


def error_body(status: int, kind: str, message: str) -> dict[str, Any]:
    """Return the body of an error response. A client's error class follows from the HTTP status, its reaction from
    `code`.

    A kind that is not in the list is the code of a `BadRequestError` (`previous_response_not_found`).
    """
    type_, code = _RATE_LIMIT if status == 429 else _TYPE_AND_CODE.get(kind, ("invalid_request_error", kind))
    return {"error": {"message": message, "type": type_, "param": None, "code": code}}


def failure(kind: str, message: str) -> dict[str, str]:
    """Return the `error` of a failed response object. Its codes are a smaller set than those of HTTP errors."""
    return {"code": _STREAM_CODE.get(kind, "invalid_prompt"), "message": message}
