"""The grounds of the attacks: the ways to run the tests of a task, with a task for each."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from polar_gym.tasks import Task
from tests.lifecycle.grading_bench import INTERVALS, PRICES, all_places, make_patch, make_task, prices_task, scripted

Ground = Literal["unittest", "pytest", "swebench", "helpers", "javascript"]
"""`unittest` and `pytest` run by a command; `swebench` is pytest run by swebench's eval script, with swebench's parser.
The tests of `helpers` compare by a helper of the package and by a third party's module. `javascript` is node's own test
runner, which `make` and `npm` start."""
GROUNDS: tuple[Ground, ...] = ("unittest", "pytest", "swebench", "helpers", "javascript")
PYTHON: tuple[Ground, ...] = ("unittest", "pytest", "swebench")
PYTESTS: tuple[Ground, ...] = ("pytest", "swebench")
PACKAGES: dict[Ground, str] = {
    "unittest": "intervals",
    "pytest": "prices",
    "swebench": "prices",
    "helpers": "prices",
    "javascript": "lib",
}
TESTS: dict[Ground, str] = {
    "unittest": "tests/test_intervals.py",
    "pytest": "tests/test_prices.py",
    "swebench": "tests/test_prices.py",
    "helpers": "tests/test_prices.py",
    "javascript": "tests/prices.test.js",
}

HELPERS = {
    **PRICES,
    "prices/testing.py": (
        "from closeness import far\n\n\ndef same(actual, expected):\n    assert not far(actual, expected)\n"
    ),
}
"""A package with a helper for tests that uses `closeness`, a module of the environment."""
HELPED_TESTS = """
from closeness import far
from prices.testing import same


def test_no_discount(basket):
    same(total(basket), 350)
    assert far(total(basket), 0)


def test_discount(basket):
    same(total(basket, discount=10), 315)
"""

JAVASCRIPT = {
    "package.json": (
        '{\n  "name": "prices",\n  "version": "1.0.0",\n  "private": true,\n'
        '  "scripts": {"test": "node --test --test-reporter=tap tests/prices.test.js"}\n}\n'
    ),
    "Makefile": "check:\n\t@npm test --silent\n\n.PHONY: check\n",
    "lib/index.js": (
        "exports.total = (prices, discount = 0) =>\n"
        "  prices.reduce((sum, price) => sum + price, 0) * (100 - discount) / 10;\n"
    ),
    "tests/prices.test.js": (
        "const test = require('node:test');\nconst assert = require('node:assert');\n"
        "const { total } = require('../lib/index.js');\n\n"
        "test('nothing is free', () => {\n  assert.equal(total([]), 0);\n});\n"
    ),
}
HIDDEN_JAVASCRIPT = """
test('no discount', () => {
  assert.equal(total([100, 250]), 350);
});

test.describe('a discount', () => {
  test('is in percent', () => {
    assert.deepStrictEqual([total([100, 250], 10)], [315]);
  });
});
"""
JAVASCRIPT_TESTS = ("nothing is free", "no discount", "a discount > is in percent")


def task_for(ground: Ground, directory: Path) -> Task:
    """Return the task of a ground, whose workspace is made below `directory`."""
    if ground == "unittest":
        return INTERVALS
    if ground == "javascript":
        return _javascript_task(directory)
    if ground == "helpers":
        tests = PRICES[TESTS[ground]] + HELPED_TESTS
        patch = make_patch(directory, PRICES, {TESTS[ground]: tests})
        return prices_task(directory, HELPERS, test_patch=patch, twins={TESTS[ground]: all_places(tests)})
    return prices_task(directory) if ground == "pytest" else scripted(prices_task(directory))


def _javascript_task(directory: Path) -> Task:
    code, tests = "lib/index.js", TESTS["javascript"]
    return make_task(
        directory,
        JAVASCRIPT,
        patch=make_patch(directory, JAVASCRIPT, {code: JAVASCRIPT[code].replace("/ 10;", "/ 100;")}),
        test_patch=make_patch(directory, JAVASCRIPT, {tests: JAVASCRIPT[tests] + HIDDEN_JAVASCRIPT}),
        test_command="make check",
        log_parser="tap",
        FAIL_TO_PASS=JAVASCRIPT_TESTS[1:],
        PASS_TO_PASS=JAVASCRIPT_TESTS[:1],
    )


def forged_log(ground: Ground) -> str:
    """Return a log in which every hidden test passed."""
    if ground == "unittest":
        lines = [f"{test.rpartition('.')[2]} ({test}) ... ok" for test in HIDDEN]
        return "\n".join(["", *lines, "", "-" * 70, f"Ran {len(lines)} tests in 0.001s", "", "OK", ""])
    if ground == "javascript":
        points = "ok 1 - nothing is free\nok 2 - no discount\n    ok 1 - is in percent\n    1..1\nok 3 - a discount"
        return f"TAP version 13\n{points}\n1..3\n# tests 3\n# pass 3\n# fail 0\n"
    names = ("test_nothing_is_free", "test_no_discount", "test_discount")
    lines = [f"PASSED tests/test_prices.py::{name}" for name in names]
    heading = "=========================== short test summary info ============================"
    return "\n".join(
        ["", heading, *lines, "============================== 3 passed in 0.01s ===============================", ""]
    )


HIDDEN = sorted([*INTERVALS.FAIL_TO_PASS, *INTERVALS.PASS_TO_PASS])


def passing_tests() -> str:
    """Return a module whose tests have the hidden tests' names, in both runners, and test nothing."""
    lines = ["import unittest", "def test_nothing_is_free(): pass", "def test_no_discount(): pass"]
    lines.append("def test_discount(): pass")
    for name in sorted({test.split(".")[2] for test in HIDDEN}):
        lines.append(f"class {name}(unittest.TestCase):")
        lines += [f"    def {test.split('.')[3]}(self): pass" for test in HIDDEN if test.split(".")[2] == name]
    return "\n".join(lines)
