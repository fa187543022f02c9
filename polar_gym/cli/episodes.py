"""`polar-gym inspect | verify | reuse`: look at episodes, check them, and count what the engine's cache spared."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from polar_gym.console import console
from polar_gym.episodes.reading import read_episodes
from polar_gym.episodes.report import inspect_file, print_verification
from polar_gym.episodes.reuse import reuse_by_harness, reuse_table
from polar_gym.episodes.verify import verify_file

app = typer.Typer()


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A file of episodes, as `polar-gym rollout` writes it.")],
    episode: Annotated[int | None, typer.Option(help="Only this episode (0 is the first).")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A model directory or tokenizer.json, where the file names none.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print long masked stretches whole.")] = False,
) -> None:
    """Show trajectories, with the trainable tokens set apart from the masked ones."""
    inspect_file(file, console, only=episode, tokenizer=tokenizer, full=full)


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="A file of episodes, as `polar-gym rollout` writes it.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="The engine for the second test, e.g. engine=vllm engine.url=..."),
    ] = None,
    bound: Annotated[float, typer.Option(min=0, help="The largest |Δ| of a logprob that counts as equal.")] = 1e-4,
) -> None:
    """Check that traces are what the model saw, and (given an engine) that one forward pass gives their logprobs back.

    Exit code 1 when a trace or a call fails the exact test.
    """
    result = asyncio.run(verify_file(read_episodes(file), settings or []))
    print_verification(result, bound, console)
    if result.broken:
        raise typer.Exit(1)


@app.command()
def reuse(
    files: Annotated[list[Path], typer.Argument(help="The files of episodes of one run.")],
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a block of the engine's cache; default: told by the calls.")
    ] = None,
) -> None:
    """Show how many prompt tokens came from the engine's prefix cache, of those that could, and why others did not.

    Needs the run's journals (rollout.state), and vLLM with --enable-prompt-tokens-details.
    """
    sums, block, silent = reuse_by_harness(files, block_size)
    console.print(reuse_table(sums))
    left_out = f"; {silent} calls tell nothing of the cache" if silent else ""
    console.print(f"blocks of {block} tokens{left_out}")
