"""Task directories of Harbor: every field, and what is refused, in one line that names directory, field and value."""

from __future__ import annotations

import logging
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from polar_gym.errors import ConfigError
from polar_gym.evaluators import EVALUATORS
from polar_gym.runtimes import RUNTIMES, check_offered
from polar_gym.schema import EvaluatorSpec, PluginSpec, RuntimeSpec
from polar_gym.tasks import TASK_SOURCES, Task
from polar_gym.tasks.request import UngradableError, instruction, reference_script
from tests.support.harbor_tasks import TASKS, write_task
from tests.support.task_files import request_for

DOCKER, HARBOR = RuntimeSpec(name="docker"), EvaluatorSpec(name="harbor")


def load(path: Path, **options: Any) -> list[Task]:
    return TASK_SOURCES.make(PluginSpec.model_validate({"name": "harbor", "path": path, **options})).load()


def problem(path: Path) -> str:
    """Return the line about the one task directory that cannot be used."""
    with pytest.raises(ValueError, match="skip_bad=true leaves") as caught:
        load(path)
    head, *lines = str(caught.value).splitlines()
    assert head.startswith("1 task directories")
    (line,) = lines
    return line


def test_every_field_reaches_the_request() -> None:
    greet = {task.instance_id: task for task in load(TASKS)}["polar/greet"]
    request = request_for(greet, runtime=DOCKER, evaluator=HARBOR)
    assert request.timeout_seconds == 60
    assert request.evaluator.timeout_seconds == 30
    assert request.evaluator.options == {"tests": str(TASKS / "greet/tests"), "environment": {"NAME": "Ada"}}
    assert request.runtime.image == f"dockerfile:{TASKS}/greet/environment"
    assert request.runtime.workspace.path == "/work"
    assert request.runtime.scope == "container"
    limits = {"cpus": 1, "memory_mb": 512, "disk_mb": 1024, "build_seconds": 120}
    assert request.runtime.options == limits
    assert request.runtime.init_timeout_seconds == DOCKER.init_timeout_seconds + 120
    RUNTIMES.options(request.runtime)


def test_the_instruction_is_as_it_stands_without_canaries() -> None:
    greet = {task.instance_id: task for task in load(TASKS)}["polar/greet"]
    assert instruction(greet).startswith("Install a program `greet`")
    assert "canary" not in instruction(greet)


def test_older_words_defaults_and_the_directory_s_name() -> None:
    (task,) = load(TASKS / "word-count")
    assert task.instance_id == "word-count"
    assert task.container is not None
    assert task.container.limits == {"memory_mb": 512, "disk_mb": 1024, "build_seconds": 600}
    assert (task.container.agent_seconds, task.container.verifier_seconds) == (None, 30)
    request = request_for(task, runtime=DOCKER, evaluator=HARBOR)
    assert request.timeout_seconds == 60, "the run's"


def test_the_directory_s_own_working_directory_and_variables() -> None:
    (task,) = load(TASKS / "weigh")
    request = request_for(task, runtime=DOCKER, evaluator=HARBOR)
    assert request.runtime.workspace.path == "/data"
    assert request.runtime.environment == {"UNIT": "kg"}
    assert task.container is not None
    assert task.container.solution_environment == {"TARE": "3"}


def test_options_of_the_run_win_over_limits_of_the_task() -> None:
    (task,) = load(TASKS / "greet")
    runtime = RuntimeSpec.model_validate({"name": "docker", "memory_mb": 64})
    assert request_for(task, runtime=runtime, evaluator=HARBOR).runtime.options["memory_mb"] == 64


def test_timeouts_can_be_multiplied() -> None:
    (task,) = load(TASKS / "greet", timeout_multiplier=2.0)
    assert task.container is not None
    assert (task.container.agent_seconds, task.container.verifier_seconds) == (120, 60)
    assert task.container.limits["build_seconds"] == 240


def test_a_published_image_is_used_unless_it_is_to_be_built(tmp_path: Path) -> None:
    directory = write_task(tmp_path, toml='[environment]\ndocker_image = "golang:1.27@sha256:' + "0" * 64 + '"')
    (task,) = load(directory)
    assert task.image is not None
    assert task.image.startswith("golang:1.27@sha256:")
    (built,) = load(directory, build=True)
    assert built.image == f"dockerfile:{directory}/environment"


def test_the_last_stage_says_the_working_directory(tmp_path: Path) -> None:
    directory = write_task(
        tmp_path,
        dockerfile="FROM a AS b\nUSER nobody\nWORKDIR /srv\nFROM --platform=linux/amd64 B\nworkdir app\nUSER 0:0\n",
    )
    (task,) = load(directory)
    assert task.workspace_path == "/srv/app"


@pytest.mark.parametrize(
    "script",
    [
        "RUN cat > x <<EOF\nFROM b\nWORKDIR /other\nEOF\n",
        "COPY <<-'END' /x\nWORKDIR /other\n\tEND\n",
        'RUN cat <<"A" <<B\nB\nWORKDIR /a\nA\nWORKDIR /b\nB\n',
        "RUN cat <<A\nWORKDIR /other\n\tA\nWORKDIR /third\nA\n",
        "RUN true\n# <<EOF\nWORKDIR /app\nRUN cat <<EOF\nEOF\n",
        "RUN echo 1 <<x\nWORKDIR /app\n",
    ],
)
def test_a_heredoc_says_no_working_directory(tmp_path: Path, script: str) -> None:
    """Guards against a file that RUN writes, whose lines were taken for instructions."""
    before = "FROM a\nWORKDIR /first\n" if "WORKDIR /app" in script else "FROM a\nWORKDIR /app\n"
    (task,) = load(write_task(tmp_path, dockerfile=f"{before}{script}USER 0\n"))
    assert task.workspace_path == "/app"


@pytest.mark.parametrize(
    "script",
    [
        'RUN echo "as cat <<EOF > x does"',
        "RUN echo 'as cat <<EOF > x does'",
        'RUN echo "as \\\n cat <<EOF > x \\\n# a comment\n does"',
        'RUN echo as\\ \\"cat "<<EOF > x"',
        'RUN ["echo", "as cat <<EOF > x"]',
        "RUN echo '<<EOF'",
        'RUN echo "a << EOF"',
    ],
)
def test_quoted_text_is_no_heredoc(tmp_path: Path, script: str) -> None:
    """Guards against a WORKDIR that was lost, because it lay between such text and the end of a later heredoc."""
    dockerfile = f"FROM a\nWORKDIR /first\n{script}\nWORKDIR /app\nRUN cat <<EOF > x\nWORKDIR /other\nEOF\n"
    (task,) = load(write_task(tmp_path, dockerfile=dockerfile))
    assert task.workspace_path == "/app"


def test_the_lines_of_a_continued_command_are_no_instructions(tmp_path: Path) -> None:
    """Guards against an argument that begins a line of a RUN, which was taken for a WORKDIR."""
    run = "RUN echo \\\n\n# a comment\n  WORKDIR /other\n"
    (task,) = load(write_task(tmp_path, dockerfile=f"FROM a\nWORKDIR \\\n  /app\n{run}USER \\\n  root \\\n"))
    assert task.workspace_path == "/app"


REFUSED = {
    "[environment]\ngpus = 1": "environment.gpus=1: is not supported",
    '[environment]\nos = "windows"': "environment.os='windows': is not supported",
    '[[environment.mcp_servers]]\nname = "x"\nurl = "http://y"': "environment.mcp_servers=",
    '[environment.healthcheck]\ncommand = "true"': "environment.healthcheck=",
    '[environment]\nskills_dir = "/skills"': "environment.skills_dir='/skills': is not supported",
    '[environment.tpu]\ntype = "v4"\ntopology = "2x2"': "environment.tpu=",
    '[environment]\nmemory = "4X"': "environment.memory='4X': expected a size such as 512M or 4G; correct it",
    "[environment]\ncpus = 0": "environment.cpus=0",
    "[environment]\nmemory_mb = nan": "environment.memory_mb=nan",
    '[environment]\nkernel = "6.1"': "environment.kernel='6.1': this key is not supported; remove it",
    '[environment]\nworkdir = "/usr"': "environment.workdir='/usr': expected an absolute path",
    '[environment.env]\nKEY = "${SECRET}"': "environment.env.KEY='${SECRET}': would copy $SECRET of this machine",
    '[[steps]]\nname = "one"': "steps=",
    '[agent]\nuser = "dev"': "agent.user='dev': is not supported",
    "[agent]\ntimeout_sec = -1": "agent.timeout_sec=-1",
    "[agent]\ntimeout_sec = inf": "agent.timeout_sec=inf",
    '[verifier]\nenvironment_mode = "separate"': "verifier.environment_mode='separate': is not supported",
    "[verifier.environment]\ncpus = 1": "verifier.environment=",
    '[[verifier.collect]]\ncommand = "x"': "verifier.collect=",
    '[verifier]\ntimeout_sec = "long"': "verifier.timeout_sec='long'",
    "[oracle]\nx = 1": "oracle=",
    "[environment": "task.toml is not TOML: ",
}


@pytest.mark.parametrize("toml", REFUSED)
def test_what_would_mean_something_else_is_refused(tmp_path: Path, toml: str) -> None:
    directory = write_task(tmp_path, toml=toml)
    line = problem(tmp_path)
    assert line.startswith(f"{directory}: ")
    assert REFUSED[toml] in line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda task: (task / "task.toml").unlink(), "task.toml is missing"),
        (lambda task: (task / "instruction.md").unlink(), "instruction.md is missing"),
        (lambda task: (task / "instruction.md").write_text("# canary\n\n"), "problem_statement: must not be empty"),
        (lambda task: shutil.rmtree(task / "tests"), "tests/test.sh is missing"),
        (lambda task: (task / "environment/Dockerfile").unlink(), "environment/Dockerfile is missing"),
        (lambda task: (task / "environment/docker-compose.yaml").write_text(""), "several containers"),
        (lambda task: (task / "environment/Dockerfile").write_text("FROM a\n"), "WORKDIR='' is not an absolute path"),
        (lambda task: (task / "environment/Dockerfile").write_text("FROM a\nUSER dev\nWORKDIR /a\n"), "USER dev"),
        (lambda task: (task / "environment/Dockerfile").write_text("FROM a AS b\nUSER dev\nFROM b\n"), "USER dev"),
        (lambda task: (task / "task.toml").write_bytes(b"\xff"), "can't decode"),
    ],
)
def test_missing_and_broken_files(tmp_path: Path, change: Any, said: str) -> None:
    change(write_task(tmp_path))
    assert said in problem(tmp_path)


def test_good_tasks_are_not_lost_with_bad_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_task(tmp_path, "good")
    write_task(tmp_path, "bad", toml="[environment]\ngpus = 8")
    (tmp_path / "not-a-task").mkdir()
    with caplog.at_level(logging.WARNING):
        (task,) = load(tmp_path, skip_bad=True)
    assert task.instance_id == "good"
    assert f"left out: {tmp_path}/bad: task.toml: environment.gpus=8" in caplog.text


def test_tasks_that_want_the_internet_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(TASKS)
    (record,) = caplog.records
    assert "2 tasks may use the internet" in record.message


def test_a_place_without_tasks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no task directory"):
        load(tmp_path)
    with pytest.raises(ValueError, match="is not a directory"):
        load(tmp_path / "missing")


def test_a_link_out_of_the_data_set_is_refused(tmp_path: Path) -> None:
    directory = write_task(tmp_path / "set")
    shutil.rmtree(directory / "environment")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/Dockerfile").write_text("FROM a\nWORKDIR /a\n")
    (directory / "environment").symlink_to(tmp_path / "elsewhere")
    assert "is in none of" in problem(tmp_path / "set")


@pytest.mark.parametrize("name", ["bubblewrap", "apptainer", "auto"])
def test_other_runtimes_are_refused_by_name(name: str) -> None:
    spec = RuntimeSpec.model_validate({"name": name, "scope": "container"})
    with pytest.raises(ConfigError, match=f"runtime={name}: gives no harness a whole container.*set runtime=docker"):
        check_offered(spec, RUNTIMES.make(spec))
    with pytest.raises(UngradableError, match=f"greet: runtime={name}: gives no harness a whole container"):
        request_for(load(TASKS / "greet")[0], runtime=RuntimeSpec(name=name), evaluator=HARBOR)


@pytest.mark.parametrize("name", ["swe", "test_on_output"])
def test_the_evaluator_must_suit_the_task(name: str) -> None:
    (task,) = load(TASKS / "greet")
    with pytest.raises(UngradableError, match=f"evaluator={name} cannot grade this task; set evaluator=harbor"):
        request_for(task, runtime=DOCKER, evaluator=EvaluatorSpec(name=name))


def test_the_verifier_may_be_a_part_of_a_grade() -> None:
    (task,) = load(TASKS / "greet")
    parts = {"verifier": {"name": "harbor"}, "done": {"name": "session_completion"}}
    evaluator = EvaluatorSpec.model_validate({"name": "composite", "components": parts})
    request = request_for(task, runtime=DOCKER, evaluator=evaluator)
    assert request.evaluator.timeout_seconds == 30
    components = EVALUATORS.options(request.evaluator).components
    assert {name: part.timeout_seconds for name, part in components.items()} == {"verifier": 30, "done": 600}
    EVALUATORS.make(request.evaluator)


def test_the_reference_script_brings_and_runs_the_solution() -> None:
    (task,) = load(TASKS / "weigh")
    script = reference_script(task)
    assert script["match"] == "The file /data/weights.txt has a weight on each line."
    assert [command.partition(" ")[0] for command in script["commands"]] == ["mkdir", "chmod"]
    assert "env TARE=3 /solution/solve.sh" in script["commands"][1]


def test_the_fixtures_are_of_the_format() -> None:
    for task in TASKS.iterdir():
        assert tomllib.loads((task / "task.toml").read_text())


@pytest.mark.parametrize(
    ("toml", "network"),
    [
        ("", "full"),
        ('[environment]\nnetwork_mode = "no-network"', "gateway"),
        ('[environment]\nnetwork_mode = "allowlist"', "gateway"),
        ("[environment]\nallow_internet = false", "gateway"),
        ('[verifier]\nnetwork_mode = "no-network"', "full"),
    ],
)
def test_a_task_without_network_has_none_where_the_run_allows_it(tmp_path: Path, toml: str, network: str) -> None:
    """Guards against an agent that fetches a published solution in a task that is offline."""
    write_task(tmp_path, toml=toml)
    (task,) = load(tmp_path)
    spec = RuntimeSpec(name="docker", network="full")
    assert request_for(task, runtime=spec, evaluator=HARBOR).runtime.network == network
    assert request_for(task, runtime=DOCKER, evaluator=HARBOR).runtime.network == "gateway"


def test_a_network_for_the_verifier_alone_is_refused(tmp_path: Path) -> None:
    write_task(tmp_path, toml='[agent]\nnetwork_mode = "no-network"')
    (task,) = load(tmp_path)
    with pytest.raises(UngradableError, match=r"runtime\.network=full: the task keeps its agent from the network"):
        request_for(task, runtime=RuntimeSpec(name="docker", network="full"), evaluator=HARBOR)
