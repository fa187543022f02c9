"""The prompt's ids in an engine's answer, from bytes to an array without a Python number for each.

The ids are most of an answer's bytes. An engine that was sent ids mostly echoes the same bytes, which are then not
parsed at all. A value that is not a flat list of digits is left to the JSON parser, and so is an answer without the
field.
"""

from __future__ import annotations

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


def loads(raw: bytes, sent: Ids | None = None) -> dict[str, Any]:
    """Parse JSON like `orjson.loads`, with the prompt's ids as an array: `sent` itself where the engine echoes it."""
    begin = raw.find(FIELD) + len(FIELD)
    end = raw.find(b"]", begin)
    if begin < len(FIELD) or end < 0:
        return orjson.loads(raw)
    listed = raw[begin:end]
    echoed = sent is not None and listed == orjson.dumps(sent, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
    ids = sent if echoed else _parse(listed)
    if ids is not None:
        answer = orjson.loads(b'%b"%b"%b' % (raw[:begin], TAKEN.encode(), raw[end:]))
        if answer.get(NAME) == [TAKEN]:
            return {**answer, NAME: ids}
    return orjson.loads(raw)


def _parse(listed: bytes) -> Ids | None:
    if listed.translate(None, b"0123456789,") or b",," in b",%b," % listed:
        return None
    ids = np.fromstring(listed.decode("ascii"), dtype=np.int64, sep=",")
    return ids.astype(np.int32) if ids.max() <= np.iinfo(np.int32).max else None
