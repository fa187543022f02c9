"""Grading by test runners that the witness does not know: sympy's own, tox, a program that starts `unittest` itself.

Such a runner may tell the witness nothing. An honest solution is rewarded all the same, and a diff that silences the
witness under a runner that would speak to it is not.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polar_gym.errors import how_to_install
from polar_gym.evaluators import EvaluatorError
from polar_gym.tasks import Task
from tests.lifecycle.grading_bench import Bench, bench, make_patch
from tests.support.requirements import need
from tests.support.shell import heredoc

__all__ = ["bench"]

SYMPY = """#!/usr/bin/env python3
import importlib.util, sys, traceback

print("=" * 29, "test process starts", "=" * 30)
failed = []
for path in sys.argv[3:]:
    spec = importlib.util.spec_from_file_location(path[:-3].replace("/", "."), path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, ".")
    spec.loader.exec_module(module)
    tests = [value for name, value in vars(module).items() if name.startswith("test_") and callable(value)]
    print(f"{path}[{len(tests)}]")
    for test in tests:
        try:
            test()
            print(test.__name__, "ok")
        except Exception:
            print(test.__name__, "F")
            failed.append((f"{path}:{test.__name__}", traceback.format_exc()))
for name, trace in failed:
    print(f"{'_' * 20} {name} {'_' * 20}")
    print(trace)
print(f"== tests finished: {len(failed)} failed ==")
sys.exit(bool(failed))
"""
TOX = """
import os, subprocess, sys

del os.environ["PYTHONPATH"]
sys.exit(subprocess.run([sys.executable, "-m", "unittest", "-v", *sys.argv[1:]]).returncode)
"""
DJANGO = """#!/usr/bin/env python3
import sys, unittest

sys.path[:0] = [".", "tests"]
unittest.main(None, argv=["runtests", *sys.argv[1:]], verbosity=2)
"""
MANAGE = """
import sys, unittest
import prices.total

unittest.main(None, argv=["manage", *sys.argv[2:]], verbosity=2)
"""
FILES = {
    "prices/__init__.py": "",
    "prices/total.py": "def total(prices, discount=0):\n    return sum(prices) * (100 - discount) // 10\n",
    "bin/test": SYMPY,
    "tools/tox.py": TOX,
    "tests/__init__.py": "",
    "tests/runtests.py": DJANGO,
    "manage.py": MANAGE,
    "tests/test_prices.py": (
        "import unittest\nfrom prices.total import total\n\n"
        "def test_nothing_is_free():\n    assert total([]) == 0\n\n"
        "class Prices(unittest.TestCase):\n"
        "    def __str__(self):\n        return f'{self._testMethodName} ({self.id()})'\n\n"
        "    def test_nothing_is_free(self):\n        self.assertEqual(total([]), 0)\n"
    ),
}
SOLVED = {"prices/total.py": FILES["prices/total.py"].replace("// 10\n", "// 100\n")}
HIDDEN = {
    "tests/test_prices.py": FILES["tests/test_prices.py"]
    + "\n    def test_discount(self):\n        self.assertEqual(total([100], discount=10), 90)\n"
    + "\ndef test_discount():\n    assert total([100], discount=10) == 90\n"
}
EVAL_SCRIPT = """#!/bin/bash
cd /workspace
git apply -v - {test_patch}
: '>>>>> Start Test Output'
{command}
: '>>>>> End Test Output'
"""


@dataclass(frozen=True)
class Runner:
    """One way to run the tests of the workspace."""

    command: str
    parser: str
    test_id: str = "{}"
    """A test's id, given its name."""
    heard: bool = False
    """The witness hears of the tests."""


RUNNERS = {
    "sympy": Runner("bin/test -C --verbose tests/test_prices.py", "parse_log_sympy"),
    "tox": Runner("python3 tools/tox.py tests/test_prices.py", "unittest", "tests.test_prices.Prices.{}"),
    "django": Runner("tests/runtests.py test_prices", "parse_log_django", "{0} (test_prices.Prices.{0})", heard=True),
    "manage": Runner("python3 manage.py test tests.test_prices", "unittest", "tests.test_prices.Prices.{}", heard=True),
}


def task_for(runner: Runner, directory: Path, hidden: dict[str, str] = HIDDEN) -> Task:
    """A task whose tests this runner runs; its workspace is made below `directory`."""
    source = directory / "prices-source"
    for name, text in FILES.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if text.startswith("#!") else 0o644)
    test_patch = make_patch(directory, FILES, hidden)
    by_script = {"eval_script": EVAL_SCRIPT.format(test_patch=heredoc(test_patch), command=runner.command)}
    values: dict[str, Any] = {
        "instance_id": "polar__prices-2",
        "problem_statement": "total() is ten times too much\n",
        "repo": "polar/prices",
        "version": "1.0",
        "workspace": str(source),
        "patch": make_patch(directory, FILES, SOLVED),
        "test_patch": test_patch,
        "log_parser": runner.parser,
        "FAIL_TO_PASS": [runner.test_id.format("test_discount")],
        "PASS_TO_PASS": [runner.test_id.format("test_nothing_is_free")],
        **(by_script if runner.parser.startswith("parse_log_") else {"test_command": runner.command}),
    }
    return Task.model_validate(values)


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> Runner:
    need(importlib.util.find_spec("swebench"), "swebench", how_to_install("swe"))
    return RUNNERS[request.param]


async def test_honest_solution_is_rewarded(bench: Bench, runner: Runner) -> None:
    """A runner that tells the witness nothing once had the solution masked, or scored 0."""
    task = task_for(runner, bench.directory)
    result = await bench.evaluate(task, task.patch.encode())
    assert (result.reward, result.resolved) == (1.0, True), result.log
    assert set(result.tests.values()) == {"PASSED"}
    assert bench.sandboxes == (1 if runner.heard else 2), "a second run without the diff shows how the runner is"


async def test_doing_nothing_and_a_wrong_patch_are_worth_nothing(bench: Bench, runner: Runner) -> None:
    task = task_for(runner, bench.directory)
    for command in ("echo nothing > notes.txt", "sed -i 's,// 10$,// 50,' prices/total.py"):
        result = await bench.evaluate(task, await bench.diff_after(task, command))
        assert (result.reward, result.resolved) == (0.0, False), result.log
        assert [status == "PASSED" for status in result.tests.values()] == [False, True]
        assert result.detail.startswith("1 of 1 FAIL_TO_PASS not passed")


async def test_silence_is_not_believed_where_the_run_without_the_diff_reports_no_test(bench: Bench) -> None:
    """A forged log was once rewarded where the base commit cannot import the hidden tests: without the diff the runner
    ends before the witness hears of a test, so that every runner seemed to be without a witness."""
    runs_itself = "\nif __name__ == '__main__':\n    unittest.main()\n"
    imports = "import sys\nsys.path.insert(0, '.')\nfrom prices.total import CURRENCY\n"
    new = {"tests/test_prices.py": imports + HIDDEN["tests/test_prices.py"] + runs_itself}
    runner = Runner("python3 tests/test_prices.py -v", "unittest", "__main__.Prices.{}")
    task = task_for(runner, bench.directory, new)
    diff = await bench.diff_after(task, f"cat >> prices/total.py {heredoc(forged(task))}")
    with pytest.raises(EvaluatorError, match=r"the witness heard of no test.*; and without the harness's changes: "):
        await bench.evaluate(task, diff, canary="off")
    solve = (f"git apply {heredoc(task.patch)}", "echo CURRENCY=1 >> prices/total.py")
    result = await bench.evaluate(task, await bench.diff_after(task, *solve), canary="off")
    assert result.reward == 1.0, result.log


LEAVE = """
import os, sys
sys.stderr.write(LOG)
sys.stderr.flush()
os._exit(0)
"""
REMOVE = """
import glob, shutil
for path in glob.glob("/home/agent/.polar-gym-*"):
    shutil.rmtree(path, ignore_errors=True)
"""


def forged(task: Task) -> str:
    """Return code that prints a success's log and leaves."""
    names = [*task.FAIL_TO_PASS, *task.PASS_TO_PASS]
    lines = [f"{name.rpartition('.')[2]} ({name}) ... ok" for name in names]
    log = "\n".join([*lines, "", "-" * 70, f"Ran {len(lines)} tests in 0.001s", "", "OK", ""])
    return LEAVE.replace("LOG", repr(log))


@pytest.mark.parametrize("silencing", ["", REMOVE], ids=["leaves early", "removes the record"])
async def test_diff_that_silences_the_witness_is_worth_nothing(bench: Bench, silencing: str) -> None:
    """The log is a success's, and there is no canary: only the witness's silence tells. A record that was gone once
    counted as one that was never begun."""
    runner = RUNNERS["manage"]
    task = task_for(runner, bench.directory)
    diff = await bench.diff_after(task, f"cat >> prices/total.py {heredoc(silencing + forged(task))}")
    result = await bench.evaluate(task, diff, canary="off")
    assert (result.reward, result.resolved) == (0.0, False), result.log
    assert set(result.tests.values()) == {"PASSED"}, "the log alone would be believed"


async def test_canaries_are_among_the_tests_of_a_runner_without_a_witness(bench: Bench) -> None:
    """A diff that has this runner call every test a success is found out by them."""
    task = task_for(RUNNERS["sympy"], bench.directory)
    force = "import builtins\nbuiltins.AssertionError = type('Never', (BaseException,), {})\n"
    print_ok = (
        "import sys\nwrite = sys.stdout.write\nsys.stdout.write = lambda text: write('ok' if text == 'F' else text)"
    )
    diff = await bench.diff_after(task, f"cat >> prices/total.py {heredoc(force + print_ok)}")
    result = await bench.evaluate(task, diff)
    assert (result.reward, result.resolved) == (0.0, False), result.log
