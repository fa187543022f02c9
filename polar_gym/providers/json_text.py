"""JSON that somebody else wrote: a client its requests, a model the arguments of its tool calls.

What is read here is written again as a part of something larger, and orjson writes less deep than it reads: what could
not be written is not taken. Half of a surrogate pair, which JavaScript leaves where it cuts a text in the middle of an
emoji, is no character: in a request it becomes U+FFFD, as wherever JavaScript itself encodes such a text.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from polar_gym.providers import BadRequestError

LEVELS = 32
"""How much deeper a value may come to stand in an answer, in a request to the engine, in a record."""

_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(\\u[dD][89a-fA-F][\da-fA-F]{2})|\\.", re.DOTALL
)
"""Any escape; those of half a pair are the group."""


def request_body(raw: bytes | bytearray) -> dict[str, Any]:
    """Raises `BadRequestError`."""
    try:
        body = _loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequestError("body", f"is not JSON: {error}; send a JSON object in UTF-8") from error
    if not isinstance(body, dict):
        raise BadRequestError("body", f"must be a JSON object, not {type(body).__name__}")
    if not _can_be_written(body):
        raise BadRequestError("body", "is nested too deeply; send a flatter one")
    return body


def parsed(text: str) -> Any:
    """The value that a model's text is; None where it is none, or none that an answer could hold."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if _can_be_written(value) else None


def _loads(raw: bytes | bytearray) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        mended = _LONE_SURROGATE.sub(lambda escape: rb"\ufffd" if escape[1] else escape[0], raw)
        if mended == raw:
            raise
        return orjson.loads(mended)


def _can_be_written(value: Any) -> bool:
    for _ in range(LEVELS):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True
