"""Hydra configs -> checked records.

`conf/` holds the groups and their defaults, `recipes/` the ready-made runs; both ship in the wheel. Hydra composes
(`polar_gym.config.composition`), pydantic judges: whatever is wrong is one `ConfigError` that names the key, its value
and what is allowed, before anything starts. The docstrings of the fields are what `polar-gym rollout --help` says of
them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from polar_gym import registry
from polar_gym.config.composition import ROOMS, ConfigError, compose_config, group_choices, readable, without_hydra
from polar_gym.schema import Budget, BuilderSpec, EvaluatorSpec, HarnessSpec, PluginSpec, Record, RuntimeSpec, Sampling

SHOWN = 200
"""Characters of a wrong value that an error shows."""

_TYPE = re.compile(r"(str|int|float|bool|(list|dict)\[.*\])")
"""What pydantic puts behind a key whose value may be of several types: the one that a problem is about."""

MISSING = "???"
"""What a shipped config says of a key that must be set."""


class RolloutConfig(Record):
    """How much is run, and where its episodes go."""

    num_samples: int = Field(default=1, gt=0)
    """Sessions for each task."""
    timeout_seconds: float = Field(default=1800.0, gt=0)
    """The agent's own budget; init and evaluation have theirs."""
    output: Path = Path("outputs/episodes.jsonl")
    """One episode a line; a file of an earlier run is kept under another name. In a sweep, a relative path is in each
    run's own directory."""
    state: Path | None = None
    """Where journals of captured calls are kept; null: beside the output, or for gym.make in a temporary folder."""


class PoolsConfig(Record):
    """How many sessions may be in each stage at once."""

    init: int = Field(default=2, gt=0)
    """Sandboxes that come up."""
    ready: int = Field(default=4, gt=0)
    """Sandboxes that wait for their harness to start."""
    run: int = Field(default=4, gt=0)
    """Harnesses that run."""
    postrun: int = Field(default=2, gt=0)
    """Sessions whose traces are built and whose sandbox is evaluated."""
    prewarm: int = Field(default=2, ge=0)
    """Sandboxes for grading that come up, or are up, while the agent runs; 0: none do."""


def _off(value: Any) -> Any:
    """YAML's `off` is false."""
    return "off" if value is False else value


class ProxyConfig(Record):
    """How the gateway answers the harness and asks the engine."""

    streaming: Literal["synthetic", "real"] = "synthetic"
    """What harnesses that ask for streams get: the whole answer at its end, or its pieces as they are sampled."""
    splice: Annotated[Literal["auto", "off"], BeforeValidator(_off)] = "auto"
    """Whether a continuation's prompt is the ids already seen plus the new ones, or templated anew every time, as the
    model will be served."""
    keep_reasoning: bool = True
    """Whether sampled reasoning stays in the context; else the template decides, and every drop forks."""


class RunConfig(Record):
    """A whole run, as composed."""

    harness: HarnessSpec
    runtime: RuntimeSpec
    engine: PluginSpec
    """What samples the tokens."""
    builder: BuilderSpec
    evaluator: EvaluatorSpec
    tasks: PluginSpec
    """What is worked on."""
    sampling: Sampling = Field(default_factory=Sampling)
    budget: Budget = Field(default_factory=Budget)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    pools: PoolsConfig = Field(default_factory=PoolsConfig)
    proxy: ProxyConfig = Field(default_factory=ProxyConfig)


def cache_dir() -> Path:
    """Where harnesses and environments are kept between runs: `$POLAR_GYM_CACHE`, else the XDG cache directory."""
    if chosen := os.environ.get("POLAR_GYM_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polar-gym"


def check_writable(key: str, file: Path) -> None:
    """Raises `ConfigError` where the file cannot be written; its folder is made, and what is in it stays as it is."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        existed = file.exists()
        with file.open("ab"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"{key}={str(file)!r}: {error.strerror}; name a file that can be written") from error


def load_config(
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    config_dir: Path | None = None,
) -> RunConfig:
    """Compose a run from a recipe (None: the defaults), `key=value` overrides, and nested `settings` on top.

    In `settings` a group may be a name (`{"harness": "codex"}`) or a mapping, whose `name` chooses the group's file.
    Raises `ConfigError`.
    """
    chosen, nested = _split_groups(settings or {}, group_choices(config_dir))
    return check_composed(compose_config(recipe, [*chosen, *overrides], config_dir), nested)


def check_composed(composed: DictConfig, settings: Mapping[str, Any] | None = None) -> RunConfig:
    """A tree of `compose_config`, resolved and checked, with nested `settings` on top. Raises `ConfigError`."""
    try:
        values = OmegaConf.to_container(without_hydra(composed), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(readable(error)) from error
    values = _merged(values, settings or {})
    if missing := [f"{key}: is required" for key, value in _leaves(values) if value == MISSING]:
        raise ConfigError("\n".join(missing))
    return check_config(values)


def _merged(base: Any, settings: Any) -> Any:
    """`settings` on top of `base`, key by key. What they say is meant as it stands: `${HOME}` in a shell command is no
    interpolation."""
    if not (isinstance(base, Mapping) and isinstance(settings, Mapping)):
        return settings
    return {**base, **{key: _merged(base.get(key), value) for key, value in settings.items()}}


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_config(values: Any) -> RunConfig:
    """The checked form of a composed config, the plug-ins' own options included. Raises `ConfigError`."""
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig)) from error
    for key, found in ROOMS.items():
        # The options of `swe` come from each task (`make_request`), also within a `composite`.
        if key != "evaluator" or config.evaluator.name not in ("swe", "composite"):
            check_plugin(key, found, getattr(config, key))
    _check_today(config.harness)
    return config


def _check_today(spec: HarnessSpec) -> None:
    """Raises `ConfigError` for a date that a harness cannot be told. Those of third parties inherit the default's."""
    untold = spec.name in group_choices()["harness"] and registry.harnesses.get(spec.name).told_today_by is None
    if spec.today is not None and untold:
        raise ConfigError(f"harness.today={spec.today}: {spec.name} cannot be told a date; leave it out")


def check_plugin(key: str, found: registry.Registry[Any], spec: PluginSpec) -> None:
    """Raises `ConfigError` where there is no such plug-in, or where it does not take these options."""
    try:
        found.options(spec)
    except registry.UnknownNameError as error:
        raise ConfigError(f"{key}.name: {error}") from error
    except ValidationError as error:
        accepted = getattr(found.get(spec.name), "Options", registry.Options)
        raise ConfigError(explain(error, accepted, key, also=type(spec).model_fields)) from error


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "", also: Iterable[str] = ()) -> str:
    """Every problem on a line of its own: the key, the value, what is allowed. `also`: keys beside the model's own."""
    lines = []
    for problem in error.errors():
        place = [str(part) for part in problem["loc"] if not _TYPE.fullmatch(str(part))]
        key = ".".join([prefix, *place] if prefix else place) or "the whole"
        if problem["type"] == "extra_forbidden":
            known = _known_keys(model, problem["loc"][:-1])
            known = sorted({*known, *also}) if len(problem["loc"]) == 1 else known
            lines.append(f"{key}={_short(problem['input'])}: unknown key; known here: {', '.join(known)}")
        elif problem["type"] == "missing":
            lines.append(f"{key}: is required")
        else:
            lines.append(f"{key}={_short(problem['input'])}: {problem['msg']}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def _known_keys(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    for part in location:
        annotation = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return sorted(model.model_fields)


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
        if value.get("name") in groups.get(key, ()):
            chosen.append(f"{key}={value['name']}")
        nested[key] = dict(value)
    return chosen, nested
