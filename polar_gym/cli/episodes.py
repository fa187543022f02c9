"""`polar-gym rollout | inspect | verify`: make episodes, look at them, check them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from polar_gym.cli.console import console
from polar_gym.config import load_config


def rollout(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe's name, then settings, e.g. harness=codex"),
    ] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Show the composed config and stop.")] = False,
) -> None:
    """Roll out tasks x samples and write one episode a line."""
    from polar_gym.report import print_summary
    from polar_gym.rollout.run import roll_out

    recipe, overrides = _split_arguments(arguments or [])
    config = load_config(recipe, overrides)
    if print_config:
        console.print_json(config.model_dump_json())
        return
    episodes = asyncio.run(roll_out(config, console))
    print_summary(episodes, console)
    console.print(Text(f"look at them with: polar-gym inspect {config.rollout.output}", "dim"))
    if any(episode.session.failure is not None for episode in episodes):
        raise typer.Exit(1)


def inspect(
    file: Annotated[Path, typer.Argument(help="A file of episodes, as `polar-gym rollout` writes it.")],
    episode: Annotated[int | None, typer.Option(help="Only this episode (0 is the first).")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A model directory or tokenizer.json, where the file names none.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print long masked stretches whole.")] = False,
) -> None:
    """Show trajectories, with the trainable tokens set apart from the masked ones."""
    from polar_gym.report import inspect_file

    inspect_file(file, console, only=episode, tokenizer=tokenizer, full=full)


def verify(
    file: Annotated[Path, typer.Argument(help="A file of episodes, as `polar-gym rollout` writes it.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="The engine for the second test, e.g. engine=vllm engine.url=..."
        ),
    ] = None,
    bound: Annotated[float, typer.Option(help="The largest |Δ| of a logprob that counts as equal.")] = 1e-4,
) -> None:
    """Check that traces are what the model saw, and (given an engine) that one forward pass gives their logprobs back.

    Exit code 1 when a trace fails the exact test.
    """
    from polar_gym.report import print_verification, read_episodes
    from polar_gym.verify import verify_file

    result = asyncio.run(verify_file(list(read_episodes(file)), settings or []))
    print_verification(result, bound, console)
    if result.broken:
        raise typer.Exit(1)


def _split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    recipe = None
    overrides = list(arguments)
    if overrides and "=" not in overrides[0]:
        recipe = overrides.pop(0)
    for override in overrides:
        if override.startswith("recipe="):
            recipe = override.partition("=")[2]
    return recipe, [override for override in overrides if not override.startswith("recipe=")]
