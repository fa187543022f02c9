"""Rows of SWE-bench, SWE-Gym and SWE-smith, prepared by the command and graded in an image that looks like theirs.

The rows are written by hand, from the fields that the data sets document, about a repository of our own.
"""

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polar_gym.cli import app
from polar_gym.curation.bench import Bench
from polar_gym.curation.twins import with_twins
from polar_gym.curation.validation import Verdict, validate
from polar_gym.curation.wrong import section
from polar_gym.engines import ENGINES
from polar_gym.gateway.node.node import Node
from polar_gym.paths import cache_dir
from polar_gym.schema import HarnessSpec, PluginSpec, RuntimeSpec
from polar_gym.tasks import Task
from polar_gym.tasks.rows import Selection, load_tasks
from tests.lifecycle.attacks import adaptive
from tests.lifecycle.testbed_image import CONDA, image_with_testbed
from tests.support.docker_daemon import docker_host
from tests.support.task_files import request_for

__all__ = ["docker_host"]

RIGHT = "def double(x):\n    return x * 2\n\n\ndef halve(x):\n    return x / 2\n"
WRONG = RIGHT.replace("x * 2", "x + 2")
TEST = "from doubler import double, halve\n\n\ndef test_halve():\n    assert halve(4) == 2\n"
HIDDEN = TEST + "\n\ndef test_double():\n    assert double(3) == 6\n\n\ndef test_two():\n    assert double(2) == 4\n"
F2P, P2P = (
    ["tests/test_doubler.py::test_double"],
    ["tests/test_doubler.py::test_halve", "tests/test_doubler.py::test_two"],
)
CALL = """
import json, os, urllib.request
call = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(call).encode(), headers)).read()
"""
"""An agent's one model call: a session without any has failed."""
OTHER = ["tests/test_other.py::test_true"]


def git(repository: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    return subprocess.check_output(["git", "-C", repository, *identity, *arguments], text=True)


def change(repository: Path, name: str, text: str) -> str:
    """The patch that gives a file this text; the repository stays as it was."""
    path = repository / name
    before = path.read_text()
    path.write_text(text)
    patch = git(repository, "diff")
    path.write_text(before)
    return patch


def made(path: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    git(path.parent, "init", "-q", str(path))
    git(path, "add", "-A")
    git(path, "commit", "-qm", "Begin")
    return path


def repository_with(code: str, tests: str) -> dict[str, str]:
    other = "def test_true():\n    assert True\n"
    return {"doubler.py": code, "conftest.py": "", "tests/test_doubler.py": tests, "tests/test_other.py": other}


@pytest.fixture(scope="module")
def buggy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As SWE-bench and SWE-Gym have it: with the bug, without the tests."""
    return made(tmp_path_factory.mktemp("bench") / "repository", repository_with(WRONG, TEST))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As SWE-smith has it: without a bug, with all tests."""
    return made(tmp_path_factory.mktemp("smith") / "repository", repository_with(RIGHT, HIDDEN))


@pytest.fixture(scope="module")
def buggy_image(docker_host: str, buggy: Path) -> Iterator[str]:
    with image_with_testbed(docker_host, buggy) as tag:
        yield tag


@pytest.fixture(scope="module")
def healthy_image(docker_host: str, healthy: Path) -> Iterator[str]:
    with image_with_testbed(docker_host, healthy) as tag:
        yield tag


def prepared(directory: Path, row: dict) -> Task:
    (directory / "rows.jsonl").write_text(json.dumps(row) + "\n")
    out = directory / "tasks.jsonl"
    done = CliRunner().invoke(app, ["tasks", "prepare", str(directory / "rows.jsonl"), "--out", str(out)])
    assert done.exit_code == 0, f"{done.output}{done.exception}"
    (task,) = load_tasks(out, Selection())
    return task


def patched(buggy: Path, image: str, *, code: str = "doubler.py", **fields: object) -> dict:
    """A row; `code`: the file with the bug."""
    base = git(buggy, "rev-parse", "HEAD").strip()
    return {
        **{"problem_statement": "Three is doubled to five.", "base_commit": base, "image": image},
        **{"patch": change(buggy, code, RIGHT), "test_patch": change(buggy, "tests/test_doubler.py", HIDDEN)},
        **{"FAIL_TO_PASS": F2P, "PASS_TO_PASS": P2P},
        **fields,
    }


def planted(healthy: Path, image: str) -> dict:
    return {
        "instance_id": "somebody__doubler.12345678.lm_rewrite__abcdefgh",
        "repo": "swesmith/somebody__doubler.12345678",
        "image_name": image,
        "problem_statement": "Three is doubled to five.",
        "patch": change(healthy, "doubler.py", WRONG),
        **{"FAIL_TO_PASS": F2P, "PASS_TO_PASS": P2P + OTHER},
    }


async def validated(task: Task, host: str) -> Verdict:
    environment = {"PATH": f"/{CONDA}/envs/testbed/bin:/usr/bin:/bin"}
    spec = RuntimeSpec.model_validate({"name": "docker", "host": host, "environment": environment})
    async with Bench(spec, cache_dir()) as bench:
        return await validate(task, bench)


async def proven(task: Task, host: str) -> None:
    """The reference solution resolves it, and doing nothing does not."""
    verdict = await validated(task, host)
    assert verdict.problem == "", verdict
    assert verdict.gold is not None
    assert verdict.no_op is not None
    assert (verdict.gold.reward, verdict.no_op.reward) == (1.0, 0.0)


async def test_a_row_of_swe_bench(docker_host: str, tmp_path: Path, buggy: Path, buggy_image: str):
    """Of a repository that swebench 4 knows, so that the script is its own: it installs, which fails without a network,
    as it may."""
    row = patched(buggy, buggy_image, instance_id="pallets__flask-1", repo="pallets/flask", version="2.3")
    lists = {name: json.dumps(row[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    await proven(prepared(tmp_path, {**row, **lists}), docker_host)


@contextmanager
def row_with_a_copy(host: str, directory: Path, root: str, *built: str) -> Iterator[Task]:
    """A row of a repository that swebench installs by `pip install .`, in an image with such an installation.

    `root`: where in the repository its package is; `built`: modules of the package that only the installation has.
    """
    code, installed = f"{root}doubler/__init__.py", directory / "installed"
    repository = made(directory / "repository", {code: WRONG, "tests/test_doubler.py": TEST})
    shutil.copytree((repository / code).parent, installed / "doubler")
    for name in built:
        (installed / "doubler" / name).touch()
    with image_with_testbed(host, repository, installed=installed) as image:
        fields = {"instance_id": "psf__requests-1", "repo": "psf/requests", "version": "2.4"}
        yield prepared(directory, patched(repository, image, code=code, **fields))


def by_command(task: Task) -> Task:
    """The task with a command in place of its script."""
    command = "pytest -rA --color=no tests/test_doubler.py"
    return task.model_copy(update={"eval_script": "", "test_command": command, "log_parser": "pytest"})


@pytest.mark.parametrize("root", ["", "src/", "lib/"])
async def test_the_workspace_is_tested_where_the_image_has_a_copy(docker_host: str, tmp_path: Path, root: str):
    """The installation by the script fails, which once left the image's copy to be tested."""
    with row_with_a_copy(docker_host, tmp_path, root) as task:
        assert "pip install ." in task.eval_script
        await proven(task, docker_host)
        await proven(by_command(task), docker_host)


async def test_a_row_is_masked_where_only_the_copy_is_compiled(docker_host: str, tmp_path: Path):
    with row_with_a_copy(docker_host, tmp_path, "lib/", "_fast.cpython-311-x86_64-linux-gnu.so") as task:
        verdict = await validated(task, docker_host)
    told = "the tests import the image's copy of the package, not the workspace"
    assert verdict.problem == f"{told}; and without the harness's changes: {told}"


async def test_a_row_of_swe_gym(docker_host: str, tmp_path: Path, buggy: Path, buggy_image: str):
    row = patched(buggy, buggy_image, instance_id="iterative__dvc-1", repo="iterative/dvc", version="3.1")
    await proven(prepared(tmp_path, row), docker_host)


async def test_a_row_of_swe_smith(docker_host: str, tmp_path: Path, healthy: Path, healthy_image: str):
    task = prepared(tmp_path, planted(healthy, healthy_image))
    assert task.PASS_TO_PASS == P2P
    await proven(task, docker_host)


READS = adaptive.STORED.replace("def total(", "def double(") + "def halve(x): return x / 2\n"


async def test_git_does_not_tell_the_tests_of_a_row_of_swe_smith(
    docker_host: str, tmp_path: Path, healthy: Path, healthy_image: str
):
    """Guards against the full reward, at high trust, for code that finds in HEAD which copy of a test is original."""
    row = prepared(tmp_path, planted(healthy, healthy_image))
    environment = {"PATH": f"/{CONDA}/envs/testbed/bin:/usr/bin:/bin"}
    spec = RuntimeSpec.model_validate({"name": "docker", "host": docker_host, "environment": environment})
    async with Bench(spec, cache_dir()) as bench:
        verdict = await with_twins(row, bench)
        assert verdict.problem == ""
        hidden = [bits for places in verdict.task.twins.values() for each in places.values() for *_, bits in each]
        assert any(hidden), "the agent cannot read these tests"
        attack = await bench.evaluate(verdict.task, section("doubler.py", WRONG, READS))
        honest = await bench.evaluate(verdict.task, verdict.task.patch.encode())
    assert (attack.reward, honest.reward) == (0.0, 1.0), attack.log


async def test_an_agent_sees_the_planted_bug_but_neither_its_tests_nor_what_was_before(
    docker_host: str, tmp_path: Path, healthy: Path, healthy_image: str
):
    task = prepared(tmp_path, planted(healthy, healthy_image))
    look = "cat doubler.py; ls tests; git status --short; git log --format=%P%s; git rev-list --all --objects | wc -l"
    script = f"{look}; python3 -c {shlex.quote(CALL)}; sed -i 's/x + 2/x * 2/' doubler.py"
    request = request_for(
        task,
        agent=HarnessSpec.model_validate({"name": "command", "command": ["sh", "-c", script]}),
        runtime=RuntimeSpec.model_validate({"name": "docker", "host": docker_host}),
    )
    says = {"match": "", "commands": [], "final_message": "Done."}
    spec = PluginSpec.model_validate({"name": "embedded", "scripts": [says]})
    async with Node(ENGINES.get("embedded")(ENGINES.options(spec)), cache=cache_dir()) as node:
        episode = await node.rollout(request)
    assert episode.session.failure is None, episode.session.failure
    assert episode.artifacts.stdout == WRONG + "test_other.py\nInitial commit\n6\n"
    assert episode.reward == 1.0, episode.evaluation
