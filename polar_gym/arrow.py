"""Arrays of any number of dimensions as Arrow lists in lists, without a Python object for each number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa


def nested_list(kind: pa.DataType, depth: int, *, large: bool = False) -> pa.DataType:
    """Return the Arrow type of lists in lists. `large`: offsets have 64 bits, so that a column has no limit."""
    wrap = pa.large_list if large else pa.list_
    return wrap(nested_list(kind, depth - 1, large=large)) if depth else kind


def lists(values: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.Array:
    """Return an array of the type `kind`, a `nested_list`: one list for each numpy array, null for None."""
    known = [value for value in values if value is not None]
    large, kinds = pa.types.is_large_list(kind), [kind]
    while pa.types.is_nested(kinds[-1]):
        kinds.append(kinds[-1].value_type)
    wrap = pa.LargeListArray if large else pa.ListArray
    dtype = kinds[-1].to_pandas_dtype()
    array = pa.array(np.concatenate([np.empty(0, dtype), *map(np.ravel, known)]).astype(dtype), kinds[-1])

    def offsets(lengths: np.ndarray | list[int]) -> pa.Array:
        return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64() if large else pa.int32())

    for axis in reversed(range(1, len(kinds) - 1)):
        times = [math.prod(value.shape[:axis]) for value in known]
        array = wrap.from_arrays(offsets(np.repeat([value.shape[axis] for value in known], times)), array)
    ends = offsets([0 if value is None else len(value) for value in values])
    return wrap.from_arrays(ends, array, mask=pa.array([value is None for value in values], pa.bool_()))
