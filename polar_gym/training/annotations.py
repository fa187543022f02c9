"""Per-token values of a trainer, for `polar-gym view --annotations`.

with Path("notes.jsonl").open("ab") as file:
    write_annotations(file, batch.rows, {"ratio": ratio, "entropy": entropy})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO

import numpy as np
import orjson
from numpy.typing import NDArray

from polar_gym.training.row import Row


def write_annotations(
    file: IO[bytes], rows: Sequence[Row], values: Mapping[str, Sequence[NDArray[np.floating]]]
) -> None:
    """Write a line for each row that is not inert: the trace, and for each name a number for each token of the row.

    `values`: for each name one array for each row, which may be padded at its end, e.g. a matrix of rows and tokens.
    NaN is for tokens without a value. Raises `ValueError` where there are fewer arrays than rows, or a shorter array.
    """
    for name, arrays in values.items():
        if len(arrays) != len(rows) or any(
            len(array) < len(row.token_ids) for array, row in zip(arrays, rows, strict=True)
        ):
            raise ValueError(f"{name}: expected {len(rows)} arrays, each at least as long as its row's tokens")
    for place, row in enumerate(rows):
        if row.inert:
            continue
        cut = {
            name: np.ascontiguousarray(arrays[place][: len(row.token_ids)], np.float32)
            for name, arrays in values.items()
        }
        record = {"session_id": row.session_id, "trace_id": row.trace_id, **cut}
        file.write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
