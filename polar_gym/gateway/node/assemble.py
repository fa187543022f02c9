"""Makes the parts of a run from its checked config: the tasks, their requests, the engine and one node.

The command line, the process of a node, `gym.make` and the NeMo Gym server share these functions.
"""

from __future__ import annotations

from pathlib import Path

from polar_gym.config.checking import check_plugin, check_tools
from polar_gym.config.run_config import RunConfig
from polar_gym.engines import ENGINES, Engine
from polar_gym.errors import ConfigError
from polar_gym.evaluators import EVALUATORS
from polar_gym.gateway.node.node import Node
from polar_gym.harnesses import HARNESSES
from polar_gym.paths import cache_dir
from polar_gym.schema import PluginSpec, TaskRequest
from polar_gym.tasks import TASK_SOURCES, Task, TaskSource
from polar_gym.tasks.request import UngradableError, instruction, reference_scripts, with_task


def load_tasks(config: RunConfig) -> list[Task]:
    """Return the tasks that the config names. Raises `ConfigError` when the source is broken or empty."""
    source: TaskSource = TASK_SOURCES.make(config.tasks)
    try:
        tasks = source.load()
    except (ValueError, OSError) as error:
        raise ConfigError(f"tasks: {error}") from error
    if not tasks:
        path = f", tasks.path={str(given)!r}" if (given := config.tasks.options.get("path")) is not None else ""
        raise ConfigError(
            f"tasks={config.tasks.name!r}{path}: no task is there, or tasks.limit and tasks.instance_ids leave none"
        )
    return tasks


def make_request(config: RunConfig, task: Task) -> TaskRequest:
    """Return the request of a task. Raises `ConfigError` for a task that the evaluator cannot grade."""
    try:
        request = with_task(config.request(task.instance_id, instruction(task)), task)
        options = check_plugin("evaluator", EVALUATORS, request.evaluator)
        check_tools(request.agent, request.evaluator, options)
    except UngradableError as error:
        raise ConfigError(f"tasks: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"task {task.instance_id}: {error}") from error
    return request


def plays_tasks(engine: PluginSpec) -> bool:
    """Return whether an engine has a scripted policy without scripts, which plays the tasks' reference solutions."""
    options = ENGINES.options(engine)
    return getattr(options, "policy", None) == "scripted" and getattr(options, "scripts", ()) is None


def make_engine(config: RunConfig, tasks: list[Task]) -> Engine:
    """Return the engine, not yet started. A scripted policy without scripts plays each task's reference solution."""
    spec = config.engine
    if plays_tasks(spec):
        ends_by = HARNESSES.get(config.harness.name).ends_by
        spec = PluginSpec(**{**spec.model_dump(), "scripts": reference_scripts(tasks, ends_by)})
    return ENGINES.make(spec)


def make_node(
    config: RunConfig,
    tasks: list[Task],
    *,
    name: str = "local",
    scratch: Path | None = None,
    output: Path | None = None,
) -> Node:
    """Return a node, not yet started. `output`: the file into which its episodes are written; None: no file."""
    source = {f"tasks.{key}": config.tasks.options.get(key) for key in ("path", "dataset") if tasks}
    files = {key: Path(each) for key, each in source.items() if isinstance(each, str) and Path(each).exists()}
    written = {"rollout.output": output, "rollout.state": config.rollout.state}
    return Node(
        make_engine(config, tasks),
        cache=cache_dir(),
        state=config.rollout.state,
        pools=config.pools,
        streaming=config.proxy.streaming,
        splice=config.proxy.splice == "auto",
        keep_reasoning=config.proxy.keep_reasoning,
        scoring=config.scoring,
        frozen=config.proxy.frozen,
        spans=config.rollout.spans,
        scratch=scratch,
        name=name,
        unseen={**files, **{key: path for key, path in written.items() if path is not None}},
    )
