"""Hydra's side of a config: groups, recipes, `key=value` overrides and sweeps, composed into one tree.

Hydra's own parser reads the overrides, so everything means what it means in Hydra: `group=choice`, `+key=`, `++key=`,
`~key`, quotes, interpolation, and `a,b`, `range(1,4)` or `glob(*)` in a sweep. One thing differs: a key that no config
file names is accepted here, because `polar_gym.config.checking` checks all keys and names the known ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from polar_gym.config.files import ROOMS, config_roots, group_choices, recipe_names
from polar_gym.config.run_config import field_defaults
from polar_gym.errors import ConfigError
from polar_gym.paths import shipped_dir


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    overrides: list[str]
    """All of its overrides, each with one value."""
    varied: list[str]
    """The overrides whose values differ between the runs of the sweep, as a person writes them."""


def split_recipe(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split arguments into the recipe (`recipe=NAME`, or a bare name in the first place) and the overrides. Raises
    `ConfigError` for two recipes."""
    overrides = list(arguments)
    bare = overrides and "=" not in overrides[0] and not overrides[0].startswith("~")
    recipes = [overrides.pop(0)] if bare else []
    recipes += [override.partition("=")[2] for override in overrides if override.startswith("recipe=")]
    if len(recipes) > 1:
        raise ConfigError(f"{', '.join(recipes)}: are {len(recipes)} recipes; name one")
    others = [override for override in overrides if not override.startswith("recipe=")]
    return next(iter(recipes), None), others


def overridden_key(override: str) -> str:
    """Return the key or group that an override sets, adds or deletes. Raises `ConfigError`."""
    (parsed,) = _parsed([override])
    return str(parsed.key_or_group)


def why_idle(override: str, advice: Mapping[str, str], here: str) -> str | None:
    """Return the error for an override that has no effect in a command (`here`: "on a node"), or None.

    `advice`: the keys of settings that have none, and what to do instead. A key stands for all keys below it. Raises
    `ConfigError` where the override is none.
    """
    given = overridden_key(override)
    for key, instead in advice.items():
        if _lies_at(given, key):
            return f"{override}: has no effect {here}; {instead}"
        if _lies_at(key, given):
            return f"{override}: {key} has no effect {here}; set the others one by one"
    return None


def _lies_at(key: str, beginning: str) -> bool:
    """Return whether a dotted key, or a group (`hydra/launcher`), is `beginning`, or one below it."""
    return f"{key.replace('/', '.')}.".startswith(f"{beginning}.")


def compose_config(
    recipe: str | None = None, overrides: Sequence[str] = (), config_dir: Path | None = None
) -> DictConfig:
    """Compose a recipe and overrides into one tree, unresolved and unchecked, with Hydra's own settings in `hydra`.

    `config_dir` may hold more recipes and more choices for the groups. Raises `ConfigError`.
    """
    groups = group_choices(config_dir)
    if recipe is not None and recipe not in (known := recipe_names(config_dir)):
        file = ", and no such file" if "/" in recipe or "." in recipe else ""
        raise ConfigError(f"recipe={recipe!r}: unknown recipe{file}; known: {', '.join(known)}")
    told = [part for override in _parsed(overrides) for part in _as_told(override, groups)]
    roots = config_roots("recipes" if recipe else "conf", config_dir)
    root = next(root for root in roots if (root / f"{recipe or 'config'}.yaml").exists())
    others = ",".join(f"file://{other.resolve()}" for other in config_roots("conf", config_dir))
    with _hydra(root):
        return compose(recipe or "config", [f"hydra.searchpath=[{others}]", *told], return_hydra_config=True)


def without_hydra(composed: DictConfig) -> DictConfig:
    """Remove Hydra's own settings from a composed tree, and return the tree."""
    with open_dict(composed):
        composed.pop("hydra", None)
    return composed


def sweep(arguments: Sequence[str]) -> list[SweepRun]:
    """Return a run for every combination of the values that the arguments list. Raises `ConfigError`.

    The arguments are those of `split_recipe`. `recipe=` may vary too.
    """
    recipe, overrides = split_recipe(arguments)
    named = [*([f"recipe={recipe}"] if recipe else []), *overrides]
    with _hydra(shipped_dir("conf")):
        values = [_values(override) for override in _parsed(named, GlobalHydra.instance().config_loader())]
    if empty := [override for override, several in zip(named, values, strict=True) if not several]:
        raise ConfigError(f"{empty[0]}: no value, so there is nothing to run")
    varying = [len(several) > 1 for several in values]
    runs = [list(chosen) for chosen in itertools.product(*values)]
    return [SweepRun(run, [_unescaped(override) for override in itertools.compress(run, varying)]) for run in runs]


def _unescaped(override: str) -> str:
    (parsed,) = _parsed([override])
    return f"{parsed.get_key_element()}={parsed.value()}"


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [override.input_line or ""]
    if not override.is_discrete_sweep():
        raise ConfigError(f"{override.input_line}: a sweep takes a,b,c, choice(), range() or glob()")
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


@contextmanager
def _hydra(root: Path) -> Iterator[None]:
    """Initialise Hydra while the context lasts, and turn its own errors into `ConfigError`."""
    GlobalHydra.instance().clear()
    ConfigStore.instance().store(name="field_defaults", node=field_defaults())
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(root.resolve())):
            yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(readable(error)) from error


def _parsed(overrides: Sequence[str], loader: ConfigLoader | None = None) -> list[Override]:
    parsed: list[Override] = []
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise ConfigError(f"{override!r}: expected key=value")
        try:
            parsed += OverridesParser.create(config_loader=loader).parse_overrides([override])
        except HydraException as error:
            raise ConfigError(f"{override!r}: {readable(error)}") from error
    return parsed


def _as_told(override: Override, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the overrides for Hydra that stand for an override as the user typed it."""
    text, key = override.input_line or "", override.key_or_group
    if override.is_hydra_override():
        return [text]
    if override.is_sweep_override():
        raise ConfigError(
            f"{text}: several values are a sweep, which needs --multirun; a comma in a value needs quotes"
        )
    if key in groups and not override.is_delete():
        return _choice(key, override, groups[key])
    if (shipped_dir("conf") / key).is_dir() and not override.is_delete():
        raise ConfigError(f"{text}: {key} is not part of a run; the groups of a run: {', '.join(groups)}")
    if override.is_delete() or override.is_add() or override.is_force_add():
        return [text]
    return [f"++{text}"]


def _choice(group: str, override: Override, files: Sequence[str]) -> list[str]:
    """Return the overrides that choose a file of a group, or a plug-in of third parties, which has no file."""
    text, choice = override.input_line or "", override.value()
    if choice in files or not isinstance(choice, str):
        return [text]
    plugins = ROOMS[group].names()
    if choice in plugins or ":" in choice:
        return [f"~{group}", f'++{group}.name="{choice}"']
    known = ", ".join(sorted({*files, *plugins}))
    raise ConfigError(f"{group}={choice!r}: unknown {group}; known: {known}")


def readable(error: Exception) -> str:
    """Return the message of an error of Hydra or OmegaConf without its empty lines."""
    return "\n".join(line for line in str(error).splitlines() if line.strip())
