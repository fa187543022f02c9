"""Grading in real sandboxes: what is worth 1.0, what is not, and what an agent could try to make it so."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from polar_gym.evaluators import EvaluationContext, EvaluatorError
from polar_gym.evaluators.judge import judge
from polar_gym.registry import evaluators
from polar_gym.runtimes import Command, Sandbox, SandboxRequest
from polar_gym.runtimes.bubblewrap import Bubblewrap
from polar_gym.runtimes.diff import snapshot_diff
from polar_gym.schema import (
    Budget,
    BuilderSpec,
    EvaluationResult,
    EvaluatorSpec,
    HarnessSpec,
    RuntimeSpec,
    Sampling,
    Session,
)
from polar_gym.tasks import Task
from polar_gym.tasks.bundled import TASKS
from polar_gym.tasks.request import reference_script, to_request
from polar_gym.tasks.workspace import make_repository, pack_git_dir
from tests.requirements import need
from tests.shell import heredoc

BUNDLED = {task.repo.removeprefix("polar/"): task for task in TASKS(TASKS.Options()).load()}
INTERVALS = BUNDLED["intervals"]


class Bench:
    """A machine to grade on: sandboxes with a task's workspace at its base commit."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runtime = Bubblewrap(Bubblewrap.Options(scratch=directory))

    def repository(self, task: Task) -> Path:
        path = self.directory / "repositories" / task.instance_id
        if not path.exists():
            assert task.workspace is not None
            make_repository(Path(task.workspace), path)
        return path

    @asynccontextmanager
    async def sandbox(self, task: Task) -> AsyncIterator[Sandbox]:
        request = SandboxRequest(
            session_id="grading", spec=RuntimeSpec(name="bubblewrap"), workspace=self.repository(task)
        )
        sandbox = await self.runtime.start(request)
        try:
            yield sandbox
        finally:
            await sandbox.stop()

    async def diff_after(self, task: Task, *commands: str) -> bytes:
        """What an agent that ran these shell commands leaves."""
        async with self.sandbox(task) as sandbox:
            for command in commands:
                result = await sandbox.exec(Command(argv=["sh", "-c", command]))
                assert result.exit_code == 0, result.stderr.decode()
            return await snapshot_diff(sandbox, "/workspace", pack_git_dir(self.repository(task)))

    async def evaluate(self, task: Task, diff: bytes, **evaluator: Any) -> EvaluationResult:
        spec = EvaluatorSpec.model_validate({"name": "swe", "timeout_seconds": 30, **evaluator})
        request = to_request(
            task,
            harness=HarnessSpec(name="pi"),
            runtime=RuntimeSpec(name="bubblewrap"),
            evaluator=spec,
            builder=BuilderSpec(name="prefix_merging"),
            num_samples=1,
            timeout_seconds=60,
            sampling=Sampling(),
            budget=Budget(),
        )
        context = EvaluationContext(
            request=request,
            session=Session(session_id="s", task_id=request.task_id, sample_index=0, harness="pi", exit_code=0),
            calls=[],
            diff=diff,
            final_message="the answer is 42",
            fresh_sandbox=lambda: self.sandbox(task),
        )
        options = evaluators.options(request.evaluator)
        return await judge(evaluators.get(request.evaluator.name)(options), context, spec.timeout_seconds + 60)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    missing = bench.runtime.check()
    need(not missing, "a working bubblewrap", "; ".join(missing))
    return bench


def gold(task: Task) -> bytes:
    return task.patch.encode()


# The bundled tasks ----------------------------------------------------------------------------------------------------

WRONG = {
    "intervals": "sed -i 's/self._starts, interval.end)/self._starts, interval.end + 2)/' intervals/intervalset.py",
    "durations": "sed -i 's/seconds += int(amount)/seconds += abs(int(amount))/' durations/parsing.py",
    "ttlcache": "sed -i 's/_deadlines\\[0\\]\\[0\\] <= now/_deadlines[0][0] + 100 <= now/' ttlcache/cache.py",
    "texttable": "sed -i 's/start + width\\]/start + width - 1]/' texttable/wrap.py",
    "buildorder": "sed -i 's/done < len(waiting)/False/' buildorder/order.py",
}


@pytest.mark.parametrize("task", BUNDLED.values(), ids=lambda task: task.repo)
async def test_reference_solution_resolves(bench, task):
    """By the very commands that the scripted policy plays."""
    diff = await bench.diff_after(task, *reference_script(task)["commands"])
    result = await bench.evaluate(task, diff)
    assert (result.reward, result.resolved) == (1.0, True), result.log
    assert set(result.tests) == {*task.FAIL_TO_PASS, *task.PASS_TO_PASS}
    assert result.components == {"fail_to_pass": 1.0, "pass_to_pass": 1.0}


@pytest.mark.parametrize("task", BUNDLED.values(), ids=lambda task: task.repo)
async def test_every_listed_failure_is_there_at_the_base_commit(bench, task):
    diff = await bench.diff_after(task, "echo nothing of use > notes.txt")
    result = await bench.evaluate(task, diff)
    assert result.reward == 0.0
    assert {test for test, status in result.tests.items() if status != "PASSED"} == set(task.FAIL_TO_PASS)


@pytest.mark.parametrize("name", BUNDLED)
async def test_wrong_patch_is_worth_nothing(bench, name):
    result = await bench.evaluate(BUNDLED[name], await bench.diff_after(BUNDLED[name], WRONG[name]))
    assert result.reward == 0.0
    assert "FAILED" in result.tests.values() or "ERROR" in result.tests.values()


BREAKING = {
    "intervals": "sed -i 's/number < self._ends/number <= self._ends/' intervals/intervalset.py",
    "durations": "sed -i 's/0 seconds/nothing/; s/ ago\"/\"/' durations/formatting.py",
    "ttlcache": "sed -i 's/if capacity < 1/if capacity < 0/' ttlcache/cache.py",
    "texttable": "sed -i 's/if width < 2/if width < 1/' texttable/wrap.py",
    "buildorder": "sed -i 's/line {number}/a line/' buildorder/reading.py",
}


@pytest.mark.parametrize("name", BUNDLED)
async def test_solution_that_breaks_something_else_is_worth_nothing(bench, name):
    task = BUNDLED[name]
    diff = await bench.diff_after(task, reference_script(task)["commands"][-2], BREAKING[name])
    result = await bench.evaluate(task, diff)
    assert result.reward == 0.0
    assert result.components["fail_to_pass"] == 1.0
    assert 0 < result.components["pass_to_pass"] < 1.0
    assert "not passed" in result.detail


async def test_empty_diff_is_worth_nothing_and_runs_nothing(bench):
    result = await bench.evaluate(INTERVALS, b"", test_patch="broken, and never looked at")
    assert (result.reward, result.detail) == (0.0, "the agent changed nothing")
    assert set(result.tests.values()) == {"MISSING"}


async def test_diff_that_does_not_apply_is_worth_nothing(bench):
    result = await bench.evaluate(INTERVALS, gold(INTERVALS).replace(b" first = ", b" fist = "))
    assert result.reward == 0.0
    assert "does not apply" in result.detail


# Faults of the grader -------------------------------------------------------------------------------------------------


async def test_broken_test_patch_is_the_graders_fault(bench):
    with pytest.raises(EvaluatorError, match=r"test_patch does not apply to the base commit: .*corrupt"):
        await bench.evaluate(INTERVALS, gold(INTERVALS), test_patch=INTERVALS.test_patch[:-40])


async def test_agent_cannot_make_the_test_patch_fail(bench):
    """It would be masked instead of scored, which is better than a failure: the tests were once applied second."""
    diff = await bench.diff_after(
        INTERVALS, "printf 'x\\n' > tests/test_intervals.py", "echo '* text eol=crlf' > .gitattributes"
    )
    result = await bench.evaluate(INTERVALS, diff)
    assert result.tests[INTERVALS.PASS_TO_PASS[0]] == "PASSED"


# What an agent could try ----------------------------------------------------------------------------------------------

HIDDEN = sorted([*INTERVALS.FAIL_TO_PASS, *INTERVALS.PASS_TO_PASS])


def writes(path: str, text: str) -> str:
    return f'mkdir -p "$(dirname {path})" && cat >> {path} {heredoc(text)}'


def passing_tests() -> str:
    """A module whose tests have the hidden tests' names and test nothing."""
    lines = ["import unittest"]
    for name in sorted({test.split(".")[2] for test in HIDDEN}):
        lines.append(f"class {name}(unittest.TestCase):")
        lines += [f"    def {test.split('.')[3]}(self): pass" for test in HIDDEN if test.split(".")[2] == name]
    return "\n".join(lines)


def forged_log(tests: list[str]) -> str:
    lines = [f"{test.rpartition('.')[2]} ({test}) ... ok" for test in tests]
    return "\n".join([*lines, "", "-" * 70, f"Ran {len(tests)} tests in 0.001s", "", "OK", ""])


TRICKS = {
    "edits the tests": "rm tests/test_intervals.py && " + writes("tests/test_intervals.py", passing_tests()),
    "deletes the tests": "rm tests/test_intervals.py",
    "shadows the tests by a package": writes("tests/test_intervals/__init__.py", passing_tests()),
    "shadows the tests by compiled ones": "echo >> README.md\n"
    + writes("/tmp/t.py", passing_tests())
    + '\nmkdir tests/__pycache__ && python3 -c \'from py_compile import *; compile("/tmp/t.py", '
    + '"tests/__pycache__/test_intervals.cpython-311.pyc", '
    + "invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)'",
    "replaces unittest": writes("unittest.py", f"import sys\nsys.stderr.write({forged_log(HIDDEN)!r})"),
    "replaces the tests by a link": "mv tests other && ln -s other tests",
    "prints that all is well": writes("intervals/__init__.py", f"import sys\nsys.stderr.write({forged_log(HIDDEN)!r})"),
}


@pytest.mark.parametrize("trick", TRICKS)
async def test_trick_does_not_help(bench, trick):
    diff = await bench.diff_after(INTERVALS, TRICKS[trick])
    assert diff
    result = await bench.evaluate(INTERVALS, diff)
    assert result.reward == 0.0
    assert "PASSED" not in {result.tests[test] for test in INTERVALS.FAIL_TO_PASS}


async def test_package_in_place_of_a_test_module_does_not_help(bench):
    """Test discovery notices it by itself, a plain import takes the package."""
    diff = await bench.diff_after(INTERVALS, TRICKS["shadows the tests by a package"])
    result = await bench.evaluate(INTERVALS, diff, test_command="python3 -m unittest -v tests.test_intervals")
    assert result.reward == 0.0
    assert result.tests[INTERVALS.PASS_TO_PASS[0]] == "PASSED"


@pytest.mark.parametrize("trick", ["edits the tests", "deletes the tests"])
async def test_trick_does_not_harm_a_solution_either(bench, trick):
    diff = await bench.diff_after(INTERVALS, TRICKS[trick], reference_script(INTERVALS)["commands"][-2])
    assert (await bench.evaluate(INTERVALS, diff)).reward == 1.0


async def test_code_that_hangs_is_worth_nothing(bench):
    diff = await bench.diff_after(INTERVALS, "printf '\\nwhile True: pass\\n' >> intervals/__init__.py")
    result = await bench.evaluate(INTERVALS, diff, timeout_seconds=1)
    assert result.reward == 0.0
    assert result.detail.endswith("timed out after 1 s")


async def test_code_that_ends_the_test_run_is_worth_nothing(bench):
    diff = await bench.diff_after(INTERVALS, "printf '\\nimport os\\nos._exit(0)\\n' >> intervals/__init__.py")
    result = await bench.evaluate(INTERVALS, diff)
    assert result.reward == 0.0
    assert set(result.tests.values()) == {"MISSING"}


# test_on_output -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reward", "detail"),
    [
        ({"command": "test -f made.txt"}, 1.0, "as expected"),
        ({"command": "test -f absent.txt"}, 0.0, "exited with 1, expected exit code 0"),
        ({"command": "exit 3", "expected_exit_code": 3}, 1.0, "as expected"),
        ({"command": "cat made.txt", "expected_output": "^b$"}, 1.0, "as expected"),
        ({"command": "cat made.txt", "expected_output": "c"}, 0.0, "'c' is not in the command's output"),
        ({"command": "cat", "expected_output": r"\b42$"}, 1.0, "as expected"),
        ({"command": "pwd", "workdir": "/tmp", "expected_output": "^/tmp$"}, 1.0, "as expected"),
        ({"command": "test ! -f made.txt || sleep 60", "timeout_seconds": 3}, 0.0, "timed out after 3 s"),
    ],
)
async def test_on_output(bench, options, reward, detail):
    diff = await bench.diff_after(INTERVALS, "printf 'a\\nb\\n' > made.txt")
    result = await bench.evaluate(INTERVALS, diff, name="test_on_output", **options)
    assert result.reward == reward
    assert detail in result.detail


async def test_on_output_with_a_diff_that_does_not_apply(bench):
    diff = gold(INTERVALS).replace(b" first = ", b" fist = ")
    result = await bench.evaluate(INTERVALS, diff, name="test_on_output", command="true")
    assert result.reward == 0.0
    assert "does not apply" in result.detail
