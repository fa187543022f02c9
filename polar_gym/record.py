"""The base of all records of `polar_gym.schema`: how a record holds arrays, and how it becomes JSON."""

from __future__ import annotations

import base64
import binascii
import io
import json
import os
import re
from hashlib import blake2b
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


def digest(*values: Any) -> str:
    """Return a short name of these JSON values: in all processes the same for the same values, in any order of keys."""
    return blake2b(json.dumps(_without_surrogates(values), sort_keys=True).encode(), digest_size=6).hexdigest()


def common_prefix(one: NDArray[np.integer[Any]], other: NDArray[np.integer[Any]]) -> int:
    """Return the number of ids with which both sequences begin."""
    length = min(len(one), len(other))
    return int(np.append(one[:length] != other[:length], True).argmax())


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


def array_of_npy(text: str) -> np.ndarray:
    """Return the array that `npy_of_array` or vLLM wrote. Raises `ValueError` for any other text."""
    try:
        return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, EOFError, OSError, ValueError) as error:
        raise ValueError(f"expected an array in NumPy's .npy form as base64: {error}") from error


def npy_of_array(array: np.ndarray) -> str:
    """Return an array in NumPy's .npy form (type, shape, values) as base64."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()


def experts_of(value: Any) -> np.ndarray:
    """Return routed experts from an array, lists, or the text of vLLM's answers. Raises `ValueError` for others."""
    array = array_of_npy(value) if isinstance(value, str) else np.asarray(value)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise ValueError(f"expected whole numbers of shape (positions, layers, top_k), got {array.dtype} {array.shape}")
    return array


RoutedExperts = Annotated[
    NDArray[np.integer[Any]],
    PlainValidator(experts_of),
    PlainSerializer(npy_of_array),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]
"""The experts that each MoE layer's router chose, shape (positions, layers, top_k), in the engine's small integers."""


_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
"""Half of a pair of UTF-16, which is in texts of `json.loads` and `os.fsdecode`, and which UTF-8 cannot hold."""


def _dumped(values: Any) -> bytes:
    return orjson.dumps(values, default=os.fspath, option=orjson.OPT_SERIALIZE_NUMPY)


def _without_surrogates(value: Any) -> Any:
    """Return a value to write as JSON, with U+FFFD in place of each lone surrogate in its texts."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(each) for each in value]
    return value


class Record(BaseModel):
    """A record refuses unknown fields. orjson writes its numpy arrays directly, without a list of Python numbers."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, validate_assignment=False)

    def to_json(self) -> bytes:
        """Return the record as one line of JSON (UTF-8, no newline). A path in options becomes text.

        Code under test writes some texts of a record, and may write a lone surrogate: U+FFFD takes its place.
        """
        values = self.model_dump(mode="python")
        try:
            return _dumped(values)
        except TypeError:
            return _dumped(_without_surrogates(values))

    @classmethod
    def from_json(cls, line: bytes | str) -> Self:
        """Return the record that `to_json` wrote. Raises `pydantic.ValidationError`, which names the wrong field."""
        return cls.model_validate(orjson.loads(line))
