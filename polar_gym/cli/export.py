"""`polar-gym export`: episodes -> files that trainers read."""

from __future__ import annotations

import importlib.util
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from polar_gym.console import console
from polar_gym.episodes.reading import read_all, read_episodes
from polar_gym.errors import ConfigError, how_to_install, validated
from polar_gym.export.acceptance import Filters
from polar_gym.export.summary import acceptance_table, splits_line, statistics_table

app = typer.Typer(no_args_is_help=True)


@app.callback()
def export() -> None:
    """Turn episodes into files that trainers read."""


FILES = Annotated[list[Path], typer.Argument(help="Files of episodes, as `polar-gym rollout` writes them.")]


@app.command("sft")
def sft(
    files: FILES,
    out: Annotated[
        Path, typer.Option(help="The dataset's directory; rows that are in it already are not added again.")
    ],
    min_reward: Annotated[
        float | None, typer.Option(help="Accept by reward; else all FAIL_TO_PASS and PASS_TO_PASS must have passed.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Leave out longer traces.")] = None,
    truncated: Annotated[bool, typer.Option(help="Accept episodes that a budget ended.")] = True,
    allow_scripted: Annotated[
        bool, typer.Option("--allow-scripted", help="Accept episodes of a scripted policy: to try things out.")
    ] = False,
) -> None:
    """Write the accepted trajectories as Parquet and JSONL: chat messages with tools, exact ids, loss mask."""
    _check_pyarrow()
    from polar_gym.export.sft import export_sft

    given = {"min_reward": min_reward, "max_tokens": max_tokens}
    filters = validated(Filters, {**given, "allow_truncated": truncated, "allow_scripted": allow_scripted})
    entries = export_sft(chain.from_iterable(map(read_episodes, files)), out, filters)
    console.print(acceptance_table(entries))
    console.print(statistics_table(entries))
    console.print(Text(f"{splits_line(entries) or 'nothing was accepted'}; in {out}"), soft_wrap=True)
    scripted = sum(entry.refused == "scripted" for entry in entries)
    if scripted:
        console.print(
            Text(f"{scripted} episodes of a scripted policy were refused; --allow-scripted accepts them", "yellow")
        )


@app.command("rl")
def rl(
    files: FILES,
    out: Annotated[Path, typer.Option(help="The Parquet file, which must not be there yet.")],
) -> None:
    """Write all traces as Parquet: exact ids, loss mask, captured logprobs, rewards, groups, weight versions."""
    _check_pyarrow()
    from polar_gym.export.rl import export_rl

    counts = export_rl(read_all(files), out)
    said = (
        f"{counts.rows} traces of {counts.episodes} episodes ({counts.masked} masked, {counts.without_trace} without a "
        f"trace), {counts.trainable_tokens} of {counts.tokens} tokens trainable; in {out}"
    )
    console.print(Text(said), soft_wrap=True)


def _check_pyarrow() -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"pyarrow is missing; install it with: {how_to_install('export')}")
