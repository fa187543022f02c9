"""Episodes as compressed blocks of a page.

A block is zlib data: the length of a JSON head (uint32, little-endian), the head, then its columns. The head names a
column as `[kind, count, offset]`: `u1` (uint8), `i4` (int32), `f2` or `f4` (float16, float32), little-endian, in byte
planes: the first bytes of all numbers, then the second ones, which compresses better.

A *strand* is what the page shows as one sequence of tokens: a trace, or a call that is in no trace. All columns of a
strand are as long as its tokens, prompt included, and spans count from its first token.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from polar_gym.builders import build_trajectory
from polar_gym.builders.exclusions import exclusions
from polar_gym.engines import EngineError
from polar_gym.engines.local_tokenizer import local_tokenizer
from polar_gym.errors import ConfigError
from polar_gym.record import TokenIds, common_prefix
from polar_gym.schema import BuilderSpec, Episode, ModelCall, Trace, Trajectory
from polar_gym.view.annotations import Annotations
from polar_gym.view.pieces import Pieces
from polar_gym.view.summary import summary

LOOK_BACK = 8
"""How many earlier strands are tried as the one that a strand begins like."""


@dataclass(frozen=True, slots=True)
class Block:
    """An episode, as a page gets it."""

    row: dict[str, Any]
    """`summary` of the episode; `annotated`; `variant`: another builder made the traces; `tokenizer`, which names the
    `pieces` that the ids belong to."""
    data: bytes
    pieces: dict[int, str]
    """The texts of ids that earlier blocks of the same tokenizer do not tell."""


def names_of(files: Sequence[Path]) -> list[str]:
    """Return a name for each file: its own, or where several have that, its path below the directory that all are in.
    The viewer groups samples by it."""
    several = {name for name, count in Counter(file.name for file in files).items() if count > 1}
    top = os.path.commonpath([file.absolute().parent for file in files])
    return [os.path.relpath(file.absolute(), top) if file.name in several else file.name for file in files]


class Encoder:
    """Makes blocks. `builders`: further builders whose traces of the same calls are shown beside the episode's own."""

    def __init__(
        self, tokenizer: str | None = None, annotations: Annotations | None = None, builders: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self.annotations = annotations or Annotations()
        self._builders = builders
        self._pieces: dict[str, Pieces | None] = {}

    def blocks(self, source: str, episode: Episode, calls: Sequence[ModelCall]) -> list[Block]:
        """Return the block of an episode, and one for each further builder, where calls are given."""
        others = [name for name in self._builders if calls and name != episode.trajectory.builder]
        specs = [episode.request.builder.model_copy(update={"name": name}) for name in others]
        trajectories = [episode.trajectory, *(_built(episode, calls, spec) for spec in specs)]
        return [self._block(source, episode, trajectory, calls) for trajectory in trajectories]

    def _block(self, source: str, episode: Episode, trajectory: Trajectory, calls: Sequence[ModelCall]) -> Block:
        columns = _Columns()
        strands = _strands(trajectory, calls)
        notes = [self.annotations.of(episode, strand.id, len(strand.ids)) for strand in strands]
        excluded = exclusions(calls, episode.request.builder)
        texts = _Distinct()
        head = {
            "request": episode.request.model_dump(mode="json", exclude={"callback_url"}),
            "engine": episode.engine.model_dump(mode="json"),
            "evaluation": episode.evaluation and episode.evaluation.model_dump(mode="json"),
            "artifacts": episode.artifacts.model_dump(mode="json"),
            "fidelity": trajectory.fidelity.model_dump(mode="json"),
            "attempts": [attempt.model_dump(mode="json") for attempt in trajectory.tool_attempts],
            "strands": [
                strand.head(columns, texts, strands[:place], values)
                for place, (strand, values) in enumerate(zip(strands, notes, strict=True))
            ],
            "calls": [_call(call, excluded.get(call.call_id)) for call in calls],
            "messages": texts.items,
        }
        row = summary(source, episode, trajectory, calls)
        row["annotated"] = any(notes)
        row["variant"] = trajectory is not episode.trajectory
        row["tokenizer"], pieces = self._tell(episode, strands)
        return Block(row, columns.compressed(head), pieces)

    def _tell(self, episode: Episode, strands: Sequence[_Strand]) -> tuple[str | None, dict[int, str]]:
        """Return the name of an episode's tokenizer and the texts of new ids. Raises `ConfigError` where the tokenizer
        that the user named is not there; one that only the episode names may be on another machine."""
        name = self._tokenizer or episode.engine.tokenizer
        if name is None:
            return None, {}
        if name not in self._pieces:
            try:
                self._pieces[name] = Pieces(local_tokenizer("--tokenizer", name))
            except EngineError as error:
                if self._tokenizer:
                    raise ConfigError(error.message) from error
                self._pieces[name] = None
        pieces = self._pieces[name]
        if pieces is None:
            return None, {}
        ids = np.unique(np.concatenate([np.empty(0, np.int32), *(strand.ids for strand in strands)]))
        return name, pieces.new(ids.tolist())


def _built(episode: Episode, calls: Sequence[ModelCall], spec: BuilderSpec) -> Trajectory:
    built = build_trajectory(calls, spec)
    return built.model_copy(update={"tool_attempts": episode.trajectory.tool_attempts})


@dataclass(slots=True, eq=False)
class _Strand:
    id: str
    kind: str
    trace: bool
    """Whether the strand is a trace, or a call that is in none."""
    prompt: int
    ids: TokenIds
    mask: NDArray[np.int8]
    logprobs: NDArray[np.float32]
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    finish: str | None
    turns: list[tuple[str, int, int]]
    versions: list[dict[str, Any]] = field(default_factory=list)
    kept: NDArray[np.int32] | None = None
    """How many tokens each token was drawn from; 0 where that is not recorded."""

    def head(
        self, columns: _Columns, texts: _Distinct, earlier: Sequence[_Strand], values: Mapping[str, NDArray[np.float32]]
    ) -> dict[str, Any]:
        recent = range(max(0, len(earlier) - LOOK_BACK), len(earlier))
        base = max(recent, key=lambda place: common_prefix(earlier[place].ids, self.ids), default=None)
        keep = 0 if base is None else common_prefix(earlier[base].ids, self.ids)
        return {
            **{name: getattr(self, name) for name in ("id", "kind", "trace", "prompt", "finish", "turns", "versions")},
            "messages": [texts.place(message) for message in self.messages],
            "tools": [texts.place(tool) for tool in self.tools],
            "length": len(self.ids),
            "base": base,
            "keep": keep,
            "ids": columns.add("i4", self.ids[keep:]),
            "mask": columns.add("u1", self.mask),
            "logprobs": columns.add("f2", self.logprobs),
            "kept": None if self.kept is None else columns.add("i4", self.kept),
            "values": {name: columns.add("f4", array) for name, array in values.items()},
        }


def _strands(trajectory: Trajectory, calls: Sequence[ModelCall]) -> list[_Strand]:
    """Return the traces of a trajectory, and the calls that are in no trace."""
    placed = {call_id for trace in trajectory.traces for call_id in trace.call_ids}
    loose = [call for call in calls if call.call_id not in placed and len(call.prompt_ids) + len(call.response_ids)]
    return [*map(_of_trace, trajectory.traces), *map(_of_call, loose)]


def _of_trace(trace: Trace) -> _Strand:
    start = len(trace.prompt_ids)
    before = np.zeros(start)
    versions = [version.model_dump(mode="json") for version in trace.weight_versions]
    for version in versions:
        version |= {"start": version["start"] + start, "end": version["end"] + start}
    mask = trace.whole_mask
    return _Strand(
        id=trace.trace_id,
        kind=trace.kind,
        trace=True,
        prompt=start,
        ids=np.concatenate([trace.prompt_ids, trace.response_ids]),
        mask=np.concatenate([before, trace.loss_mask]).astype(np.int8),
        logprobs=np.concatenate([before, trace.logprobs]).astype(np.float32),
        messages=trace.messages,
        tools=trace.tools,
        finish=trace.finish_reason,
        turns=[(turn.call_id, turn.start + start, turn.end + start) for turn in trace.turns],
        versions=versions,
        kept=None if mask is None else np.diff(mask.offsets),
    )


def _of_call(call: ModelCall) -> _Strand:
    start, length = len(call.prompt_ids), len(call.prompt_ids) + len(call.response_ids)
    return _Strand(
        id=call.call_id,
        kind=call.kind,
        trace=False,
        prompt=start,
        ids=np.concatenate([call.prompt_ids, call.response_ids]),
        mask=np.zeros(length, np.int8),
        logprobs=np.concatenate([np.zeros(start, np.float32), call.logprobs]),
        messages=[*call.messages, *([call.response] if call.response else [])],
        tools=call.tools,
        finish=call.finish_reason,
        turns=[(call.call_id, start, length)],
    )


_CALL = {
    *("call_id", "index", "parent_id", "continuation", "splice_cause", "outcome", "finish_reason", "started_at"),
    *("duration", "error", "error_kind", "sampling_mismatch", "hints", "frozen", "provider", "edited_answers"),
    "replayed",
}


def _call(call: ModelCall, excluded: str | None) -> dict[str, Any]:
    counts = {"prompt": len(call.prompt_ids), "sampled": len(call.response_ids)}
    versions = [version.model_dump(mode="json") for version in call.weight_versions]
    return {**call.model_dump(mode="json", include=_CALL), **counts, "excluded": excluded, "versions": versions}


class _Distinct:
    """Values that occur many times, kept once: strands of a session repeat each other's messages."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._places: dict[bytes, int] = {}

    def place(self, item: Any) -> int:
        place = self._places.setdefault(orjson.dumps(item), len(self.items))
        if place == len(self.items):
            self.items.append(item)
        return place


class _Columns:
    """The arrays of one block."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, kind: str, array: NDArray[Any]) -> tuple[str, int, int]:
        """Add an array, and return its name in the head."""
        offset, typed = len(self._bytes), np.ascontiguousarray(array, f"<{kind}")
        self._bytes += typed.view(np.uint8).reshape(-1, typed.itemsize).T.tobytes()
        return kind, len(typed), offset

    def compressed(self, head: Mapping[str, Any]) -> bytes:
        """Return the block of a head and these arrays."""
        first = orjson.dumps(head)
        return zlib.compress(b"".join([struct.pack("<I", len(first)), first, self._bytes]), level=6)
