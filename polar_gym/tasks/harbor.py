"""Reads task directories of Harbor, the format of Terminal-Bench 2.

A directory holds `task.toml`, `instruction.md`, `environment/Dockerfile`, `tests/test.sh` and `solution/solve.sh`. The
fields, their defaults and their meaning are those of Harbor 0.25 (`harbor.models.task`). A field that has another
meaning here, or none, is an error of that task alone: one line that names directory, field, value and the way out.
"""

from __future__ import annotations

import logging
import posixpath
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from polar_gym.errors import said
from polar_gym.runtimes.image_names import DOCKERFILE
from polar_gym.schema import InsidePath
from polar_gym.tasks import Task
from polar_gym.tasks.rows import FileSelection, PlacedRow, Selection, select, to_task

log = logging.getLogger(__name__)

_CANARY = re.compile(r"\A(?:(?:[ \t]*(?:<!--.*canary.*-->|#.*canary.*)[ \t]*\n)+\s*)", re.IGNORECASE)
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_INSTRUCTION = re.compile(r"\s*(FROM|WORKDIR|USER)\s+(.+?)\s*", re.IGNORECASE)
_CONTINUED = re.compile(r"\\[ \t]*$")
_WORD = re.compile(r"""(?:\\.|"(?:\\.|[^"\\])*"|'[^']*'|[^\s"'\\])+""")
_HEREDOC = re.compile(r"""\d*<<(-?)(["']?)([^\s"'<]+)\2""")
"""Matches a word of an instruction that a heredoc follows: an optional `-`, and the line that ends the heredoc."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::-(.*))?\}", re.DOTALL)
_MEBIBYTES = {"K": 1 / 1024, "M": 1, "G": 1024}


def _mebibytes(value: Any) -> Any:
    """Return a size such as `4G`, as older tasks say it, in MiB."""
    if not isinstance(value, str):
        return value
    number, unit = value.strip()[:-1], value.strip()[-1:].upper()
    if unit not in _MEBIBYTES:
        raise ValueError("expected a size such as 512M or 4G")
    return int(float(number) * _MEBIBYTES[unit])


def _value(value: Any) -> Any:
    """Return the value of an environment variable, or the default in a template `${NAME:-default}`."""
    template = _VARIABLE.fullmatch(value) if isinstance(value, str) else None
    if template and template[2] is None:
        raise ValueError(f"would copy ${template[1]} of this machine into records; write the value, or a default")
    return template[2] if template else value


Size = Annotated[int, BeforeValidator(_mebibytes), Field(gt=0)]
Variables = dict[str, Annotated[str, BeforeValidator(_value)]]
Nothing = Annotated[list[Any], Field(max_length=0)]
Root = Literal["root", "0", 0] | None
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Network = Literal["public", "no-network", "allowlist"]
PHASES = ("agent", "verifier")
"""The tables of task.toml that have a network mode."""


class _Section(BaseModel):
    """A table of task.toml. An unknown key is an error: what it means is not known."""

    model_config = ConfigDict(extra="forbid")


class _Solution(_Section):
    env: Variables = {}


class _Phase(_Section):
    user: Root = None
    network_mode: Network | None = None
    allowed_hosts: list[str] | None = None


class _Agent(_Phase):
    timeout_sec: Seconds | None = None


class _Verifier(_Phase):
    timeout_sec: Seconds = 600.0
    env: Variables = {}
    environment_mode: Literal["shared"] | None = None
    environment: None = None
    collect: Nothing = []


class _Environment(_Section):
    docker_image: str | None = None
    build_timeout_sec: Seconds = 600.0
    workdir: InsidePath | None = None
    env: Variables = {}
    cpus: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    memory_mb: Size | None = None
    memory: Size | None = None
    storage_mb: Size | None = None
    storage: Size | None = None
    os: Literal["linux", "Linux", "LINUX"] = "linux"
    network_mode: Network = "public"
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None
    gpus: Literal[0] | None = None
    gpu_types: list[str] | None = None
    tpu: None = None
    mcp_servers: Nothing = []
    skills_dir: None = None
    healthcheck: None = None


class _Toml(_Section):
    """task.toml. What only describes a task, or is collected after its grading, is accepted and not used."""

    schema_version: Any = None
    version: Any = None
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    source: str | None = None
    artifacts: list[Any] = []
    multi_step_reward_strategy: Any = None
    agent: _Agent = Field(default_factory=_Agent)
    verifier: _Verifier = Field(default_factory=_Verifier)
    environment: _Environment = Field(default_factory=_Environment)
    solution: _Solution = Field(default_factory=_Solution)
    steps: Nothing = []


class HarborOptions(Selection):
    path: Path
    """A task directory, or a directory of them."""
    build: bool = False
    """Build `environment/Dockerfile` also where task.toml names a `docker_image`."""
    skip_bad: bool = False
    """Leave out tasks that cannot be read, with a warning for each; false: they are an error."""
    timeout_multiplier: float = Field(default=1.0, gt=0)
    """Multiplies the timeouts of the agent, the verifier and the build."""


class HarborTasks:
    Options = HarborOptions

    def __init__(self, options: HarborOptions) -> None:
        self._options = options

    def load(self) -> list[Task]:
        rows, problems = read_directories(self._options)
        if problems and not self._options.skip_bad:
            told = "\n".join(problems)
            raise ValueError(
                f"{len(problems)} task directories cannot be used; tasks.skip_bad=true leaves them out\n{told}"
            )
        for problem in problems:
            log.warning("left out: %s", problem)
        return self.chosen(rows)

    def chosen(self, rows: Iterable[PlacedRow]) -> list[Task]:
        """Return the selected tasks among rows of `read_directories`. Raises `ValueError`."""
        tasks = select(str(self._options.path), rows, self._options.path, self._options)
        networked = [task for task in tasks if task.container and len(task.container.offline) < len(PHASES)]
        if networked:
            log.warning(
                "%d tasks may use the internet in Harbor, e.g. %s; here harness and verifier reach no network, "
                "unless runtime.network=full",
                len(networked),
                networked[0].instance_id,
            )
        return tasks


def read_directories(options: HarborOptions) -> tuple[list[PlacedRow], list[str]]:
    """Return the rows of the task directories that can be read, and a line about each of the others."""
    rows: list[PlacedRow] = []
    problems: list[str] = []
    for directory in _directories(options.path):
        try:
            row = _row(directory, options)
            to_task(str(directory), row, options.path, FileSelection())
            rows.append((str(directory), row))
        except (OSError, ValueError) as error:
            problems.append(f"{directory}: {str(error).removeprefix(f'{directory}: ')}")
    return rows, problems


def _directories(path: Path) -> list[Path]:
    """Return the task directories: the directory itself, or those in it. Raises `ValueError`."""
    path = path.resolve()
    if not path.is_dir():
        raise ValueError(f"tasks.path={str(path)!r} is not a directory")
    marks = ("task.toml", "instruction.md")
    inside = [path] if (path / "task.toml").exists() else sorted(each for each in path.iterdir() if each.is_dir())
    found = [each for each in inside if any((each / mark).exists() for mark in marks)]
    if not found:
        raise ValueError(f"tasks.path={str(path)!r} holds no task directory, which has task.toml and instruction.md")
    return found


def _row(directory: Path, options: HarborOptions) -> dict[str, Any]:
    """Return the row of a task directory. Raises `ValueError` that names the field, its value and the way out."""
    toml = _read_toml(directory / "task.toml")
    environment, agent, verifier, factor = toml.environment, toml.agent, toml.verifier, options.timeout_multiplier
    for name in ("instruction.md", "tests/test.sh"):
        if not (directory / name).is_file():
            raise ValueError(f"{name} is missing; a task needs it")
    dockerfile = directory / "environment" / "Dockerfile"
    for name in _COMPOSE:
        if (dockerfile.parent / name).exists():
            raise ValueError(f"environment/{name}: several containers are not supported; leave the task out")
    built = environment.docker_image is None or options.build
    if built and not dockerfile.is_file():
        raise ValueError("environment/Dockerfile is missing; write one, or set environment.docker_image")
    instructions = dockerfile.read_text() if dockerfile.is_file() else ""
    build_seconds = {"build_seconds": environment.build_timeout_sec * factor} if built else {}
    limits = {
        "cpus": environment.cpus,
        "memory_mb": environment.memory_mb or environment.memory,
        "disk_mb": environment.storage_mb or environment.storage,
    }
    solution = directory / "solution"
    return {
        "instance_id": str(toml.task.get("name") or directory.name),
        "problem_statement": _CANARY.sub("", (directory / "instruction.md").read_text()),
        "image": f"{DOCKERFILE}{dockerfile.parent}" if built else environment.docker_image,
        "workspace_path": environment.workdir or _workdir(instructions),
        "container": {
            "tests": str(directory / "tests"),
            "solution": str(solution) if (solution / "solve.sh").is_file() else None,
            "environment": environment.env,
            "verifier_environment": verifier.env,
            "solution_environment": toml.solution.env,
            "agent_seconds": agent.timeout_sec and agent.timeout_sec * factor,
            "verifier_seconds": verifier.timeout_sec * factor,
            "limits": build_seconds | {name: value for name, value in limits.items() if value is not None},
            "offline": _offline(toml),
        },
    }


def _read_toml(path: Path) -> _Toml:
    try:
        return _Toml.model_validate(tomllib.loads(path.read_text()))
    except FileNotFoundError:
        raise ValueError("task.toml is missing; a task needs it") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"task.toml is not TOML: {error}") from error
    except ValidationError as error:
        raise ValueError("; ".join(map(_problem, error.errors()))) from error


def _problem(problem: Any) -> str:
    value = repr(problem["input"])
    place = ".".join(str(part) for part in problem["loc"] if isinstance(part, str) and part not in ("constrained-str",))
    wrong = {
        "extra_forbidden": "this key is not supported; remove it, or leave the task out",
        "none_required": "is not supported; leave the task out",
        "too_long": "is not supported; leave the task out",
        "literal_error": f"is not supported, only {problem.get('ctx', {}).get('expected', '')}; leave the task out",
    }
    told = wrong.get(problem["type"]) or f"{said(problem)}; correct it"
    return f"task.toml: {place}={value if len(value) <= 80 else f'{value[:77]}...'}: {told}"


def _offline(toml: _Toml) -> list[str]:
    """Return the phases whose network mode is not `public`. `allow_internet` is the older word of the environment."""
    older = toml.environment.allow_internet is False and "network_mode" not in toml.environment.model_fields_set
    base = "no-network" if older else toml.environment.network_mode
    return [name for name in PHASES if (getattr(toml, name).network_mode or base) != "public"]


def _instructions(dockerfile: str) -> Iterator[str]:
    """Yield each instruction of a Dockerfile as one line, without comments and heredocs."""
    lines, whole = dockerfile.splitlines(), ""
    while lines:
        line = lines.pop(0)
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        whole += _CONTINUED.sub("", line)
        if _CONTINUED.search(line):
            continue
        yield whole
        for heredoc in filter(None, map(_HEREDOC.fullmatch, _WORD.findall(whole))):
            inside = [each.lstrip("\t") if heredoc[1] else each for each in lines]
            if heredoc[3] in inside:
                del lines[: inside.index(heredoc[3]) + 1]
        whole = ""
    yield whole


def _workdir(dockerfile: str) -> str:
    """Return the working directory that a Dockerfile's last stage sets, or has from a stage before. Raises
    `ValueError` where it has none."""
    stages: dict[str, tuple[str, str]] = {}
    stage, workdir, user = "", "", "root"
    for name, value in (found.groups() for found in map(_INSTRUCTION.fullmatch, _instructions(dockerfile)) if found):
        if name.upper() == "FROM":
            stages[stage] = workdir, user
            image, *rest = [word.lower() for word in value.split() if not word.startswith("--")] or [""]
            workdir, user = stages.get(image, ("", "root"))
            stage = rest[1] if len(rest) > 1 else ""
        elif name.upper() == "USER":
            user = value
        else:
            workdir = posixpath.join(workdir, value.strip("\"'"))
    if user.split(":")[0] not in ("root", "0"):
        raise ValueError(f"environment/Dockerfile: USER {user} is not supported, only root; leave the task out")
    if not workdir.startswith("/") or "$" in workdir:
        raise ValueError(
            f"environment/Dockerfile: WORKDIR={workdir!r} is not an absolute path; set environment.workdir in task.toml"
        )
    return workdir


TASKS = HarborTasks
