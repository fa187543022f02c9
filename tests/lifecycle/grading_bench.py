"""A machine to grade on, for tests: sandboxes of any runtime with a task's workspace at its base commit."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from polar_gym.evaluators import EVALUATORS, EvaluationContext
from polar_gym.evaluators.blame import judge
from polar_gym.evaluators.expectations import find_tests
from polar_gym.runtimes import Command, ExecResult, Mount, Runtime, Sandbox, SandboxError, SandboxRequest
from polar_gym.runtimes.bubblewrap import BubblewrapSandbox
from polar_gym.schema import EvaluationResult, EvaluatorSpec, RuntimeSpec, Session
from polar_gym.tasks import Task
from polar_gym.tasks.bundled import TASKS
from polar_gym.workspaces.diff import snapshot_diff
from polar_gym.workspaces.repository import make_repository, pack_git_dir
from tests.lifecycle.runtime_kinds import make
from tests.support.requirements import need
from tests.support.task_files import request_for

BUNDLED = {task.repo.removeprefix("polar/"): task for task in TASKS(TASKS.Options()).load()}
INTERVALS = BUNDLED["intervals"]


GRADING_SLACK = 60.0
"""Seconds, beside an evaluator's own, in which grading must be done."""


HANGING = "open('/tmp/hangs', 'w').write('!')"
"""Python that tells a `HangingSandbox` that nothing more will come."""


class HangingSandbox:
    """A sandbox in which the time limit of a command has passed as soon as the command says that it hangs.

    How long a run takes until then depends on how busy the machine is."""

    def __init__(self, sandbox: BubblewrapSandbox) -> None:
        self._sandbox = sandbox
        self.base_url = sandbox.base_url

    async def exec(self, command: Command) -> ExecResult:
        disk, hangs, loop = self._sandbox.disk, asyncio.Event(), asyncio.get_running_loop()
        assert disk is not None
        fifo = disk.seen(disk.scratch / "disk" / "tmp" / "hangs")
        os.mkfifo(fifo)
        fifo.chmod(0o666)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        loop.add_reader(reader, hangs.set)
        try:
            return await self._sandbox.exec(dataclasses.replace(command, end=hangs))
        finally:
            loop.remove_reader(reader)
            os.close(reader)
            fifo.unlink()

    async def stop(self) -> None:
        await self._sandbox.stop()


def lose_one_read(monkeypatch: pytest.MonkeyPatch, kind: Any, end: str) -> list[str]:
    """Have the first read of a path with this end, in sandboxes of this kind, find that the sandbox is lost. Return a
    list, into which the path goes then."""
    lost, exec_command = list[str](), kind.exec

    async def exec_unless_lost(self: Sandbox, command: Command) -> ExecResult:
        if "exec cat" in " ".join(command.argv) and command.argv[-1].endswith(end) and not lost:
            lost.append(command.argv[-1])
            raise SandboxError("the daemon was restarted")
        return await exec_command(self, command)

    monkeypatch.setattr(kind, "exec", exec_unless_lost)
    return lost


class Bench:
    """A machine to grade on: sandboxes with a task's workspace at its base commit."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        """Take the settings of a runtime: its `name`, and its options beside `scratch`."""
        self.directory = directory
        self.sandboxes = 0
        """How many were started."""
        self.spec = RuntimeSpec(name=settings["name"])
        self.mounts: list[Mount] = []
        options = {name: value for name, value in settings.items() if name != "name"}
        self.runtime: Runtime = make(settings["name"], scratch=directory, **options)

    def offer_pytest(self) -> None:
        """The pytest of this environment in every sandbox: it is pure Python."""
        packages = self.directory / "packages"
        packages.mkdir()
        for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            for file in metadata.distribution(name).files or []:
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    target = packages / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(str(file.locate()), target)
        (packages / "closeness.py").write_text(CLOSENESS)
        self.mounts.append(Mount(packages, "/opt/packages"))
        self.spec = self.spec.model_copy(update={"environment": {"PYTHONPATH": "/opt/packages"}})

    def repository(self, task: Task) -> Path:
        path = self.directory / "repositories" / task.instance_id
        if not path.exists():
            assert task.workspace is not None
            make_repository(Path(task.workspace), path)
        return path

    @asynccontextmanager
    async def sandbox(self, task: Task) -> AsyncIterator[Sandbox]:
        request = SandboxRequest(
            session_id="grading", spec=self.spec, workspace=self.repository(task), mounts=self.mounts
        )
        self.sandboxes += 1
        sandbox = await self.runtime.start(request)
        try:
            yield sandbox
        finally:
            await sandbox.stop()

    @asynccontextmanager
    async def grading_sandbox(self, task: Task) -> AsyncIterator[Sandbox]:
        async with self.sandbox(task) as sandbox:
            yield HangingSandbox(sandbox) if isinstance(sandbox, BubblewrapSandbox) else sandbox

    async def diff_after(self, task: Task, *commands: str) -> bytes:
        """What an agent that ran these shell commands leaves."""
        async with self.sandbox(task) as sandbox:
            for command in commands:
                result = await sandbox.exec(Command(argv=["sh", "-c", command]))
                assert result.exit_code == 0, result.stderr.decode()
            return await snapshot_diff(sandbox, "/workspace", pack_git_dir(self.repository(task)))

    async def evaluate(self, task: Task, diff: bytes, *, diff_problem: str = "", **evaluator: Any) -> EvaluationResult:
        spec = EvaluatorSpec.model_validate({"name": "swe", "timeout_seconds": 30, **evaluator})
        request = request_for(task, runtime=self.spec, evaluator=spec)
        context = EvaluationContext(
            request=request,
            session=Session(session_id="s", task_id=request.task_id, sample_index=0, harness="pi", exit_code=0),
            calls=[],
            diff=diff,
            diff_problem=diff_problem,
            final_message="the answer is 42",
            fresh_sandbox=lambda: self.grading_sandbox(task),
        )
        options = EVALUATORS.options(request.evaluator)
        return await judge(
            EVALUATORS.get(request.evaluator.name)(options), context, spec.timeout_seconds + GRADING_SLACK
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path)


def make_bench(directory: Path, settings: Mapping[str, Any] = {"name": "bubblewrap"}) -> Bench:
    bench = Bench(directory, settings)
    missing = bench.runtime.check()
    need(not missing, f"a working {settings['name']}", "; ".join(missing))
    return bench


CLOSENESS = "def far(one, other):\n    return abs(one - other) > 1e-9\n"
"""A third party's module in every sandbox."""
PRICES = {
    "prices/__init__.py": "from prices.total import total as total\n",
    "prices/total.py": (
        "def total(prices, discount=0):\n"
        '    """The sum, less so many percent."""\n'
        "    return sum(prices) * (100 - discount) // 10\n"
    ),
    "conftest.py": "import pytest\n\n\n@pytest.fixture\ndef basket():\n    return [100, 250]\n",
    "setup.py": "import prices\n\nprint(prices.__name__, 'is built')\n",
    "setup.cfg": "[tool:pytest]\naddopts = --strict-markers\n",
    "tests/test_prices.py": "from prices import total\n\n\ndef test_nothing_is_free():\n    assert total([]) == 0\n",
}
HIDDEN_TESTS = """

def test_no_discount(basket):
    assert total(basket) == 350


def test_discount(basket):
    assert total(basket, discount=10) == 315
"""
EVAL_SCRIPT = """#!/bin/bash
set -uxo pipefail
cd /workspace
git status > /dev/null
git checkout HEAD tests/test_prices.py
python3 setup.py --quiet
git apply -v - <<'EOF_TESTS'
{test_patch}
EOF_TESTS
: '>>>>> Start Test Output'
python3 -m pytest -rA --color=no tests/test_prices.py
: '>>>>> End Test Output'
git checkout HEAD tests/test_prices.py
"""


def prices_task(directory: Path, files: Mapping[str, str] = PRICES, **fields: Any) -> Task:
    """A task whose tests are pytest's; its workspace is made below `directory`."""
    right = PRICES["prices/total.py"].replace("// 10\n", "// 100\n")
    tests = "tests/test_prices.py"
    values = {
        "patch": make_patch(directory, PRICES, {"prices/total.py": right}),
        "test_patch": make_patch(directory, PRICES, {tests: PRICES[tests] + HIDDEN_TESTS}),
        "test_command": f"python3 -m pytest -rA --color=no {tests}",
        "log_parser": "pytest",
        "FAIL_TO_PASS": [f"{tests}::test_no_discount", f"{tests}::test_discount"],
        "PASS_TO_PASS": [f"{tests}::test_nothing_is_free"],
        "twins": {tests: all_places(PRICES[tests] + HIDDEN_TESTS)},
    }
    return make_task(directory, files, **{**values, **fields})


def make_task(directory: Path, files: Mapping[str, str], **fields: Any) -> Task:
    """A task with these files; its workspace is made below `directory`."""
    source = directory / "prices-source"
    for name, text in files.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    values = {
        "instance_id": "polar__prices-1",
        "problem_statement": "total() is ten times too much\n",
        "repo": "polar/prices",
        "workspace": str(source),
    }
    return Task.model_validate({**values, **fields})


def all_places(source: str) -> dict[str, list[list[int]]]:
    """Return the places at which the tests of the solution can be altered and hide bits."""
    tests = {test.name: [each for each in test.expectations if each.bits] for test in find_tests(source.encode())}
    return {name: [[*each.span, each.bits] for each in tests[name]] for name in ("test_no_discount", "test_discount")}


def scripted(task: Task) -> Task:
    """The same task as swebench has it, with an eval script and a log parser of swebench's."""
    script = EVAL_SCRIPT.format(test_patch=task.test_patch)
    update = {"test_command": "", "eval_script": script, "log_parser": "parse_log_pytest", "version": "1.0"}
    return task.model_copy(update=update)


def make_patch(directory: Path, old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return the git patch that gives the files named in `new` that content, where `old` has another."""
    patch = ""
    for name, text in new.items():
        for side, content in (("a", old[name]), ("b", text)):
            path = directory / side / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        command = ["git", "diff", "--no-index", "--no-prefix", f"a/{name}", f"b/{name}"]
        patch += subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False).stdout
    return patch
