"""A sweep: the same run with other settings, several times, one after another.

All configs are composed and checked before the first run starts. Each run has a directory of its own, named as in Hydra
(`hydra.sweep.dir`, `hydra.sweep.subdir`), with its config and overrides in `.hydra/` beside its episodes.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf, open_dict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polar_gym.config.composition import SweepRun, compose_config, split_recipe, sweep
from polar_gym.config.loading import check_composed
from polar_gym.config.run_config import RunConfig
from polar_gym.engines import EngineError
from polar_gym.errors import ConfigError
from polar_gym.http.keys import MIN_HIDDEN
from polar_gym.runs.run import figures, roll_out
from polar_gym.runs.state import state_of
from polar_gym.schema import Episode


@dataclass(frozen=True)
class PlannedRun(SweepRun):
    """One run of a sweep, ready to start."""

    config: RunConfig
    """The config, whose relative paths are in `directory`."""
    composed: str
    """The composed config in YAML, before its paths were put in `directory`."""
    directory: Path


@dataclass(frozen=True)
class FinishedRun:
    """One run of a sweep that has ended, could not start, or broke off."""

    run: PlannedRun
    seconds: float
    episodes: list[Episode] = field(default_factory=list)
    error: str | None = None
    """The reason why the run could not start, or broke off."""

    @property
    def failed(self) -> bool:
        return self.error is not None or any(episode.session.failure is not None for episode in self.episodes)


def plan(arguments: Sequence[str], config_dir: Path | None = None) -> list[PlannedRun]:
    """Return the runs of a sweep, whose arguments are those of `polar_gym.config.composition.sweep`.

    Raises `ConfigError` if one of the runs is wrong, or if two runs would write to one file.
    """
    runs: list[PlannedRun] = []
    base = None
    for number, run in enumerate(sweep(arguments)):
        own_recipe, own_overrides = split_recipe(run.overrides)
        composed = compose_config(own_recipe, own_overrides, config_dir)
        with open_dict(composed):
            composed.hydra.job.num = number
            composed.hydra.job.id = str(number)
            composed.hydra.job.override_dirname = ",".join(
                sorted(override for override in own_overrides if not override.startswith("hydra."))
            )
        base = base or Path(composed.hydra.sweep.dir)  # it holds the time: all runs use that of the first
        directory = base / composed.hydra.sweep.subdir
        config = check_composed(composed)
        text = OmegaConf.to_yaml(composed)
        runs.append(PlannedRun(run.overrides, run.varied, _inside(directory, config), text, directory))
    _check_apart(runs)
    return runs


def run_sweep(runs: Sequence[PlannedRun], console: Console) -> list[FinishedRun]:
    """Do the runs one after another. A run that cannot start, or that breaks off, becomes a finished run with an error;
    the others go on. None begins after a full disk."""
    finished = []
    for number, run in enumerate(runs):
        console.rule(Text(f"run {number + 1} of {len(runs)}: {' '.join(run.varied)}"))
        _write_settings(run)
        started = time.monotonic()
        try:
            episodes = asyncio.run(roll_out(run.config, console))
        except (EngineError, ConfigError) as error:
            console.print(Text(f"error: {error}", "red"))
            finished.append(FinishedRun(run, time.monotonic() - started, error=str(error)))
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT):
                console.print(Text(f"{len(runs) - number - 1} runs are left out", "red"))
                break
        else:
            finished.append(FinishedRun(run, time.monotonic() - started, episodes))
    return finished


def print_sweep(finished: Sequence[FinishedRun], console: Console) -> None:
    table = Table(title="sweep", title_justify="left", header_style="bold")
    for heading in ("run", "settings", "episodes", "mean reward", "failed", "calls", "traces", "trainable", "seconds"):
        table.add_column(heading, justify="left" if heading == "settings" else "right", overflow="fold")
    for run in finished:
        table.add_row(run.run.directory.name, "\n".join(run.run.varied), *_figures(run), f"{run.seconds:.1f}")
    console.print(table)
    console.print(
        Text(f"each run's episodes and config are in its directory: {finished[0].run.directory.parent}", "dim")
    )


def _figures(run: FinishedRun) -> list[str]:
    if run.error is not None:
        return ["error", "", "", "", "", ""]
    found = figures(run.episodes)
    episodes, *others = (str(found[name]) for name in ("episodes", "masked", "calls", "traces", "trainable_tokens"))
    return [episodes, f"{found['reward']:.3f}" if "reward" in found else "none", *others]


def _inside(directory: Path, config: RunConfig) -> RunConfig:
    """Return the config with its relative output paths in the directory. Absolute paths stay as they are."""
    output, state = config.rollout.output, config.rollout.state
    return config.with_rollout(
        output=output if output.is_absolute() else directory / output.name, state=state and directory / state
    )


def _check_apart(runs: Sequence[PlannedRun]) -> None:
    """Raise `ConfigError` where two runs would write to one file, or to one state directory."""
    for key, path_of in (("output", lambda config: config.rollout.output), ("state", state_of)):
        paths = [path_of(run.config) for run in runs]
        for path in paths:
            if paths.count(path) > 1:
                raise ConfigError(
                    f"rollout.{key}={str(path)!r}: several runs of the sweep would write to it; "
                    f"name a relative path, or put the varied key into it, e.g. /data/${{harness.name}}{path.suffix}"
                )


def _write_settings(run: PlannedRun) -> None:
    """Write the settings of a run as Hydra does, without the keys of engines, but for those too short to be secret."""
    folder = run.directory / ".hydra"
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"config": run.composed, "overrides": OmegaConf.to_yaml(OmegaConf.create(run.overrides))}
    for name, text in texts.items():
        for key in run.config.engine_keys:
            text = text.replace(key, "hidden") if key and len(key) >= MIN_HIDDEN else text
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
