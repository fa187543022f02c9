"""`polar-gym rollout`: make episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.text import Text

from polar_gym.cli.settings_help import help_option, print_run_settings
from polar_gym.config.composition import (
    SweepRun,
    compose_config,
    overridden_key,
    readable,
    split_recipe,
    sweep,
    without_hydra,
)
from polar_gym.config.loading import check_no_sweep, load_config
from polar_gym.config.run_config import RunConfig
from polar_gym.console import console, errors
from polar_gym.episodes.output import DEVICES
from polar_gym.episodes.report import print_summary
from polar_gym.errors import ConfigError
from polar_gym.http.keys import hide_keys
from polar_gym.runs.run import roll_out
from polar_gym.runs.state import state_of
from polar_gym.runs.sweep import plan, print_sweep, run_sweep
from polar_gym.schema import Episode

app = typer.Typer()


@app.command(add_help_option=False)  # its own says more
def rollout(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE KEY=VALUE", help="A recipe's name, then settings, e.g. harness=codex"),
    ] = None,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="Run every combination of the values, e.g. harness=codex,pi")
    ] = False,
    cfg: Annotated[str | None, typer.Option("--cfg", metavar="job", help="Show the composed config and stop.")] = None,
    resolve: Annotated[
        bool, typer.Option("--resolve", help="With --cfg: replace interpolations by their values.")
    ] = False,
    config_dir: Annotated[
        Path | None, typer.Option("--config-dir", help="A directory with recipes and groups of your own.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="FILE", help="Go on with the unfinished run that writes FILE: same settings."),
    ] = None,
    _: Annotated[bool, help_option(print_run_settings)] = False,
) -> None:
    """Roll out tasks x samples and write one episode a line."""
    if multirun and resume is not None:
        raise ConfigError(f"--resume={str(resume)!r}: goes on with one run; leave --multirun out and give its settings")
    if cfg is not None and resume is not None:
        raise ConfigError(f"--resume={str(resume)!r}: has no effect with --cfg, which runs nothing; leave it out")
    if resolve and cfg is None:
        raise ConfigError("--resolve: shows values in the composed config; add --cfg job, or leave it out")
    arguments = arguments or []
    if cfg is not None:
        if not multirun:
            check_no_sweep(split_recipe(arguments)[1])
        runs = sweep(arguments) if multirun else [SweepRun(arguments, [])]
        _show_configs(cfg, runs, config_dir, resolve)
    elif multirun:
        _sweep(arguments, config_dir)
    else:
        config = load_config(*split_recipe(arguments), config_dir=config_dir)
        if resume is not None:
            _check_output(config, resume, arguments)
        _roll_out(config if resume is None else config.with_rollout(output=resume), resume=resume is not None)


def _check_output(config: RunConfig, resumed: Path, arguments: Sequence[str]) -> None:
    """Raise `ConfigError` where a setting names another file than that of the run that goes on."""
    given = any(overridden_key(override) == "rollout.output" for override in split_recipe(arguments)[1])
    if given and config.rollout.output.resolve() != resumed.resolve():
        raise ConfigError(
            f"rollout.output={config.rollout.output}: --resume goes on with {resumed}; leave one of them out"
        )


def _show_configs(what: str, runs: Sequence[SweepRun], config_dir: Path | None, resolve: bool) -> None:
    """Print the composed configs. Those of a sweep are YAML documents, each below the overrides that vary."""
    if what != "job":
        raise ConfigError(f"--cfg={what!r}: only the job's config can be shown: --cfg job")
    for run in runs:
        composed = compose_config(*split_recipe(run.overrides), config_dir)
        if len(runs) > 1:
            typer.echo(f"--- # {' '.join(run.varied)}")
        try:
            typer.echo(OmegaConf.to_yaml(without_hydra(composed), resolve=resolve), nl=False)
        except OmegaConfBaseException as error:
            raise ConfigError(readable(error)) from error


def _sweep(arguments: Sequence[str], config_dir: Path | None) -> None:
    runs = plan(arguments, config_dir)
    hide_keys(*(key for run in runs for key in run.config.engine_keys))
    try:
        finished = run_sweep(runs, console)
    except KeyboardInterrupt as error:
        said = f"interrupted: the results so far are in {runs[0].directory.parent}; no sandbox is left"
        errors.print(Text(said), soft_wrap=True)
        raise typer.Exit(130) from error
    print_sweep(finished, console)
    if any(run.failed for run in finished):
        raise typer.Exit(1)


def episodes_of(config: RunConfig, progress: Console, *, resume: bool = False) -> list[Episode]:
    """Roll out and return the episodes. Where the user interrupts, print where episodes and captured calls are."""
    hide_keys(*config.engine_keys)
    output, state = config.rollout.output, state_of(config)
    earlier = set() if resume else _written(output)
    try:
        return asyncio.run(roll_out(config, progress, resume=resume))
    except KeyboardInterrupt as error:
        said = f"interrupted: {output} holds the episodes that ended, {state} the calls of all sessions"
        said = f"{said}; no sandbox is left; go on with `polar-gym rollout` and --resume {output}"
        if earlier & _written(output):
            said = f"interrupted before a session began; no sandbox is left; {output} is that of an earlier run"
        errors.print(Text(said), soft_wrap=True)
        raise typer.Exit(130) from error


def _written(output: Path) -> set[tuple[int, int]]:
    """Return the device and the number of a file with something in it; nothing where there is none, and for a device
    (`/dev/stdout`), which no run sets aside."""
    if DEVICES in output.absolute().parents or not output.is_file() or not (known := output.stat()).st_size:
        return set()
    return {(known.st_dev, known.st_ino)}


def _roll_out(config: RunConfig, *, resume: bool) -> None:
    episodes = episodes_of(config, console, resume=resume)
    print_summary(episodes, console)
    console.print(Text(f"look at them with: polar-gym inspect {config.rollout.output}", "dim"))
    if any(episode.session.failure is not None for episode in episodes):
        raise typer.Exit(1)
