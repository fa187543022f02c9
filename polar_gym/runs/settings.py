"""The settings with which a run began: a run that goes on has the same, or its file would mix two runs.

They are in `settings.json` of the run's state directory. Settings that change nothing sampled may change (`FREE`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polar_gym import durable
from polar_gym.config.run_config import RunConfig
from polar_gym.errors import ConfigError, in_one_line, shortened
from polar_gym.gateway.node.state import StateDirectory
from polar_gym.record import Record

_OF_ENGINE = {
    *("url", "api_key", "patience_seconds", "session_header", "data_parallel_size"),
    *("delay_seconds", "slots"),
}
FREE: dict[str, Any] = {
    "rollout": {"num_samples", "output", "state", "metrics", "spans"},
    "tasks": {"limit", "instance_ids"},
    "pools": True,
    "engine": _OF_ENGINE,
    "proxy": {"frozen": {"engine": _OF_ENGINE - {"url"}}},
    "scoring": {"share", "longest", "reference"},
    "evaluator": {"url"},
}
"""Which samples are run, where, how many at once, and which figures are logged. `scoring` says which calls are checked,
not which logprobs pass. A file of settings holds no API key."""


class Began(Record):
    """How a run began."""

    model: str
    """The name of the model that the engine served: `engine.model` may be null, and `engine.url` may change."""
    settings: dict[str, Any]
    """The config without the keys that are `FREE`."""

    def config(self) -> RunConfig:
        return RunConfig.model_validate(self.settings)


def going_on(config: RunConfig, state: StateDirectory) -> RunConfig:
    """Return the config of a run that goes on: harnesses are told the day on which the run began. Raises `ConfigError`
    naming each setting with which the run did not begin."""
    if (began := _read(state)) is None:
        return config
    first = began.config()
    config = config.on(first.harness.today)
    others = "".join(
        f"\n  {key}={shortened(now)}: the run began with {shortened(before)}"
        for key, before, now in _differences(_settings(first), _settings(config))
    )
    if others:
        raise ConfigError(_refused(config, f"give the settings of the first run again{_OR}:{others}"))
    return config


def begin(config: RunConfig, state: StateDirectory, model: str) -> None:
    """Write down how a run begins; from now on, `--resume` means this run. Raises `ConfigError` where the run has begun
    with another model. `model`: the engine's."""
    if (began := _read(state)) is None:
        durable.make_directory(state.root, mode=0o700)
        durable.write(_file(state), Began(model=model, settings=_settings(config)).to_json(), mode=0o600)
    elif began.model != model:
        problem = f"the engine serves the model {model!r}, and the run began with {began.model!r}; serve that one again"
        raise ConfigError(_refused(config, f"{problem}{_OR}"))


_OR = ", or set rollout.output to another file for a run of its own"


def _refused(config: RunConfig, why: str) -> str:
    return f"--resume={str(config.rollout.output)!r}: {why}"


def _file(state: StateDirectory) -> Path:
    return state.root / "settings.json"


def _read(state: StateDirectory) -> Began | None:
    """Return how the run began; None: it has not begun, or it began with an earlier version, which did not say."""
    if not (file := _file(state)).exists():
        return None
    try:
        began = Began.from_json(file.read_bytes())
        began.config()
    except ValidationError as error:
        raise ConfigError(f"{file}: not settings of this version: {in_one_line(error)}{_OR}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}; restore the file{_OR}") from error
    return began


def _settings(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude=FREE)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the key and both values of each setting that differs. Of another plug-in, only the name is told."""
    if before.get("name") != now.get("name"):
        yield key, before.get("name"), now.get("name")
        return
    for name in {**before, **now}:
        inner, one, other = f"{key}.{name}".lstrip("."), before.get(name), now.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, inner)
        elif one != other:
            yield inner, one, other
