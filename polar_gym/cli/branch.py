"""`polar-gym branch`: sample again from any turn of recorded episodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from polar_gym.config.composition import split_recipe, why_idle
from polar_gym.config.loading import load_config
from polar_gym.console import console
from polar_gym.episodes.reading import read_calls, read_episodes
from polar_gym.episodes.report import print_summary
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.assemble import load_tasks
from polar_gym.gateway.session.branching import branch_of, branching_points
from polar_gym.harnesses import HARNESSES
from polar_gym.http.keys import hide_keys
from polar_gym.runs.run import Sample, run_samples
from polar_gym.runs.state import own_state
from polar_gym.schema import HarnessSpec

app = typer.Typer()

_IDLE: dict[str, str] = dict.fromkeys(
    (
        *("harness", "sampling", "budget", "builder", "evaluator", "runtime"),
        *("rollout.num_samples", "rollout.timeout_seconds"),
    ),
    "they have that of their episodes; leave it out",
)
"""Keys of settings without effect -> advice for the error."""


@app.command()
def branch(
    file: Annotated[Path, typer.Argument(metavar="EPISODES", help="A file of episodes, with their journals.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE KEY=VALUE", help="The engine, and rollout.output=FILE for the branches."),
    ] = None,
    at: Annotated[str, typer.Option(help="call=N, each-turn or before-last-edit.")] = "each-turn",
    samples: Annotated[int, typer.Option(min=1, help="Branches at each place.")] = 1,
) -> None:
    """Answer the first calls of recorded episodes from the record, and sample anew from there."""
    recipe, settings = split_recipe(arguments or [])
    for setting in settings:
        if why := why_idle(setting, _IDLE, "on branches"):
            raise ConfigError(why)
    config = load_config(recipe, settings)
    hide_keys(*config.engine_keys)
    if config.rollout.output.resolve() == file.resolve():
        raise ConfigError(f"rollout.output={file}: the branches need a file of their own")
    branches: list[Sample] = []
    begun: Counter[str] = Counter()
    for episode in read_episodes(file):
        task_id = episode.request.task_id
        for calls in branching_points(read_calls(episode), at):
            for _ in range(samples):
                begun[task_id] += 1
                branches.append(Sample(branch_of(episode, calls), episode.request.num_samples + begun[task_id] - 1))
    if not branches:
        raise ConfigError(f"{file}: no episode has a place to branch at ({at}); name another place, e.g. --at call=0")
    tasks = load_tasks(config)
    config = config.model_copy(update={"harness": _of_all([sample.request.agent for sample in branches])})
    with own_state(config) as state:
        episodes = asyncio.run(run_samples(config, tasks, branches, console, state))
    print_summary(episodes, console)
    if any(episode.session.failure is not None for episode in episodes):
        raise typer.Exit(1)


def _of_all(harnesses: Sequence[HarnessSpec]) -> HarnessSpec:
    """Return the harness for which scripts are made: one that a command ends, if there is one. Others run the command
    as any other."""
    return next((each for each in harnesses if HARNESSES.get(each.name).ends_by), harnesses[0])
