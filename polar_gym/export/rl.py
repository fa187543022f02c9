"""Episodes as one Parquet file for reinforcement learning: a row for each trace, with nothing left out.

`datasets.load_dataset("parquet", data_files=FILE)` gives the columns of `COLUMNS` with their types. A row holds every
field of its `Trace`; `to_trace` makes the trace again. An episode without a reward is masked: `reward` is null and
`failure` names the reason. A reader that takes a mean must leave such rows out, and must not take them as 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from polar_gym import durable
from polar_gym.arrow import nested_list
from polar_gym.errors import ConfigError
from polar_gym.export.rows import JSON_LIST, Row, repository, write_parquet
from polar_gym.export.rows import SCHEMA as SFT
from polar_gym.schema import Episode, SamplingMask, Trace

SAMPLING = SFT.field("sampling").type
TURN = pa.struct(
    {
        "call_id": "string",
        "start": "int32",
        "end": "int32",
        "sampling": SAMPLING,
        "reward": "float64",
        "message": "int32",
    }
)
VERSION = pa.struct(
    dict.fromkeys(("version", "engine_version", "until"), "string")
    | dict.fromkeys(("start", "end"), "int32")
    | dict.fromkeys(("estimated", "older_cache"), "bool")
)

COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "trace_id": (pa.string(), "the trace; unique in a session"),
    "session_id": (pa.string(), "the session; its traces share a reward"),
    "attempt": (pa.int32(), "the attempt of the session, from 0"),
    "task_id": (pa.string(), "the task's id"),
    "group": (
        pa.string(),
        "task or state that the session was sampled from, harness, profile, and a digest of instruction and harness "
        "settings: advantages are over the sessions of a group, never over its rows",
    ),
    "sample_index": (pa.int32(), "the number of the session in its group"),
    "repo": (pa.string(), "the task's repository, else the task's id"),
    "harness": (pa.string(), "the command-line agent"),
    "profile": (pa.string(), "its profile: default or lean"),
    "model": (pa.string(), "the engine's name of the model"),
    "scripted": (pa.bool_(), "true: a script chose the tokens, no model"),
    "builder": (pa.string(), "the builder of the traces"),
    "kind": (pa.string(), "`main`, `subagent`, `compaction`, `auxiliary` or `judge`"),
    "input_ids": (pa.list_(pa.int32()), "the ids that the engine conditioned on and sampled"),
    "prompt_length": (pa.int32(), "the number of `input_ids` before the first sampled token"),
    "loss_mask": (pa.list_(pa.int8()), "1 where a token is trained; as long as `input_ids`"),
    "logprobs": (pa.list_(pa.float32()), "as captured, in nats; 0.0 where `loss_mask` is 0; as long as `input_ids`"),
    "branched_from": (pa.string(), "the session whose calls the trace begins with; null: the trace is of no branch"),
    "shared_prefix": (pa.int32(), "the number of the trace's ids that are that session's"),
    "reward": (pa.float64(), "the session's; null: the session is masked"),
    "components": (pa.json_(), "the parts of the reward, by name"),
    "failure": (pa.string(), "the reason why the session is masked; null: it has a reward"),
    "truncated_by": (pa.string(), "the budget that ended the session: `time`, `calls` or `tokens`; null: none did"),
    "finish_reason": (pa.string(), "why the last answer of the trace ended; `length`: it was cut off"),
    "call_ids": (pa.list_(pa.string()), "the calls of the trace, in order"),
    "turns": (
        pa.list_(TURN),
        "for each call, its span in the ids after the prompt, its sampling, its own reward, its place in `messages`",
    ),
    "weight_versions": (pa.list_(VERSION), "the weights that sampled the ids from `start` to `end` after the prompt"),
    "staleness": (pa.int32(), "weight versions set between the beginning of the run and the episode's arrival"),
    "sampling": (
        SAMPLING,
        "how the last call was sampled; `logprobs_mode`: before that (`raw`) or after",
    ),
    "fidelity": (pa.json_(), "the token counts of the session: sampled = trainable + excluded, by reason"),
    "messages": (JSON_LIST, "the trace as chat messages"),
    "tools": (JSON_LIST, "the tools that the policy was offered"),
    "routed_experts": (nested_list(pa.int16(), 3), "the experts of each position but the last; null: not recorded"),
    "kept_ids": (nested_list(pa.int32(), 2), "the tokens that each id was drawn from; null: not recorded"),
}
"""Column -> its Arrow type, and its meaning. `datasets` may move the last digit of a number in JSON, and no other."""

SCHEMA = pa.schema([(name, kind) for name, (kind, _) in COLUMNS.items()])


@dataclass(slots=True)
class Counts:
    """The numbers of an export. Episodes without a trace have no row."""

    episodes: int = 0
    masked: int = 0
    without_trace: int = 0
    rows: int = 0
    tokens: int = 0
    trainable_tokens: int = 0


def export_rl(episodes: Iterable[Episode], file: Path) -> Counts:
    """Write a row for each trace of the episodes. Raises `ConfigError` where `file` is there already.

    The file appears when it is whole.
    """
    if file.exists():
        raise ConfigError(f"--out={file}: is there already; name a new file")
    counts = Counts()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with durable.replacing(file) as output:
            write_parquet(_rows(episodes, counts), output, SCHEMA)
    except OSError as error:
        raise ConfigError(f"--out={file}: {error.strerror}: {error.filename}") from error
    return counts


def _rows(episodes: Iterable[Episode], counts: Counts) -> Iterator[Row]:
    """Yield a row for each trace, and count."""
    for episode in episodes:
        counts.episodes += 1
        counts.masked += episode.reward is None
        counts.without_trace += not episode.trajectory.traces
        for trace in episode.trajectory.traces:
            row = to_row(episode, trace)
            counts.rows += 1
            counts.tokens += len(row["input_ids"])
            counts.trainable_tokens += trace.trainable_tokens
            yield row


def to_row(episode: Episode, trace: Trace) -> Row:
    """Return the values of `COLUMNS` for a trace."""
    session, before = episode.session, len(trace.prompt_ids)
    return {
        **trace.model_dump(include={"trace_id", "session_id", "kind", "finish_reason", "call_ids", "messages"}),
        **trace.model_dump(include={"turns", "weight_versions", "tools", "branched_from", "shared_prefix"}),
        **session.model_dump(include={"attempt", "task_id", "sample_index", "harness", "truncated_by", "staleness"}),
        "profile": episode.request.agent.profile,
        **episode.engine.model_dump(include={"model", "scripted"}),
        "group": episode.group,
        "repo": repository(episode),
        "builder": episode.trajectory.builder,
        "input_ids": np.concatenate([trace.prompt_ids, trace.response_ids]),
        "prompt_length": before,
        "loss_mask": np.concatenate([np.zeros(before, np.int8), trace.loss_mask]),
        "logprobs": np.concatenate([np.zeros(before, np.float32), trace.logprobs]),
        "reward": episode.reward,
        "sampling": episode.sampled_with(trace),
        "components": episode.evaluation.components if episode.evaluation else {},
        "failure": session.failure.kind if session.failure else None,
        "fidelity": episode.trajectory.fidelity.model_dump(),
        "routed_experts": None if trace.routed_experts is None else trace.routed_experts.astype(np.int16),
        "kept_ids": None if (mask := trace.whole_mask) is None else [ids.tolist() for ids in mask.sets()],
    }


def to_trace(row: Mapping[str, Any]) -> Trace:
    """Return the trace of a row that `datasets` or pyarrow has read, JSON decoded."""
    before, kept, experts = row["prompt_length"], row["kept_ids"], row["routed_experts"]
    fields = {name: row[name] for name in Trace.model_fields if name in COLUMNS}
    return Trace.model_validate(
        {
            **fields,
            "sampling": _known(row["sampling"], "logprobs_mode"),
            "turns": [{**turn, "sampling": _known(turn["sampling"])} for turn in row["turns"]],
            "prompt_ids": row["input_ids"][:before],
            "response_ids": row["input_ids"][before:],
            "loss_mask": row["loss_mask"][before:],
            "logprobs": row["logprobs"][before:],
            "routed_experts": experts,
            "sampling_mask": None if kept is None else SamplingMask.of(kept[before:]),
        }
    )


def _known(sampling: Mapping[str, Any], *without: str) -> dict[str, Any]:
    return {name: value for name, value in sampling.items() if value is not None and name not in without}
