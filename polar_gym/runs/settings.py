"""The settings with which a run began: a run that goes on has the same, or its file would mix two runs.

They are in `settings.json` of the run's state directory. Settings that change nothing sampled may change (`FREE`). The
content of the tasks is in no settings, so the requests of the episodes in the file are compared, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polar_gym import durable
from polar_gym.config.run_config import RunConfig
from polar_gym.errors import SHOWN, ConfigError, in_one_line, shortened
from polar_gym.gateway.node.state import StateDirectory
from polar_gym.harnesses import HARNESSES
from polar_gym.record import Record
from polar_gym.runtimes.image_names import DOCKERFILE
from polar_gym.schema import EngineInfo, Episode, TaskRequest

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

_REQUESTED = {
    **{name: name for name in ("instruction", "runtime", "evaluator", "builder", "sampling", "budget")},
    **{"agent": "harness", "timeout_seconds": "rollout.timeout_seconds"},
}
"""The fields of a request that are compared -> their keys in a config."""
_OF_NO_TASK = ("harness", "builder", "sampling", "budget")
"""The keys that no task changes."""
_FILES = ("source", "image", "tests")
"""Names of keys whose values may be paths of the tasks' files, which may be moved: only the last part is compared."""


class Began(Record):
    """How a run began."""

    model: str
    """The name of the model that the engine served: `engine.model` may be null, and `engine.url` may change."""
    logprobs_mode: str | None = None
    """Whether the engine's logprobs were raw or processed; None: not known, and in files of earlier versions."""
    harness_version: str | None = None
    """None in files of earlier versions."""
    settings: dict[str, Any]
    """The config without the keys that are `FREE`."""

    def config(self) -> RunConfig:
        return RunConfig.model_validate(self.settings)


def going_on(config: RunConfig, state: StateDirectory, before: Sequence[Episode] = ()) -> RunConfig:
    """Return the config of a run that goes on: harnesses are told the day on which the run began. Raises `ConfigError`
    naming each setting with which the run did not begin, and another version of the harness. `before`: the episodes in
    the file."""
    beginnings = list(_beginnings(state, before))
    if before and not beginnings:
        config = config.on(before[0].request.agent.today)
    for began in beginnings:
        first = began.config()
        config = config.on(first.harness.today)
        others = "".join(
            f"\n  {key}={shortened(now)}: the run began with {shortened(before)}"
            for key, before, now in _differences(_settings(first), _settings(config))
        )
        if others:
            raise ConfigError(_refused(config, f"give the settings of the first run again{_OR}:{others}"))
        name, version = config.harness.name, HARNESSES.get(config.harness.name).pinned
        if began.harness_version not in (None, version):
            problem = f"{name} has the version {version!r}, and the run began with {began.harness_version!r}"
            raise ConfigError(_refused(config, f"{problem}; go on with a polar-gym that has that one{_OR}"))
    return config


def check_episodes(config: RunConfig, requests: Sequence[TaskRequest], before: Sequence[Episode]) -> None:
    """Raise `ConfigError` naming the first difference between an episode in the file and the request of its task now:
    samples of one task must have one prompt and one grading. `requests`: those of all tasks of the config."""
    asked = {request.task_id: _requested(request) for request in requests}
    common = {key: value for key, value in _requested(requests[0]).items() if key in _OF_NO_TASK}
    for episode in before:
        task_id, first = episode.request.task_id, _requested(episode.request)
        for key, one, other in _differences(first, asked.get(task_id, {**first, **common})):
            if not _moved(key, one, other):
                was, now = _apart(one, other)
                problem = f"{key}={now}: sample {episode.session.sample_index} of task {task_id!r} has {was}"
                fix = "give the tasks and the settings of the first run again"
                raise ConfigError(_refused(config, f"{problem}; {fix}{_OR}"))


def check_no_branches(config: RunConfig, begun: Iterable[TaskRequest]) -> None:
    """Raise `ConfigError` where requests that were begun are those of branches: a rollout would be added to them."""
    if any(request.start_from is not None and not request.start_from.owned for request in begun):
        raise ConfigError(_refused(config, f"it has branches, which `polar-gym branch` makes from the start{_OR}"))


def begin(config: RunConfig, state: StateDirectory, engine: EngineInfo, before: Sequence[Episode] = ()) -> None:
    """Write down how a run begins; from now on, `--resume` means this run. Raises `ConfigError` where the run has begun
    with another model, or with another kind of logprobs. `before`: the episodes of a run that goes on."""
    began, model, mode = _read(state.root), engine.model, engine.logprobs_mode
    earlier = [*([began] if began else []), *(episode.engine for episode in before)]
    if (first := next((each.model for each in earlier if each.model != model), None)) is not None:
        problem = f"the engine serves the model {model!r}, and the run began with {first!r}; serve that one again"
        raise ConfigError(_refused(config, f"{problem}{_OR}"))
    modes = {each.logprobs_mode for each in earlier} - {None, mode}
    if modes and mode is not None:
        problem = f"the engine gives {mode} logprobs, and the run began with {modes.pop()} ones; start vLLM as before"
        raise ConfigError(_refused(config, f"{problem}{_OR}"))
    if began is None:
        durable.make_directory(state.root, mode=0o700)
        version = HARNESSES.get(config.harness.name).pinned
        own = Began(model=model, logprobs_mode=mode, harness_version=version, settings=_settings(config))
        durable.write(_file(state.root), own.to_json(), mode=0o600)


_OR = ", or set rollout.output to another file for a run of its own"


def _refused(config: RunConfig, why: str) -> str:
    return f"--resume={str(config.rollout.output)!r}: {why}"


def _beginnings(state: StateDirectory, before: Sequence[Episode]) -> Iterator[Began]:
    """Yield how the run began, as its directory says, and the directories that hold the journals of its episodes: the
    run may have had another `rollout.state`, or its file may have been set aside."""
    journals = [episode.artifacts.journal for episode in before]
    held = (Path(journal).parent.parent.parent for journal in journals if journal and os.access(journal, os.R_OK))
    for root in dict.fromkeys([state.root, *held]):
        if (began := _read(root)) is not None:
            yield began


def _file(root: Path) -> Path:
    return root / "settings.json"


def _read(root: Path) -> Began | None:
    """Return how the run of a state directory began; None: it has not begun, or it began with an earlier version, which
    did not say."""
    if not (file := _file(root)).exists():
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


def _requested(request: TaskRequest) -> dict[str, Any]:
    """Return the fields of a request that are compared, by their keys in a config."""
    fields = request.model_dump(mode="json", include={*_REQUESTED}, exclude={"evaluator": FREE["evaluator"]})
    return {_REQUESTED[name]: value for name, value in fields.items()}


def _moved(key: str, one: Any, other: Any) -> bool:
    """Return whether two values name a file of the same name in two directories of the machine."""
    first, now = (Path(str(value).removeprefix(DOCKERFILE)) for value in (one, other))
    return key.rpartition(".")[2] in _FILES and first.is_absolute() and now.is_absolute() and first.name == now.name


def _apart(one: Any, other: Any) -> tuple[str, str]:
    """Return two values for an error; long texts from a few characters before the first that differs."""
    if isinstance(one, str) and isinstance(other, str) and max(len(one), len(other)) > SHOWN:
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
        one, other = (f"...{text[same - 20 :]}" if same > 20 else text for text in (one, other))
    return shortened(one), shortened(other)


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
