"""The builder ablation: build the same recorded calls with each builder, and compare the costs for a trainer.

    python -m polar_gym.episodes.ablation outputs/codex_rollout.jsonl [MORE.jsonl]... [--batch 64]

The calls are read from the journals that the episodes name. Each session keeps its own builder settings
(`builder.train_kinds` and others), apart from the builder's name. We assume a trainer that makes one update for every
`--batch` sequences, and pads each sequence to the longest of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated

import typer

from polar_gym.builders import BUILDERS, build_trajectory
from polar_gym.console import console, errors, table
from polar_gym.episodes.reading import read_all, read_calls
from polar_gym.errors import ConfigError
from polar_gym.schema import BuilderSpec, ModelCall


@dataclass(frozen=True)
class Cost:
    """The costs of a builder's traces for a trainer."""

    builder: str
    traces: int
    trainable: int
    """Tokens that are trained on: every builder has the same number."""
    tokens: int
    """Tokens of all sequences, prompts included: a trainer without padding computes this many."""
    padded: int
    updates: int


RecordedSession = tuple[Sequence[ModelCall], BuilderSpec]
"""The captured calls of a session, and the builder settings of its run."""


def cost(builder: str, sessions: Sequence[RecordedSession], batch: int) -> Cost:
    """Return the costs of a builder. Sequences stay in the order of their sessions; `batch` of them are one update."""
    specs = [(calls, spec.model_copy(update={"name": builder})) for calls, spec in sessions]
    traces = [trace for calls, spec in specs for trace in build_trajectory(calls, spec).traces]
    lengths = [len(trace.prompt_ids) + len(trace.response_ids) for trace in traces]
    batches = [lengths[start : start + batch] for start in range(0, len(lengths), batch)]
    return Cost(
        builder=builder,
        traces=len(traces),
        trainable=sum(trace.trainable_tokens for trace in traces),
        tokens=sum(lengths),
        padded=sum(max(lengths) * len(lengths) for lengths in batches),
        updates=len(batches),
    )


def recorded_sessions(files: Sequence[Path]) -> list[RecordedSession]:
    """Return the session of every episode. Raises `ConfigError` naming a missing or damaged file."""
    return [(read_calls(episode), episode.request.builder) for episode in read_all(files)]


def print_costs(costs: Sequence[Cost], sessions: int, batch: int) -> None:
    title = f"{sessions} sessions, one update for every {batch} sequences"
    shown = table(title, "builder", "traces", "trainable tokens", "tokens", "padded tokens", "updates")
    for each in costs:
        builder, *figures = astuple(each)
        shown.add_row(builder, *(f"{figure:,}" for figure in figures))
    console.print(shown)


def main(
    files: Annotated[list[Path], typer.Argument(help="Episodes, as `polar-gym rollout` writes them.")],
    batch: Annotated[int, typer.Option(min=1, help="Sequences of one update.")] = 64,
) -> None:
    """Build the recorded calls with every builder, and show what training on the traces would cost."""
    try:
        sessions = recorded_sessions(files)
    except ConfigError as error:
        errors.print(f"error: {error}", soft_wrap=True, markup=False)
        raise typer.Exit(2) from error
    print_costs([cost(name, sessions, batch) for name in BUILDERS.names()], len(sessions), batch)


if __name__ == "__main__":
    typer.run(main)
