"""The config of commands that grade patches without a run of a harness: those of `polar-gym tasks`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polar_gym.config.composition import overridden_key
from polar_gym.config.loading import load_config
from polar_gym.config.run_config import RunConfig
from polar_gym.errors import ConfigError
from polar_gym.evaluators import EVALUATORS
from polar_gym.schema import EvaluatorSpec


def grading_config(settings: Sequence[str] | None, file: Path | None = None) -> RunConfig:
    """Return the config of a command that grades the tasks of `file`, a directory of Harbor's included.

    None: the command makes the tasks that it grades. Raises `ConfigError`, also for a setting that has no effect.
    """
    of_harbor = file is not None and file.is_dir()
    for setting in settings or ():
        _check_effect(setting, file, of_harbor)
    source = {"tasks": {"name": "harbor" if of_harbor else "jsonl", "path": str(file)}} if file else None
    config = load_config(None, settings or (), source)
    grader = "harbor" if of_harbor else "swe"
    if config.evaluator.name != grader:
        raise ConfigError(f"evaluator={config.evaluator.name}: this command grades with {grader} only; leave it out")
    known = {*EvaluatorSpec.model_fields, *EVALUATORS.accepted(grader).model_fields}
    for name, value in config.evaluator.options.items():
        if name not in known:
            raise ConfigError(f"evaluator.{name}={value}: unknown; known: {', '.join(sorted(known))}")
    return config


def _check_effect(setting: str, file: Path | None, of_harbor: bool) -> None:
    key = overridden_key(setting)
    groups = ("runtime", "evaluator", "tasks") if file else ("runtime", "evaluator")
    if key.partition(".")[0] not in groups:
        raise ConfigError(f"{setting}: has no effect on this command; settings of {', '.join(groups)} have")
    if key in ("tasks", "tasks.path"):
        raise ConfigError(f"{setting}: has no effect, because {file} names the tasks; leave it out")
    if of_harbor and key == "evaluator.timeout_seconds":
        raise ConfigError(f"{setting}: has no effect on Harbor's tasks; set tasks.timeout_multiplier")
