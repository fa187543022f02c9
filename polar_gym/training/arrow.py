"""Rows of a batch as an Arrow table. Needs pyarrow (the extra `export`).

    feather.write_feather(to_table(batch.rows), "step.arrow", compression="uncompressed")
    table = feather.read_table("step.arrow", memory_map=True)
    values, offsets = flat(table["logprobs"])  # row i is values[offsets[i] : offsets[i + 1]]
    torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), torch.from_numpy(offsets))

`SCHEMA` has a column for each field of `Row`, of the same name and meaning. Arrays are lists of their own numbers,
experts are lists (positions, layers, top_k) of int16, `turns` and `weight_versions` are lists of structs, dictionaries
of numbers are maps, and any other dictionary is JSON text. The columns of `PER_TOKEN` have a number for each token.

numpy and torch read an uncompressed Arrow file in place (`pyarrow.feather`), without a copy, and must not write there.
`pyarrow.parquet` writes and reads the same table; Parquet takes less space, and must be decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import orjson
import pyarrow as pa

from polar_gym.arrow import lists, nested_list
from polar_gym.record import Record
from polar_gym.training.row import Row
from polar_gym.training.sampling import check_logprobs_mode
from polar_gym.training.tensors import NEUTRAL, as_sampled, token_advantages

PER_TOKEN: dict[str, Callable[[Row], np.ndarray]] = {
    "advantages": token_advantages,
    **{name: partial(as_sampled, name) for name in NEUTRAL},
}
"""Columns that are no fields: how each token was sampled, and its advantage. See `padded`."""


def _kind(hint: Any) -> pa.DataType:
    """Return the Arrow type of a field that is no array, by its type hint."""
    arguments = get_args(hint)
    if get_origin(hint) is UnionType:
        return _kind(arguments[0])
    if get_origin(hint) is list:
        return pa.large_list(_kind(arguments[0]))
    if get_origin(hint) is dict:
        return pa.map_(pa.string(), pa.float64()) if arguments[1] is float else pa.string()
    if isinstance(hint, type) and issubclass(hint, Record):
        return pa.struct({name: _kind(field) for name, field in get_type_hints(hint).items()})
    return {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}.get(hint, pa.string())


INT32, FLOAT32 = pa.large_list(pa.int32()), pa.large_list(pa.float32())
ARRAYS = {
    "token_ids": INT32,
    "loss_mask": pa.large_list(pa.int8()),
    "routed_experts": nested_list(pa.int16(), 3, large=True),
    **dict.fromkeys(("logprobs", "weights", *PER_TOKEN), FLOAT32),
}
MASK = pa.struct({"offsets": INT32, "token_ids": INT32})
FIELDS = {name: _kind(hint) for name, hint in get_type_hints(Row).items()}
SCHEMA = pa.schema(FIELDS | ARRAYS | {"sampling_mask": MASK})


def to_table(rows: Sequence[Row]) -> pa.Table:
    """Return the rows as a table with the columns of `SCHEMA`. Raises `ValueError` where logprobs are not those of the
    sampling (see `training.sampling`)."""
    check_logprobs_mode(rows)
    return pa.Table.from_arrays([_column(rows, field) for field in SCHEMA], schema=SCHEMA)


def _column(rows: Sequence[Row], field: pa.Field) -> pa.Array:
    values = list(map(PER_TOKEN.get(field.name, attrgetter(field.name)), rows))
    if field.name in ARRAYS:
        return lists(values, field.type)
    return pa.array([_plain(value, field.type) for value in values], field.type)


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Return a value as pyarrow takes it for this type."""
    if isinstance(value, Record):
        return {field.name: _plain(getattr(value, field.name), field.type) for field in kind.fields}
    if isinstance(value, list):
        return [_plain(each, kind.value_type) for each in value]
    return orjson.dumps(value).decode() if isinstance(value, dict) and pa.types.is_string(kind) else value


def flat(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of all rows of a column of lists, and the place where each row begins and ends in them."""
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    offsets, array = array.offsets.to_numpy(), array.values
    while pa.types.is_large_list(array.type):
        offsets, array = array.offsets.to_numpy()[offsets], array.values
    return array.to_numpy(), offsets
