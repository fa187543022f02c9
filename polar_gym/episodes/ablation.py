"""The builder ablation: the same recorded calls, built by each builder, and what a trainer would have to do with each.

    python -m polar_gym.episodes.ablation outputs/codex_rollout.jsonl [MORE.jsonl]... [--batch 64]

The calls are read from the journals that the episodes name. A trainer is taken to update once for every `--batch`
sequences, each padded to the longest of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from polar_gym.builders import BUILDERS, build_trajectory
from polar_gym.console import console, errors
from polar_gym.episodes.reading import read_calls, read_episodes
from polar_gym.errors import ConfigError
from polar_gym.schema import BuilderSpec, ModelCall


@dataclass(frozen=True)
class Cost:
    """What a builder's traces cost a trainer."""

    builder: str
    traces: int
    trainable: int
    """Tokens that are trained on: the same for every builder."""
    tokens: int
    """Of all sequences, prompts included: what is computed without padding."""
    padded: int
    updates: int


def cost(builder: str, sessions: Sequence[Sequence[ModelCall]], batch: int) -> Cost:
    """Sequences in the order of their sessions, `batch` of them an update."""
    traces = [trace for calls in sessions for trace in build_trajectory(calls, BuilderSpec(name=builder)).traces]
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


def recorded_sessions(files: Sequence[Path]) -> list[list[ModelCall]]:
    """The captured calls of every episode. Raises `ConfigError` naming what is missing."""
    return [read_calls(episode) for file in files for episode in read_episodes(file)]


def print_costs(costs: Sequence[Cost], sessions: int, batch: int) -> None:
    table = Table(title=f"{sessions} sessions, one update for every {batch} sequences", title_justify="left")
    for heading in ("builder", "traces", "trainable tokens", "tokens", "padded tokens", "updates"):
        table.add_column(heading, justify="left" if heading == "builder" else "right", overflow="fold")
    for each in costs:
        figures = (each.traces, each.trainable, each.tokens, each.padded, each.updates)
        table.add_row(each.builder, *(f"{figure:,}" for figure in figures))
    console.print(table)


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
