"""What is compared of two runs of altered tests: statuses and messages, in the logs of two runners."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from polar_gym.curation.equivalence import _altered, comparable, outcomes
from polar_gym.evaluators.expectations import find_tests
from polar_gym.evaluators.parsers import PARSERS
from tests.lifecycle.grading_bench import BUNDLED

CODE = """\
def half(value):
    if value < 0:
        raise ValueError(f"{value} is negative")
    return {value // 2: object()} if value > 90 else value // 2
"""
TESTS = """\
import unittest
from code_of_task import half

class HalfTest(unittest.TestCase):
    def test_right(self):
        self.assertEqual(half(4), 2)

    def test_value(self):
        self.assertEqual([half(7), 1], [1, 1])

    def test_error(self):
        half(-3)

    def test_address(self):
        self.assertEqual(half(98), 5)

    def test_detail(self):
        assert sorted([half(9), 1]) == [1, 1]
"""
NAMES = ["test_right", "test_value", "test_error", "test_address", "test_detail"]
COMMANDS = {
    "pytest": ["pytest", "-rA", "--color=no", "-p", "no:cacheprovider", "test_code.py"],
    "unittest": ["unittest", "-v", "test_code"],
}


def run(directory: Path, runner: str, code: str) -> dict[str, str]:
    directory.mkdir()
    (directory / "code_of_task.py").write_text(code)
    (directory / "test_code.py").write_text(TESTS)
    command = shlex.join([sys.executable, "-m", *COMMANDS[runner]])
    task = comparable(BUNDLED["intervals"].model_copy(update={"test_command": command}))
    script = ["sh", "-c", task.test_command]
    done = subprocess.run(script, cwd=directory, capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    assert "def test_" not in log  # pytest parses the whole file again for the source of each failure
    return outcomes(NAMES, PARSERS[runner](log), log)


@pytest.mark.parametrize("runner", COMMANDS)
def test_outcomes_differ_where_the_behaviour_does(tmp_path, runner):
    told = run(tmp_path / "one", runner, CODE)
    assert sorted(told) == sorted(NAMES)
    assert told["test_right"].endswith("test_right PASSED\n")
    assert "-3 is negative" in told["test_error"]
    if runner == "pytest":
        assert "At index 1 diff: 4 != 1" in told["test_detail"]
    alike = CODE.replace("    if value < 0:\n", "    # negative?\n\n    if value <= -1:\n")
    assert run(tmp_path / "alike", runner, alike) == told
    wrong = CODE.replace("is negative", "is below 0").replace("value // 2\n", "value // 2 if value != 7 else 4\n")
    other = run(tmp_path / "wrong", runner, wrong)
    assert {name for name in NAMES if other[name] != told[name]} == {"test_error", "test_value"}


def test_all_literals_of_a_test_are_found():
    source = """\
@parametrize("number, text", [(1, "a"), (2, f"{3}b")])
def test_a(number, text, more=4):
    "Docstring."
    assert f(number, [5, "c"], g={}) == None or b"d"
"""
    (test,) = find_tests(source.encode(), all_literals=True)
    found = [source[each.start : each.end] for each in test.expectations]
    assert found == ["1", '"a"', "2", "5", '"c"', "{}", "None", 'b"d"']


def test_texts_over_several_lines_are_altered():
    source = b"""\
def test_a():
    text = "one "
    assert f("two "
             'three') == text, ("four"
                                "five")
"""
    changes: dict[str, str] = {}
    made = _altered(BUNDLED["intervals"], {"test_a.py": source}, changes)
    compile(made.texts["test_a.py"], "test_a.py", "exec")
    assert any("two three" in change for change in changes.values())
    assert not any("\n" in change for change in changes.values())


@pytest.mark.parametrize("tests", [1, 40, 400])
def test_few_tests_have_as_many_copies_as_many(tests):
    """Guards against a comparison of 95 inputs, which took a wrong patch of a task with six tests for equivalent."""
    source = "\n".join(f"def test_{number}():\n    assert f({number}, 3, 'text') == 4\n" for number in range(tests))
    changes: dict[str, str] = {}
    _altered(BUNDLED["intervals"], {"test_a.py": source.encode()}, changes)
    assert 500 < len(set(changes.values())) <= 768


def test_sets_have_one_order_in_all_runs():
    """Guards against a patch that counts as wrong because a message lists a set in another order."""
    prints = f"{sys.executable} -c 'print(set(map(str, range(9))))'"
    task = comparable(BUNDLED["intervals"].model_copy(update={"test_command": prints}))
    told = {subprocess.run(["sh", "-c", task.test_command], capture_output=True, check=True).stdout for _ in range(4)}
    assert len(told) == 1
