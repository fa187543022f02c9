"""Turns the keyword arguments of `gym.make` into config, tasks and requests. All wrong arguments are found here."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from polar_gym.config.checking import check_plugin
from polar_gym.config.loading import load_config
from polar_gym.config.run_config import RunConfig
from polar_gym.errors import ConfigError, explain, validated
from polar_gym.evaluators import EVALUATORS
from polar_gym.gateway.node.assemble import load_tasks, make_request, plays_tasks
from polar_gym.record import digest
from polar_gym.schema import TaskRequest, Workspace
from polar_gym.tasks import Task
from polar_gym.workspaces.repository import WorkspaceError, not_at_head


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that an environment runs."""

    config: RunConfig
    tasks: list[Task]
    """The tasks that the requests were made from; empty for a request without a task."""
    requests: dict[str, TaskRequest]
    """The requests by task id, in order: a seed chooses among them."""


def swe_setup(harness: str | Mapping[str, Any] | None = None, *, recipe: str | None = None, **settings: Any) -> Setup:
    """Return the tasks of a config. Raises `ConfigError` before anything starts.

    `harness`: None is the recipe's, or without a recipe `pi`. `settings` are the groups and sections of
    `polar_gym.config.run_config.RunConfig`: `runtime="docker"`, `rollout={...}`, ...
    """
    config = _load_config(recipe, _with_harness(harness, settings))
    tasks = load_tasks(config)
    return Setup(config, tasks, {task.instance_id: make_request(config, task) for task in tasks})


def task_setup(
    instruction: str = "",
    *,
    workspace: str | Path | Mapping[str, Any] | None = None,
    evaluator: str | Mapping[str, Any] = "session_completion",
    harness: str | Mapping[str, Any] | None = None,
    task_id: str | None = None,
    recipe: str | None = None,
    **settings: Any,
) -> Setup:
    """Return one task. Raises `ConfigError` before anything starts.

    `instruction` is what the harness is told. `workspace` is the directory that the harness works on a copy of (None:
    an empty one), or the fields of `polar_gym.schema.Workspace`. `evaluator` says what the result is worth, e.g.
    `{"name": "test_on_output", "command": "python3 -m unittest"}`. `harness` and `settings` are those of `swe_setup`.
    `task_id` (None: made of instruction, image, workspace and evaluator) and instruction name the samples of one task.
    """
    if not instruction.strip():
        raise ConfigError(f"instruction={instruction!r}: is required: tell the harness its task")
    if "tasks" in settings:
        raise ConfigError(f"tasks={settings['tasks']!r}: has no effect here: the instruction is the task; drop it")
    config = _load_config(recipe, _with_harness(harness, {"evaluator": evaluator, **settings}))
    if plays_tasks(config.engine):
        raise ConfigError(
            "engine.scripts=None: the scripted policy has no demonstration of a task of yours; give one, e.g. "
            'engine={"name": "embedded", "scripts": [{"commands": ["ls"]}]}, or another engine'
        )
    check_plugin("evaluator", EVALUATORS, config.evaluator)  # no row completes its options
    try:
        request = config.request("task" if task_id is None else task_id, instruction)
    except ValidationError as error:
        raise ConfigError(explain(error, TaskRequest)) from error
    if workspace is not None:
        chosen = _workspace(workspace, request.runtime.workspace)
        request.runtime = request.runtime.model_copy(update={"workspace": chosen})
    if task_id is None:  # tasks of several environments are told apart
        told = (request.runtime.workspace, request.evaluator)
        request.task_id = (
            f"task-{digest(instruction, request.runtime.image, *(each.model_dump(mode='json') for each in told))}"
        )
    return Setup(config, [], {request.task_id: request})


_PLACES = "an environment runs one session in each place; set num_envs of gym.make_vec"
_OF_RUNS = {
    "rollout.num_samples": _PLACES,
    "rollout.output": "an environment writes no file; write the episodes of infos['trajectory']",
    "rollout.metrics": "an environment logs no figures; log those of infos['trajectory']",
    "pools.run": _PLACES,
    "pools.ready": _PLACES,
    "pools.prewarm": "a session is graded in a sandbox that comes up at its end; drop the setting",
}
"""Settings that have no effect here, and what to do instead."""


def _load_config(recipe: str | None, settings: Mapping[str, Any]) -> RunConfig:
    """Return the config. Raises `ConfigError`, also for a setting that has no effect; a recipe may have it, which is
    for `polar-gym rollout`, too."""
    for name, fix in _OF_RUNS.items():  # before the config is checked, which asks for the client of `metrics`
        section, _, key = name.partition(".")
        given, unset = settings.get(section), RunConfig.model_fields[section].get_default(call_default_factory=True)
        values = dict(given) if isinstance(given, Mapping | BaseModel) else {}
        if key not in values:
            continue
        with contextlib.suppress(ValidationError):  # `load_config` says so
            value = getattr(type(unset).model_validate({key: values[key]}), key)
            if value != getattr(unset, key):
                raise ConfigError(f"{name}={value}: has no effect here: {fix}")
    return load_config(recipe, settings=settings)


def _with_harness(harness: str | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**({"harness": harness} if harness is not None else {}), **settings}


def _workspace(given: str | Path | Mapping[str, Any], configured: Workspace) -> Workspace:
    """Return the configured workspace with the fields that are given."""
    fields = dict(given) if isinstance(given, Mapping) else {"source": str(given)}
    workspace = validated(Workspace, {**configured.model_dump(), **fields}, "workspace")
    if workspace.source is None:
        return workspace
    source = Path(workspace.source).expanduser().resolve()
    if not source.is_dir():
        raise ConfigError(f"workspace={workspace.source!r}: there is no directory {source}")
    try:
        missing = not_at_head(source)
    except WorkspaceError as error:
        raise ConfigError(f"workspace={workspace.source!r}: {error}") from error
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ConfigError(
            f"workspace={workspace.source!r}: the harness works on the commit at HEAD, without {', '.join(missing[:5])}"
            f"{more}; commit the changes, or name a copy of the files without .git"
        )
    return workspace.model_copy(update={"source": str(source)})
