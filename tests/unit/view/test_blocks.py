"""A page holds what the episodes hold: tokens, masks, logprobs, and calls that are in no trace."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from numpy.typing import NDArray
from tokenizers import Tokenizer

from polar_gym.errors import ConfigError
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.schema import Episode
from polar_gym.view.annotations import Annotations
from polar_gym.view.blocks import Encoder, names_of
from polar_gym.view.pieces import Pieces
from tests.support.episodes import sessions
from tests.support.made_runs import TOKENIZER, ids_of, made_session


def test_files_of_one_name_have_names_of_their_own() -> None:
    """Guards against two runs of a sweep that the page takes for one, because their files have one name."""
    files = [Path("sw/0/episodes.jsonl"), Path("sw/1/episodes.jsonl"), Path("other.jsonl")]
    assert names_of(files) == ["sw/0/episodes.jsonl", "sw/1/episodes.jsonl", "other.jsonl"]
    assert names_of(files[:2]) == ["0/episodes.jsonl", "1/episodes.jsonl"]


def head_and_columns(data: bytes) -> tuple[dict[str, Any], bytes]:
    whole = zlib.decompress(data)
    (length,) = struct.unpack_from("<I", whole)
    return orjson.loads(whole[4 : 4 + length]), whole[4 + length :]


def numbers(columns: bytes, column: tuple[str, int, int]) -> NDArray[Any]:
    """The numbers of a column, put together from its planes."""
    kind, count, offset = column
    size = int(kind[1])
    planes = np.frombuffer(columns, np.uint8, count * size, offset).reshape(size, count)
    return np.ascontiguousarray(planes.T).view(f"<{kind}").ravel()


def strands(data: bytes) -> list[dict[str, Any]]:
    head, columns = head_and_columns(data)
    made: list[dict[str, Any]] = []
    for strand in head["strands"]:
        known = made[strand["base"]]["ids"][: strand["keep"]] if strand["keep"] else np.empty(0, np.int32)
        arrays = {name: numbers(columns, strand[name]) for name in ("ids", "mask", "logprobs")}
        made.append({**strand, **arrays, "ids": np.concatenate([known, arrays["ids"]])})
    return made


@given(sessions())
def test_each_trace_is_a_strand_with_its_own_tokens(episodes: list[Episode]) -> None:
    for episode in episodes:
        (block,) = Encoder().blocks("file", episode, [])
        shown = strands(block.data)
        assert [strand["id"] for strand in shown] == [trace.trace_id for trace in episode.trajectory.traces]
        for strand, trace in zip(shown, episode.trajectory.traces, strict=True):
            start = len(trace.prompt_ids)
            assert strand["ids"].tolist() == [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
            assert not strand["mask"][:start].any()
            assert np.array_equal(strand["mask"][start:], trace.loss_mask)
            assert np.array_equal(strand["logprobs"][start:], trace.logprobs.astype(np.float16))
        trained = sum(int(strand["mask"].sum()) for strand in shown)
        assert trained + sum(block.row["excluded"].values()) == block.row["sampled"]


def test_calls_in_no_trace_are_strands_too(tmp_path: Path) -> None:
    episode = made_session(0, 2, tmp_path)
    calls = read_journal(Path(str(episode.artifacts.journal)))
    (block,) = Encoder().blocks("file", episode, calls)
    head, _ = head_and_columns(block.data)
    reasons = {call["call_id"]: call["excluded"] for call in head["calls"] if call["excluded"]}
    shown = strands(block.data)
    loose = {strand["turns"][0][0]: strand for strand in shown if not strand["trace"]}
    assert sorted(reasons.values()) == ["abandoned", "kind:auxiliary"]
    assert loose.keys() == reasons.keys()
    for call in calls:
        if call.call_id in loose:
            held = loose[call.call_id]["ids"].tolist()
            assert held == [*call.prompt_ids.tolist(), *call.response_ids.tolist()]


def test_another_builder_makes_a_variant_of_the_same_session(tmp_path: Path) -> None:
    episode = made_session(0, 1, tmp_path)
    calls = read_journal(Path(str(episode.artifacts.journal)))
    own, other = Encoder(builders=["per_request", "prefix_merging"]).blocks("file", episode, calls)
    assert (own.row["variant"], other.row["variant"]) == (False, True)
    assert len(strands(own.data)) == 4
    assert len(strands(other.data)) == len(calls)
    assert own.row["trainable"] == other.row["trainable"]


def test_pieces_give_the_text_of_tokens_and_the_bytes_of_parts_of_characters() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    ids = ids_of("a é🎉\n<|im_end|>")
    told = Pieces(tokenizer).new([*ids, 10**6])
    assert 10**6 not in told, "an id outside of the vocabulary has no text"
    assert "".join(told[each] for each in ids).replace(" ", "") == r"a\xc3\xa9\xf0\x9f\x8e\x89" + "\n<|im_end|>"
    pieces = Pieces(tokenizer)
    assert pieces.new(ids) == told
    assert pieces.new(ids) == {}, "a page was told already"


def test_annotations_are_padded_to_the_trace_and_later_ones_replace(tmp_path: Path) -> None:
    episode = made_session(0, 0, None)
    trace = episode.trajectory.traces[0]
    key = {"session_id": trace.session_id, "trace_id": trace.trace_id}
    file = tmp_path / "notes.jsonl"
    lines = [{**key, "ratio": [1.0, None, 3.0]}, {**key, "entropy": [0.5], "ratio": [2.0]}, {**key, "trace_id": "gone"}]
    file.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    notes = Annotations([file])
    values = notes.of(episode, trace.trace_id, 5)
    assert str({name: array.tolist() for name, array in values.items()}) == (
        "{'ratio': [2.0, nan, nan, nan, nan], 'entropy': [0.5, nan, nan, nan, nan]}"
    )
    assert notes.unused == {(trace.session_id, "gone")}
    with pytest.raises(ConfigError, match="ratio has 1 values for 0 tokens"):
        notes.of(episode, trace.trace_id, 0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"session_id": 3, "trace_id": "t"}', "notes.jsonl:1: expected session_id and trace_id as text"),
        ('{"session_id": "s", "trace_id": "t", "ratio": ["x"]}', "notes.jsonl:1: ratio: expected a list of numbers"),
        ('{"session_id": "s", "trace_id": "t", "ratio": 1}', "notes.jsonl:1: ratio: expected a flat list"),
        ("{", "notes.jsonl:1: not JSON"),
    ],
)
def test_wrong_annotations_are_named(line: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "notes.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=said):
        Annotations([file])


def test_a_trace_without_a_column_of_parquet_has_no_values_of_it(tmp_path: Path) -> None:
    """Guards against a file that JSON lines could hold and Parquet could not: an absent list is a null there."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    trace = (episode := made_session(0, 0, None)).trajectory.traces[0]
    rows = [
        {"session_id": trace.session_id, "trace_id": trace.trace_id, "ratio": None, "entropy": [0.5]},
        {"session_id": trace.session_id, "trace_id": "other", "ratio": [1.0], "entropy": None},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "notes.parquet")
    assert list(Annotations([tmp_path / "notes.parquet"]).of(episode, trace.trace_id, 3)) == ["entropy"]
    (bad := tmp_path / "bad.parquet").write_text("no table")
    with pytest.raises(ConfigError, match=r"bad\.parquet: not a Parquet file"):
        Annotations([bad])
