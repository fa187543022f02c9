"""The prompt's ids in an engine's answer, from bytes to an array without a Python number for each.

They are most of an answer's bytes. An engine that was sent ids mostly echoes the very bytes, and then nothing is parsed
at all. Whatever has another form than a flat list of digits is left to the JSON parser, as it is wherever the field is
not found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

NAME = "prompt_token_ids"
FIELD = f'"{NAME}":['.encode()
"""Inside a JSON string its quotes would be escaped, so these bytes are a field wherever they stand."""
TAKEN = "taken out"
"""What stands in the list meanwhile: there may be other fields of that name, further down."""

Ids = NDArray[np.int32]


def loads(raw: bytes, sent: Ids | None = None) -> dict[str, Any]:
    """Like `orjson.loads`, but the ids of the prompt are an array: `sent` itself, where the engine echoes that."""
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
