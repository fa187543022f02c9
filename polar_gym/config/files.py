"""The config files that a run is composed from: those that ship, and those of the user's own directory."""

from __future__ import annotations

from pathlib import Path

from polar_gym import registry
from polar_gym.config.errors import ConfigError

ROOMS = {
    "harness": registry.harnesses,
    "runtime": registry.runtimes,
    "engine": registry.engines,
    "builder": registry.builders,
    "evaluator": registry.evaluators,
    "tasks": registry.task_sources,
}
"""The groups whose choices are plug-ins."""


def shipped_dir(name: str) -> Path:
    """`conf` or `recipes`: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def recipe_names(config_dir: Path | None = None) -> list[str]:
    """What ships, and what is in the user's own directory."""
    return sorted({path.stem for root in config_roots("recipes", config_dir) for path in root.glob("*.yaml")})


def group_choices(config_dir: Path | None = None) -> dict[str, list[str]]:
    """Each group with the names of its files."""
    roots = config_roots("conf", config_dir)
    return {group: sorted({path.stem for root in roots for path in (root / group).glob("*.yaml")}) for group in ROOMS}


def config_roots(name: str, config_dir: Path | None) -> list[Path]:
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir={str(config_dir)!r}: no such directory")
    return [shipped_dir(name), *([config_dir] if config_dir else [])]
