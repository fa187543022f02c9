"""Loads a run's config: composed by Hydra, resolved by OmegaConf, checked by pydantic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from polar_gym.config.checking import check_config
from polar_gym.config.composition import compose_config, readable, why_idle, without_hydra
from polar_gym.config.files import group_choices
from polar_gym.config.run_config import RunConfig
from polar_gym.errors import ConfigError


def load_config(
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    config_dir: Path | None = None,
) -> RunConfig:
    """Compose a run from a recipe (None: the defaults), `key=value` overrides, and nested `settings` on top.

    In `settings` a group may be a name (`{"harness": "codex"}`) or a mapping, whose `name` chooses the group's file, or
    a plug-in without a file. Raises `ConfigError`, also for a setting of Hydra's own, which only a sweep has.
    """
    check_no_sweep(overrides)
    chosen, nested = _split_groups(settings or {}, group_choices(config_dir))
    return check_composed(compose_config(recipe, [*chosen, *overrides], config_dir), nested)


def check_no_sweep(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for a setting of Hydra's own: only a sweep has these."""
    advice = "leave it out; only `rollout --multirun` has a sweep"
    for override in overrides:
        if why := why_idle(override, {"hydra": advice}, "on one run"):
            raise ConfigError(why)


def check_composed(composed: DictConfig, settings: Mapping[str, Any] | None = None) -> RunConfig:
    """Resolve and check a tree of `compose_config`, with nested `settings` on top. Raises `ConfigError`."""
    try:
        values = OmegaConf.to_container(without_hydra(composed), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(readable(error)) from error
    values = _merged(values, settings or {})
    if missing := [f"{key}: is required" for key, value in _leaves(values) if value == MISSING]:
        raise ConfigError("\n".join(missing))
    return check_config(values)


def _merged(base: Any, settings: Any) -> Any:
    """Return `base` with `settings` on top, key by key.

    The values of `settings` are taken literally: `${HOME}` in a shell command is not an interpolation.
    """
    if not (isinstance(base, Mapping) and isinstance(settings, Mapping)):
        return settings
    return {**base, **{key: _merged(base.get(key), value) for key, value in settings.items()}}


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _split_groups(settings: Mapping[str, Any], groups: Mapping[str, Sequence[str]]) -> tuple[list[str], dict[str, Any]]:
    chosen, nested = [], {}
    for key, value in settings.items():
        if key not in RunConfig.model_fields:
            raise ConfigError(f"{key}={value!r}: unknown key; known: {', '.join(RunConfig.model_fields)}")
        if key in groups and isinstance(value, str):
            chosen.append(f"{key}={value}")
            continue
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json")
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value!r}: expected a mapping" + (" or a name" if key in groups else ""))
        if key in groups and isinstance(name := value.get("name"), str):
            chosen.append(f"{key}={name}")
        nested[key] = dict(value)
    return chosen, nested
