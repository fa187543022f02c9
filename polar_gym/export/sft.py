"""Turn episodes into a dataset for supervised fine-tuning, one part at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from polar_gym.export.acceptance import Filters, refusal, trace_refusal
from polar_gym.export.dataset import SftDataset, open_dataset, split_of
from polar_gym.export.ledger import EpisodeEntry, ExampleEntry
from polar_gym.export.rejected import without_rejected
from polar_gym.export.rows import (
    MOST_NUMBERS,
    Row,
    digest,
    nested_numbers,
    repository,
    task_name,
    to_row,
    trained_turns,
)
from polar_gym.schema import Episode

PART_TOKENS = 20_000_000
"""A part, which has whole episodes, is committed when its rows hold this many tokens ..."""
PART_NUMBERS = MOST_NUMBERS
"""... or when their nested columns hold this many numbers ..."""
PART_EPISODES = 2_000
"""... or when it holds this many episodes."""


def export_sft(episodes: Iterable[Episode], directory: Path, filters: Filters) -> list[EpisodeEntry]:
    """Add the episodes that `directory` has not seen, and return all that it has seen by then. Raises `ConfigError`."""
    with open_dataset(directory, filters) as dataset:
        part = _Part(dataset, filters)
        for episode in episodes:
            part.add(episode)
            if part.is_full():
                part.commit()
        part.commit()
        return dataset.entries


class _Part:
    """The part that is added next."""

    def __init__(self, dataset: SftDataset, filters: Filters) -> None:
        self._dataset = dataset
        self._filters = filters
        self._entries: list[EpisodeEntry] = []
        self._rows: list[tuple[str, Row]] = []
        self._tokens = self._numbers = 0

    def is_full(self) -> bool:
        sizes = (self._tokens, PART_TOKENS), (self._numbers, PART_NUMBERS), (len(self._entries), PART_EPISODES)
        return any(size >= most for size, most in sizes)

    def add(self, episode: Episode) -> None:
        session = episode.session
        if (session.session_id, session.attempt) in self._dataset.seen:
            return
        self._dataset.seen.add((session.session_id, session.attempt))
        entry = EpisodeEntry(
            session_id=session.session_id,
            attempt=session.attempt,
            task_id=session.task_id,
            repo=repository(episode),
            reward=episode.reward,
            seconds=session.timing.running or 0.0,
            refused=refusal(episode, self._filters),
        )
        self._entries.append(entry)
        if entry.refused is None:
            self._add_traces(episode, entry)

    def _add_traces(self, episode: Episode, entry: EpisodeEntry) -> None:
        left_out: Counter[str] = Counter()
        split = self._dataset.splits.setdefault(entry.task_id, split_of(task_name(episode)))
        traces = without_rejected(episode.trajectory)
        for before, trace in zip(episode.trajectory.traces, traces, strict=True):
            rejected = before.trainable_tokens > 0 == trace.trainable_tokens
            if reason := "rejected" if rejected else trace_refusal(trace, self._filters):
                left_out[reason] += 1
                continue
            row = to_row(episode, trace)
            key = digest(row)
            if key in self._dataset.digests:
                left_out["duplicate"] += 1
                continue
            self._dataset.digests.add(key)
            self._rows.append((split, row))
            self._tokens += len(row["input_ids"])
            self._numbers += nested_numbers(row)
            entry.examples.append(
                ExampleEntry(
                    digest=key,
                    split=split,
                    kind=trace.kind,
                    messages=len(trace.messages),
                    turns=len(trained_turns(trace) or trace.call_ids),
                    tokens=len(row["input_ids"]),
                    trainable_tokens=trace.trainable_tokens,
                )
            )
        entry.left_out = dict(left_out)

    def commit(self) -> None:
        if self._entries:
            self._dataset.add_part(self._entries, self._rows)
        self._entries, self._rows = [], []
        self._tokens = self._numbers = 0
