"""One example: a trace as exact token ids with a loss mask, and the same as chat messages with tools.

TRL's SFT trainer, and any other trainer of tokenised examples, trains on `input_ids` and `assistant_masks`: the ids
that the engine conditioned on and sampled, never re-tokenised text. For a model with another tokenizer, drop these two
columns: the trainer then applies a chat template to `messages` and `tools`, of which `trained` marks the answers that
the row trains. Arguments of tool calls are objects, as chat templates want them. Arguments that are not a JSON object
stay the text that the policy wrote.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from polar_gym.arrow import lists, nested_list
from polar_gym.builders.trace import SHAPING
from polar_gym.schema import Episode, Message, Trace, Turn

Row = dict[str, Any]

JSON_LIST = pa.list_(pa.json_())

GROUP_TOKENS = 4_000_000
"""A row group holds at most this many tokens ..."""
MOST_NUMBERS = 2**30
"""... and its nested columns at most this many numbers: Arrow's offsets, of 32 bits, end at 2**31."""

SAMPLING = {**dict.fromkeys(SHAPING, "float64"), "top_k": "int64", "logprobs_mode": "string"}


SCHEMA = pa.schema(
    {
        "trace_id": pa.string(),
        "session_id": pa.string(),
        "task_id": pa.string(),
        "repo": pa.string(),
        "harness": pa.string(),
        "model": pa.string(),
        "scripted": pa.bool_(),
        "kind": pa.string(),
        "reward": pa.float64(),
        "messages": JSON_LIST,
        "trained": pa.list_(pa.bool_()),
        "tools": JSON_LIST,
        "input_ids": pa.list_(pa.int32()),
        "assistant_masks": pa.list_(pa.int8()),
        "sampling": pa.struct({name: pa.type_for_alias(kind) for name, kind in SAMPLING.items()}),
        "routed_experts": nested_list(pa.int16(), 3),
        "kept_ids": nested_list(pa.int32(), 2),
    }
)
"""The columns, from whose types `datasets` makes its features. Messages and tools are JSON: where rows have different
fields, no field is added or lost."""


def to_row(episode: Episode, trace: Trace) -> Row:
    """Return the row of a trace.

    Invariant: `input_ids` and `assistant_masks` have one length; the mask is 0 on the prompt.
    """
    return {
        "trace_id": trace.trace_id,
        "session_id": episode.session.session_id,
        "task_id": episode.session.task_id,
        "repo": repository(episode),
        "harness": episode.session.harness,
        "model": episode.engine.model,
        "scripted": episode.engine.scripted,
        "kind": trace.kind,
        "reward": episode.reward,
        "messages": [plain_message(message) for message in trace.messages],
        "trained": trained_messages(trace),
        "tools": trace.tools,
        "input_ids": np.concatenate([trace.prompt_ids, trace.response_ids]),
        "assistant_masks": np.concatenate([np.zeros(len(trace.prompt_ids), dtype=np.int8), trace.loss_mask]),
        "sampling": episode.sampled_with(trace),
        "routed_experts": None if trace.routed_experts is None else trace.routed_experts.astype(np.int16),
        "kept_ids": None if (mask := trace.whole_mask) is None else [ids.tolist() for ids in mask.sets()],
    }


def trained_turns(trace: Trace) -> list[Turn]:
    """Return the turns that a trace trains: the others are context, and trained in another trace or nowhere. An older
    episode has no turns."""
    return [turn for turn in trace.turns if trace.loss_mask[turn.start : turn.end].any()]


def trained_messages(trace: Trace) -> list[bool] | None:
    """Return for each message whether it is an answer that the trace trains. None: not all trained answers are among
    the messages, or the episode is older."""
    trained = trained_turns(trace)
    places = {turn.message for turn in trained}
    if None in places or trace.trainable_tokens != sum(turn.end - turn.start for turn in trained):
        return None
    return [place in places for place in range(len(trace.messages))]


def nested_numbers(row: Row) -> int:
    """Return how many numbers the nested columns of a row hold: of a mixture of experts, thousands for each token."""
    experts, kept = row["routed_experts"], row["kept_ids"]
    return (0 if experts is None else experts.size) + sum(map(len, kept or ()))


def repository(episode: Episode) -> str:
    """Return the repository of a task. A task that names none counts as a repository with the task's name."""
    return str(episode.request.metadata.get("repo") or episode.session.task_id)


def task_name(episode: Episode) -> str:
    """Return the name of a task in its data set, without a prefix that was added when the task was submitted."""
    return str(episode.request.metadata.get("instance_id") or episode.session.task_id)


def digest(row: Row) -> str:
    """Return a hash: two rows with the same hash hold the same ids, and train the same ones of these ids."""
    hashed = hashlib.blake2b(row["input_ids"].tobytes(), digest_size=16)
    hashed.update(row["assistant_masks"].tobytes())
    return hashed.hexdigest()


def write_parquet(rows: Iterable[Row], file: IO[bytes], schema: pa.Schema = SCHEMA) -> None:
    """Write rows with the columns of a schema. Of `rows`, only a row group is in memory at once."""
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for group in _row_groups(rows):
            writer.write_table(to_table(group, schema))


def _row_groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows in groups. A row that is larger than a group is alone; the last group may be empty."""
    group, tokens, numbers = list[Row](), 0, 0
    for row in rows:
        tokens, numbers = tokens + len(row["input_ids"]), numbers + nested_numbers(row)
        if group and (tokens > GROUP_TOKENS or numbers > MOST_NUMBERS):
            yield group
            group, tokens, numbers = [], len(row["input_ids"]), nested_numbers(row)
        group.append(row)
    yield group


def to_table(rows: list[Row], schema: pa.Schema = SCHEMA) -> pa.Table:
    """Return the rows as an Arrow table with the columns of a schema."""
    arrays = [column(field.name, [row[field.name] for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def column(name: str, values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return the values of a column as an Arrow array of its type."""
    if kind == pa.json_():
        texts = pa.array([orjson.dumps(value).decode() for value in values], pa.string())
        return pa.ExtensionArray.from_storage(kind, texts)
    if kind == JSON_LIST:
        return _json_lists(values)
    return lists(values, kind) if name == "routed_experts" else pa.array(values, kind)


def _json_lists(values: list[list[Any]]) -> pa.Array:
    """Return lists of JSON values as an Arrow array: Arrow cannot make one from Python values by itself."""
    texts = pa.array([orjson.dumps(each).decode() for value in values for each in value], pa.string())
    offsets = np.cumsum([0, *map(len, values)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.ExtensionArray.from_storage(pa.json_(), texts))


def to_json_line(row: Row) -> bytes:
    """Return a row as one line of JSON, newline included."""
    return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"


def plain_message(message: Message) -> Message:
    """Return a message as chat templates expect it.

    It has text content, `reasoning_content`, arguments as objects, and no empty fields.
    """
    plain: Message = {"role": message["role"], "content": _text(message.get("content"))}
    if message.get("reasoning"):
        plain["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        plain["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return plain | {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}


def _text(content: Any) -> str:
    """Return the joined parts of a content that has only text."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(function.get("arguments"))},
    }


def _arguments(text: Any) -> Any:
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return text
    return value if isinstance(value, dict) else text
