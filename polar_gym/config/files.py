"""The config files that a run is composed from: the shipped ones, and those of the user's own directory."""

from __future__ import annotations

from pathlib import Path

from polar_gym.builders import BUILDERS
from polar_gym.engines import ENGINES
from polar_gym.errors import ConfigError
from polar_gym.evaluators import EVALUATORS
from polar_gym.harnesses import HARNESSES
from polar_gym.paths import shipped_dir
from polar_gym.runtimes import RUNTIMES
from polar_gym.tasks import TASK_SOURCES

ROOMS = {
    "harness": HARNESSES,
    "runtime": RUNTIMES,
    "engine": ENGINES,
    "builder": BUILDERS,
    "evaluator": EVALUATORS,
    "tasks": TASK_SOURCES,
}
"""The groups whose choices are plug-ins."""


def recipe_names(config_dir: Path | None = None) -> list[str]:
    """Return the names of the shipped recipes and of those in the user's own directory."""
    return sorted({path.stem for root in config_roots("recipes", config_dir) for path in root.glob("*.yaml")})


def group_choices(config_dir: Path | None = None) -> dict[str, list[str]]:
    roots = config_roots("conf", config_dir)
    return {group: sorted({path.stem for root in roots for path in (root / group).glob("*.yaml")}) for group in ROOMS}


def config_roots(name: str, config_dir: Path | None) -> list[Path]:
    """Return the shipped directory `conf` or `recipes`, then the user's own. Raises `ConfigError`."""
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir={str(config_dir)!r}: no such directory")
    return [shipped_dir(name), *([config_dir] if config_dir else [])]
