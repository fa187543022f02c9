"""The base of all records of `polar_gym.schema`: how a record holds arrays, and how it becomes JSON."""

from __future__ import annotations

from typing import Annotated, Any, Self

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, WithJsonSchema


def _array(dtype: type[np.generic], *kinds: str) -> PlainValidator:
    def validate(value: Any) -> np.ndarray:
        if isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == 1:
            return value
        array = np.asarray(value)
        if array.ndim != 1:
            raise ValueError(f"expected a flat list of numbers, got {array.ndim} dimensions")
        if array.size and array.dtype.kind not in kinds:
            raise ValueError(f"expected numbers of kind {kinds}, got {array.dtype}")
        converted = array.astype(dtype, copy=False)
        if np.dtype(dtype).kind == "i" and not np.array_equal(converted, array):
            raise ValueError(f"a value does not fit {np.dtype(dtype).name}")
        return converted

    return PlainValidator(validate)


_to_list = PlainSerializer(lambda array: array.tolist(), when_used="json")

TokenIds = Annotated[
    NDArray[np.int32],
    _array(np.int32, "i", "u"),
    _to_list,
    WithJsonSchema({"type": "array", "items": {"type": "integer"}}),
]
"""Token ids, shape (n,), int32."""

LossMask = Annotated[
    NDArray[np.int8],
    _array(np.int8, "i", "u", "b"),
    _to_list,
    WithJsonSchema({"type": "array", "items": {"type": "integer", "enum": [0, 1]}}),
]
"""1 where the loss applies, shape (n,), int8."""

Logprobs = Annotated[
    NDArray[np.float32],
    _array(np.float32, "f", "i"),
    _to_list,
    WithJsonSchema({"type": "array", "items": {"type": "number"}}),
]
"""Natural-log probabilities, shape (n,), float32."""


class Record(BaseModel):
    """A record refuses unknown fields. orjson writes its numpy arrays directly, without a list of Python numbers."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, validate_assignment=False)

    def to_json(self) -> bytes:
        """Return the record as one line of JSON (UTF-8, no newline)."""
        return orjson.dumps(self.model_dump(mode="python"), option=orjson.OPT_SERIALIZE_NUMPY)

    @classmethod
    def from_json(cls, line: bytes | str) -> Self:
        """Return the record that `to_json` wrote. Raises `pydantic.ValidationError`, which names the wrong field."""
        return cls.model_validate(orjson.loads(line))
