"""Untrusted JSON: requests, which clients write, and the arguments of tool calls, which the model writes.

A value that is read here is written again as a part of a larger one, and orjson writes less deep than it reads. A value
that could not be written is therefore refused. JavaScript leaves half of a surrogate pair where it cuts a text in the
middle of an emoji, and a model may write one. This half becomes U+FFFD, as it does where JavaScript encodes such a text
itself.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import orjson

from polar_gym.chat import LONG
from polar_gym.providers import BadRequestError

LEVELS = 32
"""How much deeper a value may later stand: in an answer, in a request to the engine, in a record."""

_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(\\u[dD][89a-fA-F][\da-fA-F]{2})|\\.", re.DOTALL
)
"""Any escape. The escape of half a pair is the group."""


def request_body(raw: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object of a request's body. Raises `BadRequestError`."""
    if len(raw) > LONG and (long := _long_body(raw)) is not None:
        return long
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
    """Return the JSON value of a model's text, or None where the text is not JSON or nests too deeply for an answer."""
    try:
        value = _loads(text.encode(errors="replace"))
    except orjson.JSONDecodeError:
        return None
    return value if _can_be_written(value) else None


def _long_body(raw: bytes | bytearray) -> dict[str, Any] | None:
    """Return the object of a body with long strings, read in a third of orjson's time; None: let orjson judge."""
    try:
        body = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) and _can_be_written(body) else None


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
