"""The prompt's ids in an engine's answer, from bytes to an array without a Python number for each.

The ids are most of an answer's bytes. An engine that was sent ids mostly echoes the same bytes, which are then not
parsed at all. A value that is not a flat list of digits is left to the JSON parser, and so is an answer without the
field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

NAME = "prompt_token_ids"
FIELD = f'"{NAME}":['.encode()
"""Inside a JSON string the quotes would be escaped, so these bytes are a field wherever they stand."""
TAKEN = "taken out"
"""Stands in the list while the JSON is parsed. Fields of the same name may follow further down."""

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Sent:
    """The ids of a prompt that is sent, which become JSON once."""

    ids: Ids

    @cached_property
    def json(self) -> bytes:
        return orjson.dumps(self.ids, option=orjson.OPT_SERIALIZE_NUMPY)

    @property
    def field(self) -> orjson.Fragment:
        """Return the value for the body of a request."""
        return orjson.Fragment(self.json)


def loads(
    raw: bytes, sent: Sent | None = None, parse: Callable[[bytes], dict[str, Any]] = orjson.loads
) -> dict[str, Any]:
    """Parse JSON, with the prompt's ids as an array: those of `sent` where the engine echoes them. `parse`: how the
    rest is parsed."""
    begin = raw.find(FIELD) + len(FIELD)
    end = raw.find(b"]", begin)
    if begin < len(FIELD) or end < 0:
        return parse(raw)
    listed = raw[begin:end]
    ids = sent.ids if sent is not None and listed == sent.json[1:-1] else _parse(listed)
    if ids is not None:
        answer = parse(b'%b"%b"%b' % (raw[:begin], TAKEN.encode(), raw[end:]))
        if answer.get(NAME) == [TAKEN]:
            return {**answer, NAME: ids}
    return parse(raw)


def _parse(listed: bytes) -> Ids | None:
    if listed.translate(None, b"0123456789,") or b",," in b",%b," % listed:
        return None
    ids = np.fromstring(listed.decode("ascii"), dtype=np.int64, sep=",")
    return ids.astype(np.int32) if ids.max() <= np.iinfo(np.int32).max else None
