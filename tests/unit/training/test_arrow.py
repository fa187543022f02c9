"""The Arrow form of rows: every field, in an Arrow file and in a Parquet file, and without a copy to torch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from polar_gym.arrow import lists, nested_list
from polar_gym.record import Record
from polar_gym.training import Row, make_batch
from polar_gym.training.arrow import PER_TOKEN, SCHEMA, flat, to_table
from tests.support.calls import make_call
from tests.support.choices import recorded_episode
from tests.support.episodes import forked, make_episode


@pytest.fixture
def rows() -> list[Row]:
    """Rows with and without records of the sampler, of several lengths and temperatures, and inert ones."""
    calls = [
        make_call(0, [1], [2, 3], sampling={"temperature": 1.5}),
        make_call(1, [1, 2, 3, 4], [5], sampling={"temperature": 0.5}),
    ]
    episodes = [recorded_episode(), make_episode("a", 0.5, forked(3)), make_episode("b", 0.0, calls)]
    return make_batch(episodes, multiple_of=8).rows


def plain(value: Any) -> Any:
    """Return a value of a row as lists and dictionaries."""
    if isinstance(value, Record):
        return {name: plain(each) for name, each in value}
    if isinstance(value, list | np.ndarray):
        return [plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def read(value: Any, kind: pa.DataType) -> Any:
    """Return a value of Arrow, with maps and JSON texts as dictionaries."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        return dict(value)
    if pa.types.is_struct(kind):
        return {field.name: read(value[field.name], field.type) for field in kind.fields}
    if pa.types.is_large_list(kind):
        return [read(each, kind.value_type) for each in value]
    return orjson.loads(value) if pa.types.is_string(kind) and value.startswith("{") else value


def mapped(rows: list[Row], directory: Path) -> pa.Table:
    """Return the table of the rows as a trainer reads the file: in place."""
    feather.write_feather(to_table(rows), directory / "step.arrow", compression="uncompressed")
    return feather.read_table(directory / "step.arrow", memory_map=True)


def decoded(rows: list[Row], directory: Path) -> pa.Table:
    pq.write_table(to_table(rows), directory / "step.parquet")
    return pq.read_table(directory / "step.parquet")


@pytest.mark.parametrize("form", [mapped, decoded])
def test_every_field_comes_back(rows: list[Row], tmp_path: Path, form: Callable[[list[Row], Path], pa.Table]) -> None:
    table = form(rows, tmp_path)
    assert table.schema.equals(SCHEMA)
    assert set(table.column_names) == {*(field.name for field in fields(Row)), *PER_TOKEN}
    for name in (field.name for field in fields(Row)):
        found = [read(value, SCHEMA.field(name).type) for value in table[name].to_pylist()]
        assert found == [plain(getattr(row, name)) for row in rows], name


def test_the_sampling_is_given_for_each_token(rows: list[Row], tmp_path: Path) -> None:
    values, offsets = flat(mapped(rows, tmp_path)["temperature"])
    assert values[offsets[4] : offsets[5]].tolist() == [1.0, 1.5, 1.5, 1.0, 0.5]


def test_experts_are_flat_with_offsets(rows: list[Row], tmp_path: Path) -> None:
    values, offsets = flat(mapped(rows, tmp_path)["routed_experts"])
    assert rows[0].routed_experts is not None
    assert values[offsets[0] : offsets[1]].reshape(-1, 1, 2).tolist() == rows[0].routed_experts.tolist()
    assert offsets.tolist() == [0, *[len(values)] * len(rows)]


def test_numpy_reads_the_mapped_file_without_a_copy(rows: list[Row], tmp_path: Path) -> None:
    column = mapped(rows, tmp_path)["token_ids"]
    values, offsets = flat(column)
    _, of_offsets, _, of_values = column.chunk(0).buffers()
    assert (values.ctypes.data, offsets.ctypes.data) == (of_values.address, of_offsets.address)
    assert "step.arrow" in mapping_of(values.ctypes.data)


def mapping_of(address: int) -> str:
    """Return the line of this process's memory map that has the address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(place, 16) for place in line.split()[0].split("-"))
        if begin <= address < end:
            return line
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_torch_reads_the_mapped_file_without_a_copy(rows: list[Row], tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not here; `make test` runs these on the interpreter that has it")
    torch: Any = importlib.import_module("torch")
    column = mapped(rows, tmp_path)["logprobs"]
    values, offsets = (torch.from_numpy(array) for array in flat(column))
    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    _, of_offsets, _, of_values = column.chunk(0).buffers()
    assert (nested.values().data_ptr(), nested.offsets().data_ptr()) == (of_values.address, of_offsets.address)
    assert [row.tolist() for row in nested.unbind()] == [row.logprobs.tolist() for row in rows]


def test_arrays_of_several_shapes_are_lists_of_their_own_lengths() -> None:
    values = [np.zeros((2, 1, 3), np.uint8), None, np.ones((1, 2, 2), np.uint8), np.zeros((0, 1, 3), np.uint8)]
    array = lists(values, nested_list(pa.int16(), 3))
    array.validate(full=True)
    assert array.to_pylist() == [None if value is None else value.tolist() for value in values]


def test_a_batch_without_rows_is_an_empty_table() -> None:
    values, offsets = flat(to_table([])["logprobs"])
    assert (values.tolist(), offsets.tolist()) == ([], [0])
