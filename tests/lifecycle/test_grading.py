"""Grading in real sandboxes: what is worth 1.0, what is not, and what an agent could try to make it so."""

from pathlib import Path

import pytest

from polar_gym.evaluators import EvaluatorError, pattern
from polar_gym.runtimes import Mount
from polar_gym.runtimes.agent import PATH
from polar_gym.tasks import Task
from polar_gym.tasks.request import reference_script
from tests.lifecycle.grading_bench import BUNDLED, INTERVALS, Bench, bench

__all__ = ["bench"]


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


FULL = f"index {'0' * 40}..f76dd238ade08917e6712764a16a22005a50573d"
HIDERS = {
    "a hunk": "index 0000000..257cc56\n--- /dev/null\n+++ b/notes.txt\n@@ -0,0 +1 @@\n+notes\n",
    "an empty file": "index 0000000..e69de29\nno line of a patch\n",
    "a binary file": f"{FULL}\nGIT binary patch\nliteral 1\nIcmZPo000310RR91\n\nliteral 0\nHcmV?d00001\n\n",
}


@pytest.mark.parametrize("hider", HIDERS.values(), ids=HIDERS)
async def test_a_patch_behind_the_change_of_a_file_is_not_applied_unseen(bench, hider):
    """git reads on behind a complete change, and takes a patch there: a protected file was written by it."""
    hidden = "--- /dev/null\n+++ b/tests/conftest.py\n@@ -0,0 +1 @@\n+import sys\n"
    diff = f"diff --git a/notes.txt b/notes.txt\nnew file mode 100644\n{hider}"
    assert "does not apply" not in (await bench.evaluate(INTERVALS, diff.encode())).detail
    result = await bench.evaluate(INTERVALS, (diff + hidden).encode())
    assert result.reward == 0.0
    assert result.detail.startswith("the harness's diff does not apply: ")
    assert "tests/conftest.py" in result.detail


BREAKING = {
    "intervals": "sed -i 's/number < self._ends/number <= self._ends/' intervals/intervalset.py",
    "durations": "sed -i 's/appears twice/appears again/' durations/parsing.py",
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
    assert (result.reward, result.detail) == (0.0, "the harness changed nothing")
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


async def test_a_compiled_copy_of_another_python_masks_nothing(bench: Bench, tmp_path: Path) -> None:
    """Guards against masked sessions of all tasks whose command activates an environment of its own."""
    other = tmp_path / "other"
    copy = other / "site-packages" / "intervals"
    copy.mkdir(parents=True)
    (copy / "__init__.py").write_text("")
    (copy / "_fast.so").write_text("")
    (other / "python").write_text('#!/bin/sh\nPYTHONPATH=/opt/other/site-packages exec python3 "$@"\n')
    (other / "python").chmod(0o755)
    bench.mounts.append(Mount(other, "/opt/other"))
    bench.spec = bench.spec.model_copy(update={"environment": {"PATH": f"/opt/other:{PATH}"}})
    result = await bench.evaluate(INTERVALS, gold(INTERVALS))
    assert result.resolved, result.log


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


async def test_an_output_that_makes_the_search_endless_is_graded(bench, monkeypatch):
    """Guards against an agent that stops the gateway, or buys a mask, by what its program prints."""
    monkeypatch.setattr(pattern, "SEARCH_SECONDS", 1.0)
    diff = await bench.diff_after(INTERVALS, f"printf '{'a' * 60}!' > made.txt")
    command = "cat made.txt 2>/dev/null || true"
    result = await bench.evaluate(INTERVALS, diff, name="test_on_output", command=command, expected_output="(a+)+$")
    assert result.reward == 0.0
    assert "the search for '(a+)+$' took more than 1 seconds" in result.detail


PYTEST_LOG = "== short test summary info ==\\nPASSED t.py::a\\nFAILED t.py::b - x\\n== 1 failed, 1 passed in 0.1s =="
JUNIT = (
    "<testsuite><testcase classname='t' name='a'/><testcase classname='t' name='b'><failure/></testcase></testsuite>"
)
SKIPPED = "<testsuite><testcase classname='t' name='a'><skipped/></testcase></testsuite>"
SKIPS = "cd /tmp; printf 'import unittest\\nraise unittest.SkipTest(\"no\")\\n' > test_a.py;"
"""Tests that the code under test has skipped, by an exception when they import it."""


@pytest.mark.parametrize(
    ("options", "reward", "detail"),
    [
        ({"command": "echo ' a '", "exact_output": "a"}, 1.0, "as expected"),
        ({"command": "echo ab", "exact_output": "a"}, 0.0, "is not 'a'"),
        ({"command": "exit 7", "expected_exit_code": None}, 1.0, "as expected"),
        ({"log": PYTEST_LOG}, 0.0, "1 tests are not as expected: t.py::b FAILED"),
        ({"log": PYTEST_LOG, "expected_tests": ["t.py::a"]}, 1.0, "as expected"),
        ({"log": PYTEST_LOG, "expected_tests": {"t.py::a": "PASSED", "t.py::b": "FAILED"}}, 1.0, "as expected"),
        ({"log": PYTEST_LOG, "expected_tests": ["t.py::c"]}, 0.0, "t.py::c MISSING"),
        ({"log": "nothing"}, 0.0, "the command's log names no test"),
        ({"junit": "out/r.xml", "command": f'echo "{JUNIT}" > out/r.xml'}, 0.0, "t.b FAILED"),
        ({"junit": "r.xml", "command": f'echo "{JUNIT}" > r.xml', "expected_tests": ["t.a"]}, 1.0, "as expected"),
        ({"junit": "r.xml", "command": "echo '<a/>' > r.xml"}, 0.0, "not a JUnit report"),
        ({"junit": "r.xml", "command": f'echo "{SKIPPED}" > r.xml'}, 0.0, "every test was skipped (1)"),
        ({"command": f"{SKIPS} python3 -m unittest -v", "log_parser": "unittest"}, 0.0, "every test was skipped (1)"),
        ({"reward_file": "reward", "command": "echo 0.25 > reward"}, 0.25, "reward 0.25"),
        ({"reward_file": "/tmp/reward", "command": "echo 1 > /tmp/reward"}, 1.0, "as expected"),
        ({"reward_file": "reward", "command": "echo 7 > reward"}, 0.0, "not between 0 and 1"),
        ({"reward_file": "reward", "command": "echo nan > reward"}, 0.0, "not between 0 and 1"),
        ({"reward_file": "reward", "command": "echo much > reward"}, 0.0, "reward_file: could not convert"),
        (
            {"reward_file": "reward", "command": "echo 1 > reward; chmod 0 reward"},
            0.0,
            "reward_file: /workspace/reward",
        ),
    ],
)
async def test_on_what_the_command_reports(bench, options, reward, detail):
    options = dict(options)
    if "log" in options:
        options |= {"command": f"printf '{options.pop('log')}\\n'", "log_parser": "pytest"}
    diff = await bench.diff_after(INTERVALS, "touch made.txt")
    result = await bench.evaluate(INTERVALS, diff, name="test_on_output", **options)
    assert (result.reward, result.resolved) == (reward, reward == 1.0)
    assert detail in result.detail


@pytest.mark.parametrize(
    ("forged", "options"),
    [
        ("echo 1 > reward", {"reward_file": "reward"}),
        ("mkdir /tmp/x && echo 1 > /tmp/x/reward && ln -s /tmp/x out", {"reward_file": "out/reward"}),
        ("mkdir reward && touch reward/x", {"reward_file": "reward"}),
        ("echo \"<testsuite><testcase name='a'/></testsuite>\" > r.xml", {"junit": "r.xml"}),
        (
            "printf '#!/bin/sh\ntrue\n' > check.sh",
            {"command": "sh check.sh && test -f solved", "protected": ["check.sh"]},
        ),
    ],
)
async def test_result_that_the_agent_wrote_beforehand_is_not_the_commands(bench, forged, options):
    diff = await bench.diff_after(INTERVALS, forged)
    result = await bench.evaluate(INTERVALS, diff, **{"name": "test_on_output", "command": "true", **options})
    assert result.reward == 0.0


async def test_on_output_with_a_diff_that_does_not_apply(bench):
    diff = gold(INTERVALS).replace(b" first = ", b" fist = ")
    result = await bench.evaluate(INTERVALS, diff, name="test_on_output", command="true")
    assert result.reward == 0.0
    assert "does not apply" in result.detail
