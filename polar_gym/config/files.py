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
    """Return the shipped directory `conf` or `recipes`, then the user's own. Raises `ConfigError`, also where a recipe
    or a choice of the user's has the name of a shipped one, which Hydra takes with shipped recipes."""
    shipped = shipped_dir(name)
    if config_dir is None:
        return [shipped]
    if not config_dir.is_dir():
        raise ConfigError(f"--config-dir={str(config_dir)!r}: no such directory")
    if config_dir.samefile(shipped):
        return [shipped]
    places = ["*.yaml"] if name == "recipes" else ["config.yaml", *(f"{group}/*.yaml" for group in ROOMS)]
    for path in sorted(path for place in places for path in config_dir.glob(place)):
        if (shipped / path.relative_to(config_dir)).exists():
            raise ConfigError(
                f"--config-dir: {path}: a shipped file has this name, and is taken with shipped recipes; rename yours"
            )
    return [shipped, config_dir]
