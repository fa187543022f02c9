"""Makes the request for a task: its instruction, its workspace and its grading."""

from __future__ import annotations

import base64
import gzip
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polar_gym.errors import ConfigError
from polar_gym.runtimes import RUNTIMES, check_offered
from polar_gym.runtimes.files import pack
from polar_gym.schema import EvaluatorSpec, RuntimeSpec, TaskRequest
from polar_gym.tasks import Container, Task

PREAMBLE = """\
The current directory is a git repository. Resolve the issue below by changing its source files. Hidden tests will \
check the behaviour that the issue asks for, and that nothing else broke. Nobody answers questions: decide for \
yourself, and stop when you are done.

<issue>
{issue}
</issue>
"""
"""The instruction of every task of a repository."""


class UngradableError(ValueError):
    """A task that the evaluator cannot grade. The message names the row, the missing fields and the way to get them."""


def with_task(request: TaskRequest, task: Task) -> TaskRequest:
    """Return the request with the image, packages and tests that `task` brings.

    Options that the evaluator already has win over the task's options. Raises `UngradableError`, and `ConfigError`
    where a component of a `composite` names no evaluator.
    """
    runtime = _with_container(request.runtime, task)
    workspace = runtime.workspace.model_copy(
        update={
            "source": task.workspace or runtime.workspace.source,
            "path": task.workspace_path or runtime.workspace.path,
            "base_patch": task.base_patch or runtime.workspace.base_patch,
            "hidden_files": [*runtime.workspace.hidden_files, *task.hidden_files],
            "python_requirements": [*runtime.workspace.python_requirements, *task.python_requirements],
        }
    )
    seconds = {"timeout_seconds": task.container.verifier_seconds} if task.container else {}
    evaluator = {**_with_tests("evaluator", request.evaluator.model_dump(), task), **seconds}
    return request.model_copy(
        update={
            "runtime": runtime.model_copy(update={"image": task.image or runtime.image, "workspace": workspace}),
            "timeout_seconds": (task.container and task.container.agent_seconds) or request.timeout_seconds,
            "evaluator": EvaluatorSpec.model_validate(evaluator),
            "metadata": {"repo": task.repo, "base_commit": task.base_commit, "instance_id": task.instance_id},
        }
    )


def instruction(task: Task) -> str:
    """Return the instruction for the harness. The task's id is not in it: a model could know the solution by the id."""
    if task.gym_row or task.container is not None:
        return task.problem_statement
    return PREAMBLE.format(issue=task.problem_statement.strip())


def reference_scripts(tasks: Sequence[Task], ends_by: str = "") -> list[dict[str, Any]]:
    """Return the `reference_script` of each task; issues that begin with the same line are told apart by all of it."""
    scripts = [reference_script(task, ends_by) for task in tasks]
    titles = Counter(script["match"] for script in scripts)
    return [
        script if titles[script["match"]] == 1 else script | {"match": task.problem_statement.strip()}
        for task, script in zip(tasks, scripts, strict=True)
    ]


def reference_script(task: Task, ends_by: str = "") -> dict[str, Any]:
    """Return a demonstration of the reference solution for the embedded engine's scripted policy.

    `match` is the issue's first line, which occurs verbatim in the instruction. `ends_by`: that of the harness.
    """
    title = task.problem_statement.strip().splitlines()[0].rstrip()
    if task.container is not None:
        commands = [*_solution_commands(task.container), *([ends_by] if ends_by else [])]
        return {"match": title, "commands": commands, "final_message": f"Solved: {title}"}
    patch = shlex.quote(task.patch.removesuffix("\n"))
    # Without names that git would quote.
    old_files = map(shlex.quote, re.findall(r'^--- a/([^\s"]+)$', task.patch, re.MULTILINE))
    return {
        "match": title,
        "commands": [
            "git log --oneline && git status --short && ls -a",
            *(f"cat -- {path}" for path in old_files),
            # Quoted, not a here-document: Gemini CLI refuses a command with a backtick outside of single quotes.
            f"printf '%s\\n' {patch} | git apply --whitespace=nowarn",
            *([task.test_command] if task.test_command else []),
            *([ends_by] if ends_by else []),
        ],
        "final_message": f"Resolved: {title}",
    }


def _solution_commands(container: Container) -> list[str]:
    """Return commands that put the reference solution at its place and run it; one that looks around without one."""
    if container.solution is None:
        return ["ls -a"]
    archive = base64.b64encode(gzip.compress(pack(Path(container.solution)), mtime=0)).decode()
    variables = " ".join(shlex.quote(f"{name}={value}") for name, value in container.solution_environment.items())
    return [
        f"mkdir -p /solution && echo {archive} | base64 -d | tar -xz -C /solution",
        f"chmod +x /solution/solve.sh && env {variables} /solution/solve.sh",
    ]


def _with_tests(key: str, evaluator: Any, task: Task) -> dict[str, Any]:
    """Return an evaluator's spec with the task's tests added to each `swe` and `harbor`, and its test command to each
    `test_on_output` without a command, also inside of a `composite`. `key`: where in the config the spec is."""
    if not (isinstance(evaluator, dict) and isinstance(evaluator.get("name"), str)):
        raise ConfigError(f"{key}={evaluator!r}: expected an evaluator's name and its options, e.g. {{name: swe}}")
    if evaluator["name"] in (("harbor",) if task.container is None else ("swe", "test_on_output")):
        raise UngradableError(
            f"{task.place or task.instance_id}: evaluator={evaluator['name']} cannot grade this task; set "
            f"evaluator={'swe' if task.container is None else 'harbor'}"
        )
    if evaluator["name"] == "harbor" and task.container is not None:
        options = {"tests": task.container.tests, "environment": task.container.verifier_environment}
        return {**options, **evaluator, "timeout_seconds": task.container.verifier_seconds}
    if evaluator["name"] == "swe":
        options = {**swe_options(task), **evaluator}
        if not (options.get("test_command") or options.get("eval_script")):
            raise UngradableError(
                f"{task.place or task.instance_id}: test_command, eval_script: {task.instance_id!r} has neither, so it "
                "does not say how its tests run; rows of SWE-bench, SWE-Gym and SWE-smith get it from: "
                "polar-gym tasks prepare FILE --out FILE"
            )
        return options
    if evaluator["name"] == "test_on_output" and task.test_command:
        return {"command": task.test_command, **evaluator}
    if evaluator["name"] == "nemo_gym":
        if not task.gym_row:
            raise UngradableError(
                f"{task.place or task.instance_id}: responses_create_params: is missing; nemo_gym grades rows in NeMo "
                "Gym's form"
            )
        return {"row": task.gym_row, **evaluator}
    if evaluator["name"] == "composite" and isinstance(evaluator.get("components"), dict):
        components = {
            name: _with_tests(f"{key}.components.{name}", part, task) for name, part in evaluator["components"].items()
        }
        return {**evaluator, "components": components}
    return evaluator


def _with_container(runtime: RuntimeSpec, task: Task) -> RuntimeSpec:
    """Return the runtime with what a task whose container is the harness's asks for; time to build its image too."""
    if task.container is None:
        return runtime
    limits = task.container.limits
    asked = RuntimeSpec.model_validate(
        {
            **limits,
            **runtime.model_dump(),
            "scope": "container",
            "network": _network(runtime, task.container, task.place or task.instance_id),
            "environment": {**task.container.environment, **runtime.environment},
            "init_timeout_seconds": runtime.init_timeout_seconds + limits.get("build_seconds", 0.0),
        }
    )
    try:
        check_offered(asked, RUNTIMES.get(asked.name))
    except ConfigError as error:
        raise UngradableError(f"{task.place or task.instance_id}: {error}") from error
    return asked


def _network(runtime: RuntimeSpec, container: Container, place: str) -> str:
    """Return the network of the run, or `gateway` for a task that may not reach the network. Raises `UngradableError`
    where the harness may not and the verifier may: both have the same one."""
    if runtime.network != "full" or "agent" not in container.offline:
        return runtime.network
    if "verifier" not in container.offline:
        raise UngradableError(
            f"{place}: runtime.network=full: the task keeps its agent from the network that its verifier may use, and "
            "this opens it to both; leave the task out, or the setting"
        )
    return "gateway"


def swe_options(task: Task) -> dict[str, Any]:
    """Return the task's fields about grading, unchanged, as options of `swe`."""
    names = {
        "test_patch",
        "FAIL_TO_PASS",
        "PASS_TO_PASS",
        "test_command",
        "eval_script",
        "log_parser",
        "eval_type",
        "twins",
    }
    if task.log_parser.startswith("parse_log_"):  # some of swebench's parsers differ by repository and version
        names |= {"repo", "version"}
    return {"log_parser": task.log_parser, **task.model_dump(include=names, exclude_defaults=True)}
