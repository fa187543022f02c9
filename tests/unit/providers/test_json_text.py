"""A body is read alike whether it is long or not."""

from __future__ import annotations

from typing import Any

import pytest

from polar_gym.chat import LONG
from polar_gym.providers import BadRequestError
from polar_gym.providers.json_text import request_body

VALUES = {
    "an integer of 64 bits": b"18446744073709551615",
    "a longer integer": b"18446744073709551616",
    "a float": b"0.30000000000000004441",
    "no finite number": b"1e999",
    "no JSON": b"NaN",
    "a pair of surrogates": rb'"\ud83d\ude00"',
    "half a pair": rb'"cut \ud83d"',
    "no UTF-8": b'"\xff"',
    "a control character": b'"\x01"',
    "deep": b"[" * 200 + b"]" * 200,
    "too deep to be written": b"[" * 240 + b"]" * 240,
    "too deep to be read": b"[" * 100_000 + b"]" * 100_000,
    "cut": b'"',
}


def _read(value: bytes, padding: int) -> Any:
    try:
        return request_body(b'{"value": %b, "padding": "%b"}' % (value, b"x" * padding))["value"]
    except BadRequestError as error:
        return str(error).partition(":")[0]


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_long_body_is_read_as_a_short_one(value: bytes) -> None:
    """Guards against two parsers that disagree: long bodies have a quicker one."""
    assert _read(value, padding=LONG) == _read(value, padding=0)


def test_a_long_list_is_no_body() -> None:
    with pytest.raises(BadRequestError, match="must be a JSON object, not list"):
        request_body(b'["%b"]' % (b"x" * LONG))
