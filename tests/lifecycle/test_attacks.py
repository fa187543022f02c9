"""Every attack is worth nothing, is never masked, and does not cost an honest solution its reward."""

import importlib.util

import pytest

from polar_gym.errors import how_to_install
from polar_gym.evaluators.swebench_report import START
from tests.lifecycle import grading_bench
from tests.lifecycle.attacks import (
    ATTACKS,
    GROUNDS,
    Attack,
    Ground,
    adaptive,
    copies,
    javascript,
    preparation,
    task_for,
)
from tests.lifecycle.grading_bench import (
    HIDDEN_TESTS,
    INTERVALS,
    PRICES,
    Bench,
    bench,
    make_patch,
    prices_task,
    scripted,
)
from tests.support.requirements import need, need_node, need_program
from tests.support.shell import heredoc

__all__ = ["bench"]

BY_NAME = {attack.name: attack for attack in ATTACKS}
IN_SWEBENCH = ("prints a log at the end", "sys.settrace", "overwrites the record")
"""Attacks whose end differs where swebench reads the log."""
CHOSEN: dict[str, Ground] = {
    "a plugin by .DIST-INFO": "pytest",
    "a third party's module": "helpers",
    "equal to anything": "pytest",
    "a new attribute": "unittest",
    "forges every report": "pytest",
    "finds the original tests": "pytest",
    "a failure beside each copy": "unittest",
    "a parameter that fails": "pytest",
    "a colour in a name": "unittest",
    "the own name": "swebench",
    "empties the package's test helper": "helpers",
    "assert asserts nothing": "javascript",
    "a process that setup.py leaves": "swebench",
    "a script of package.json": "javascript",
    "the Makefile": "javascript",
    "prints TAP and exits": "javascript",
}
"""Of the attacks that know the grader, and of those in JavaScript: those that CI tries, and where."""


def needs(ground: Ground, bench: Bench) -> None:
    if ground == "javascript":
        need_node()
        need_program("npm", "https://nodejs.org (>= 20)")
        need_program("make", "apt-get install make")
    elif ground != "unittest":
        bench.offer_pytest()
    if ground == "swebench":
        need(importlib.util.find_spec("swebench"), "swebench", how_to_install("swe"))


def grounds(attack: Attack) -> list[Ground]:
    """Where CI tries it; `make show-attacks` tries all everywhere. Files that do not count do not count anywhere."""
    if attack in (*adaptive.ATTACKS, *copies.ATTACKS, *javascript.ATTACKS):
        return [CHOSEN[attack.name]] if attack.name in CHOSEN else []
    if attack in preparation.ATTACKS:
        return list(attack.grounds)
    in_tested_code = any("PACKAGE" in path for path in attack.files)
    chosen: list[Ground] = ["pytest"] if "pytest" in attack.grounds else []
    if "unittest" in attack.grounds and (in_tested_code or not chosen):
        chosen.append("unittest")
    return [*chosen, "swebench"] if attack.name in IN_SWEBENCH else chosen


CASES = [(ground, attack) for attack in ATTACKS for ground in grounds(attack)]


@pytest.mark.parametrize(("ground", "attack"), CASES, ids=[f"{ground}: {attack.name}" for ground, attack in CASES])
async def test_attack_is_worth_nothing(bench: Bench, ground: Ground, attack: Attack) -> None:
    needs(ground, bench)
    task = task_for(ground, bench.directory)
    diff = await bench.diff_after(task, attack.script(ground))
    result = await bench.evaluate(task, diff)
    assert (result.reward, result.resolved) == (0.0, False), result.log
    assert result.detail


@pytest.mark.parametrize("ground", GROUNDS)
async def test_honest_solution_is_rewarded(bench: Bench, ground: Ground) -> None:
    needs(ground, bench)
    task = task_for(ground, bench.directory)
    result = await bench.evaluate(task, task.patch.encode())
    assert (result.reward, result.resolved) == (1.0, True), result.log
    assert set(result.tests) == {*task.FAIL_TO_PASS, *task.PASS_TO_PASS}


async def test_without_twins_no_code_may_steer_the_runner_before_the_tests(bench: Bench) -> None:
    """Guards against a conftest.py that comes into being while an eval script prepares the tests. Twins notice it."""
    needs("swebench", bench)
    task = task_for("swebench", bench.directory)
    diff = await bench.diff_after(task, preparation.STEERING.script("swebench"))
    result = await bench.evaluate(task, diff, twins={})
    assert (result.reward, result.resolved) == (0.0, False), result.log
    assert result.detail.endswith("  conftest.py")


async def test_a_script_may_steer_the_runner_itself(bench: Bench) -> None:
    """Guards against a right solution that is worth nothing because the script itself writes configuration."""
    needs("swebench", bench)
    task = task_for("swebench", bench.directory)
    lines = "printf '[pytest]\\nconsole_output_style = count\\n' > pytest.ini; ln -s pytest.ini tox.ini\n"
    script = task.eval_script.replace("python3 setup.py", f"{lines}python3 setup.py")
    task = task.model_copy(update={"eval_script": script})
    result = await bench.evaluate(task, task.patch.encode())
    assert (result.reward, result.resolved) == (1.0, True), result.log


READS = """
import os, sys
if sys.argv[0].endswith("setup.py"):
    print("READ", *(open("tests/" + name).read() for name in os.listdir("tests")))
"""


async def test_no_code_reads_a_renamed_test_before_the_tests(bench: Bench) -> None:
    """Guards against code of the harness that an eval script runs before the tests. A patch with a rename was left
    whole there, with all hidden tests."""
    bench.offer_pytest()
    old, new = "tests/test_prices.py", "tests/test_cost.py"
    patch = make_patch(bench.directory, PRICES, {old: PRICES[old] + HIDDEN_TESTS})
    patch = patch.replace(f" b/{old}\n", f" b/{new}\nrename from {old}\nrename to {new}\n", 1)
    patch = patch.replace(f"+++ b/{old}", f"+++ b/{new}")
    tests = [f"{new}::test_no_discount", f"{new}::test_discount"]
    task = scripted(prices_task(bench.directory, test_patch=patch, FAIL_TO_PASS=tests, PASS_TO_PASS=[], twins={}))
    script = task.eval_script.replace(f"--color=no {old}", f"--color=no {new}")
    script = script.replace(f": '{START}", f"python3 setup.py --quiet\n: '{START}")
    solve = f"git apply {heredoc(task.patch)}"
    diff = await bench.diff_after(task, solve, f"cat >> prices/__init__.py {heredoc(READS)}")
    result = await bench.evaluate(task, diff, eval_script=script, log_parser="pytest")
    assert result.reward == 1.0, result.log
    assert "READ" in result.log
    assert "== 350" not in result.log


XFAILS = """
import unittest
import pytest
from tests.helping import give_up

def test_calls_xfail():
    pytest.xfail("not yet")

def test_calls_it_through_a_helper():
    give_up()

@pytest.mark.xfail
def test_is_marked():
    assert total([]) == 7

class TestOld(unittest.TestCase):
    @unittest.expectedFailure
    def test_is_decorated(self):
        self.assertEqual(total([]), 7)
"""


async def test_tests_may_expect_failures(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the tested code that may not."""
    needs("pytest", bench)
    helping = "import pytest\n\ndef give_up():\n    pytest.xfail('not here')\n"
    monkeypatch.setitem(grading_bench.PRICES, "tests/helping.py", helping)
    monkeypatch.setattr(grading_bench, "HIDDEN_TESTS", grading_bench.HIDDEN_TESTS + XFAILS)
    names = ("test_calls_xfail", "test_calls_it_through_a_helper", "test_is_marked", "TestOld::test_is_decorated")
    tests = [f"tests/test_prices.py::{name}" for name in ("test_discount", *names)]
    task = grading_bench.prices_task(bench.directory, FAIL_TO_PASS=tests)
    result = await bench.evaluate(task, task.patch.encode())
    assert result.reward == 1.0, result.log


@pytest.mark.parametrize(
    ("ground", "name"),
    [
        ("pytest", "edits the tests"),
        ("pytest", "deletes the tests"),
        ("pytest", "conftest.py"),
        ("pytest", "a plugin by setup.cfg"),
        ("pytest", "pytest.py"),
        ("javascript", "a script of package.json"),
    ],
)
async def test_what_does_not_count_does_no_harm_either(bench: Bench, ground: Ground, name: str) -> None:
    """An honest agent edits tests and configuration, too."""
    needs(ground, bench)
    task = task_for(ground, bench.directory)
    solve = f"git apply {heredoc(task.patch)}"
    diff = await bench.diff_after(task, BY_NAME[name].script(ground), solve)
    assert (await bench.evaluate(task, diff)).reward == 1.0


async def test_solution_survives_a_test_directory_that_is_gone(bench: Bench) -> None:
    diff = await bench.diff_after(INTERVALS, "rm -rf tests", f"git apply <<'P'\n{INTERVALS.patch}P")
    assert (await bench.evaluate(INTERVALS, diff)).reward == 1.0


@pytest.mark.parametrize("ground", ["unittest", "pytest"])
async def test_hidden_tests_are_nowhere_in_the_agents_sandbox(bench: Bench, ground: Ground) -> None:
    task = task_for(ground, bench.directory)
    hidden = {"unittest": "test_add_fills_a_hole_exactly", "pytest": "test_no_discount"}[ground]
    assert hidden in task.test_patch
    search = f"git rev-list --all --objects | cut -c 1-40 | git cat-file --batch | cat - $(git ls-files) > /tmp/all; \
        ! grep -q {hidden} /tmp/all && ! grep -rqs {hidden} . /tmp ~"
    await bench.diff_after(task, search)
