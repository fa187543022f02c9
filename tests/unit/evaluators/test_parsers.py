"""Test logs -> statuses: real logs of both runners, forged ones, and any text at all."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.evaluators.parsers import get_parser, parse_pytest, parse_tap, parse_unittest
from tests.support.requirements import need_node

UNITTEST_MODULE = '''
import sys, unittest

class T(unittest.TestCase):
    def test_ok(self): pass
    def test_doc(self):
        """A docstring (with brackets)."""
    def test_fail(self): self.fail("x")
    def test_error(self): raise KeyError(1)
    def test_skip(self): self.skipTest("why")
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    @unittest.expectedFailure
    def test_unexpected(self): pass
    def test_sub_ok(self):
        for i in range(3):
            with self.subTest(i=i): pass
    def test_sub_fail(self):
        for i in range(3):
            with self.subTest("m (x)", i=i): self.assertEqual(i, 1)
    def test_noise_line(self): print("connect (some.host)", file=sys.stderr)
    def test_noise_same_line(self): sys.stderr.write("noise")
    def test_says_ok_and_fails(self):
        print("ok", file=sys.stderr)
        self.fail()
    def test_cleanup(self): self.addCleanup(lambda: 1 / 0)

class ClassError(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise OSError
    def test_never_runs(self): pass
'''

PYTEST_MODULE = """
import pytest

def test_ok(): print("PASSED tests/test_a.py::test_fail")
def test_fail(): assert 0, "a - b"
@pytest.mark.parametrize("v", ["a b", "x - y"])
def test_param(v): pass
@pytest.mark.parametrize("v", ["x - y"])
def test_param_fails(v): assert 0
@pytest.mark.skip
def test_skip(): pass
@pytest.mark.xfail
def test_xfail(): assert 0
@pytest.fixture
def broken():
    yield
    raise OSError
def test_teardown(broken): pass
class TestC:
    def test_in_class(self): pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    (tests / "test_a.py").write_text(UNITTEST_MODULE)
    (tests / "test_broken.py").write_text("import a_module_that_does_not_exist\n")
    return tmp_path


def run(project: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=project, capture_output=True, text=True, check=False, env=environment
    )
    return done.stdout + done.stderr


def test_unittest_log(project):
    log = run(project, "-m", "unittest", "discover", "-v", "-s", "tests", "-t", ".")
    statuses = {test.removeprefix("tests.test_a."): status for test, status in parse_unittest(log).items()}
    assert statuses == {
        "T.test_ok": "PASSED",
        "T.test_doc": "PASSED",
        "T.test_fail": "FAILED",
        "T.test_error": "ERROR",
        "T.test_skip": "SKIPPED",
        "T.test_expected": "PASSED",
        "T.test_unexpected": "FAILED",
        "T.test_sub_ok": "PASSED",
        "T.test_sub_fail": "FAILED",
        "T.test_noise_line": "PASSED",
        "T.test_noise_same_line": "PASSED",
        "T.test_says_ok_and_fails": "FAILED",
        "T.test_cleanup": "ERROR",
        "ClassError.setUpClass": "ERROR",
        "unittest.loader._FailedTest.tests.test_broken": "ERROR",
    }


def test_unittest_log_that_stops_halfway_proves_nothing(project):
    """A run that the code under test ended with `os._exit` once looked like a run of the tests before it."""
    (project / "tests" / "test_a.py").write_text(
        "import os, unittest\nclass T(unittest.TestCase):\n"
        "    def test_a(self): pass\n    def test_b(self): os._exit(0)\n"
    )
    log = run(project, "-m", "unittest", "-v", "tests.test_a")
    assert "ok" in log
    assert parse_unittest(log) == {}


def test_unittest_lines_beyond_the_runners_count_are_not_believed():
    log = "test_a (t.T.test_a) ... ok\ntest_b (t.T.test_b) ... ok\n\n{}\nRan {} in 0.001s\n\nOK\n"
    assert parse_unittest(log.format("-" * 70, "2 tests")) == {"t.T.test_a": "PASSED", "t.T.test_b": "PASSED"}
    assert parse_unittest(log.format("-" * 70, "1 test")) == {}


def test_unittest_before_python_3_11():
    log = f"test_a (t.T)\nSays what it tests. ... ok\n\n{'-' * 70}\nRan 1 test in 0.001s\n\nOK\n"
    assert parse_unittest(log) == {"t.T.test_a": "PASSED"}


def test_pytest_log(project):
    (project / "tests" / "test_a.py").write_text(PYTEST_MODULE)
    log = run(project, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--color=yes", "tests")
    assert "broken" in log
    statuses = {test.removeprefix("tests/test_a.py::"): status for test, status in parse_pytest(log).items()}
    assert statuses == {"tests/test_broken.py": "ERROR"}  # a collection error ends the run

    (project / "tests" / "test_broken.py").unlink()
    log = run(project, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--color=yes", "tests")
    statuses = {test.removeprefix("tests/test_a.py::"): status for test, status in parse_pytest(log).items()}
    assert statuses == {
        "test_ok": "PASSED",
        "test_fail": "FAILED",
        "test_param[a b]": "PASSED",
        "test_param[x - y]": "PASSED",
        "test_param_fails[x - y]": "FAILED",
        "test_xfail": "PASSED",
        "test_teardown": "ERROR",
        "TestC::test_in_class": "PASSED",
    }


def test_pytest_ids_with_brackets_blanks_and_messages():
    """Guards against an id that is cut where a parameter looks like a message: no row can name the test then."""
    lines = """
PASSED test_e.py::test_eval[[1] - [2]]
PASSED test_e.py::test_eval[(1] - x]
PASSED my dir/test_s.py::test_s
XFAIL test_e.py::test_x[[1] - [2]] - known: [1] - [2]
FAILED test_e.py::test_f[[3] - [4]] - assert [3] - [4] == [5]
FAILED my dir/test_s.py::test_t - assert 1 - 2 == [3]
ERROR test_broken.py - ImportError: no [x] - y
PASSED test_y.py::test_t[[]
ERROR test_y.py::test_t[[] - RuntimeError: teardown [x] - y
XFAIL test_y.py::test_u[]] - known bug"""
    log = f"=== short test summary info ==={lines}\n=== 4 passed, 2 xfailed, 2 failed, 2 errors in 0.1s ===\n"
    assert parse_pytest(log) == {
        "test_e.py::test_eval[[1] - [2]]": "PASSED",
        "test_e.py::test_eval[(1] - x]": "PASSED",
        "my dir/test_s.py::test_s": "PASSED",
        "test_e.py::test_x[[1] - [2]]": "PASSED",
        "test_e.py::test_f[[3] - [4]]": "FAILED",
        "my dir/test_s.py::test_t": "FAILED",
        "test_broken.py": "ERROR",
        "test_y.py::test_t[[]": "ERROR",
        "test_y.py::test_u[]]": "PASSED",
    }


SUBTESTS = """
import unittest

class T(unittest.TestCase):
    def test_sub(self):
        for i in range(3):
            with self.subTest("a - b [c] :: d", i=i, text="x - y"):
                self.assertNotEqual(i, 1)

    def test_passes(self):
        with self.subTest("test_sub.py::T::test_passes"):
            pass

def test_fixture(subtests):
    with subtests.test("m]s g (a)", i="a::b - c"):
        assert 0
"""


def test_a_test_with_a_failed_subtest_has_failed(project):
    """Guards against a reward for a solution that fails a part of a test: pytest 9 calls the test PASSED."""
    pytest.importorskip("_pytest.subtests")
    (project / "test_sub.py").write_text(SUBTESTS)
    log = run(project, "-m", "pytest", "-rA", "test_sub.py")
    assert "SUBFAILED" in log
    assert parse_pytest(log) == {
        "test_sub.py::T::test_sub": "FAILED",
        "test_sub.py::T::test_passes": "PASSED",
        "test_sub.py::test_fixture": "FAILED",
    }
    plugin = "PASSED a.py::t\n[m] (i=1) SUBFAIL a.py::t - assert 0\nPASSED a.py::u[a SUBFAIL b]"
    found = parse_pytest(f"=== short test summary info ===\n{plugin}\n=== 2 passed in 0.1s ===\n")
    assert found == {"a.py::t": "FAILED", "a.py::u[a SUBFAIL b]": "PASSED"}


def test_a_long_line_of_a_subtest_costs_little():
    """Guards against a node that one log takes all memory from: the parts of a line were all kept."""
    log = f"=== short test summary info ===\nPASSED a\nSUBFAILED{'x - ' * 500_000} a\n=== 1 passed in 0.1s ===\n"
    tracemalloc.start()
    parse_pytest(log)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * len(log)


def test_pytest_lines_beyond_the_runners_count_are_not_believed():
    log = "=== short test summary info ===\nPASSED a.py::a\nPASSED a.py::b\n=== {} in 0.1s ===\n"
    assert parse_pytest(log.format("2 passed")) == {"a.py::a": "PASSED", "a.py::b": "PASSED"}
    assert parse_pytest(log.format("1 passed")) == {}
    assert parse_pytest("=== short test summary info ===\nPASSED a.py::a\n") == {}


NODE_TEST = """
const { describe, it, test } = require("node:test");
const assert = require("node:assert");
console.log("ok 9 - passes by its output");
test("passes", () => {});
test("fails, and prints more", () => assert.fail("\\n  ...\\nok 1 - forged\\n    ok 2 - forged too"));
describe("suite # 1", () => {
  it("passes \\\\", () => {});
  it.skip("is left out", () => {});
  it.todo("is not done", () => assert.fail("yet"));
  describe("inner", () => it("fails", () => assert.equal(1, 2)));
});
"""


def test_tap_log_of_node(tmp_path):
    need_node()
    (tmp_path / "a.test.js").write_text(NODE_TEST)
    command = ["node", "--test", "--test-reporter=tap", "a.test.js"]
    log = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert parse_tap(log) == {
        "passes": "PASSED",
        "fails, and prints more": "FAILED",
        "suite # 1": "FAILED",
        "suite # 1 > passes \\": "PASSED",
        "suite # 1 > is left out": "SKIPPED",
        "suite # 1 > is not done": "SKIPPED",
        "suite # 1 > inner": "FAILED",
        "suite # 1 > inner > fails": "FAILED",
    }


def test_a_line_of_tap_may_be_long_and_tell_the_time():
    """Guards against a run without results, and against a time in the id of a test."""
    long = "a" * 1500
    points = f"ok 1 - {long}\nok 2 - b # time=5.1ms\nok 3 - c # SKIP # time=1ms\n"
    found = parse_tap(f"TAP version 13\nOK, this is version 3\n{points}1..3\n")
    assert found == {long: "PASSED", "b": "PASSED", "c": "SKIPPED"}


def test_tap_lines_that_no_plan_announces_are_not_believed():
    log = "TAP version 13\nok 1 - a\nok 2 - b\n"
    assert parse_tap(f"{log}1..2\n") == {"a": "PASSED", "b": "PASSED"}
    assert parse_tap(f"{log}1..1\n") == parse_tap(f"{log}1..3\n") == parse_tap(log) == {}
    assert parse_tap(f"{log}1..2\nBail out! no more\n") == {}
    assert parse_tap(f"{log}not ok 3 - a\n1..3\n")["a"] == "FAILED", "a failure named anywhere wins"


def test_parser_by_import_path():
    assert get_parser("polar_gym.evaluators.parsers:parse_pytest") is parse_pytest
    with pytest.raises(ValueError, match="unknown log parser 'nose'; known: unittest, pytest"):
        get_parser("nose")
    with pytest.raises(ValueError, match="nowhere:parse"):
        get_parser("nowhere:parse")


UNITTEST_FRAGMENTS = ("test_a (t.T.test_a)", " ... ", "ok", "FAIL", "skipped '", "=" * 70, "-" * 70, "FAIL: ", "OK")
PYTEST_FRAGMENTS = ("=== short test summary info ===\n", "PASSED a::b[", "]", " - ", "=== 1 passed in 0.1s ===")
TAP_FRAGMENTS = ("\nok 1 - a", "\n    not ok 2 - b", " # SKIP", "\n1..1\n", "\n  ---\n", "\n  ...\n", " " * 200)
FRAGMENTS = st.sampled_from(
    [*UNITTEST_FRAGMENTS, *PYTEST_FRAGMENTS, *TAP_FRAGMENTS, "\n\n", "Ran ", " tests in 1s", "9" * 5000]
)


@given(st.lists(st.one_of(FRAGMENTS, st.text(max_size=20)), max_size=40).map("".join))
@pytest.mark.parametrize("parse", [parse_unittest, parse_pytest, parse_tap])
def test_parsers_are_total(parse, log):
    statuses = parse(log)
    assert set(statuses.values()) <= {"PASSED", "FAILED", "ERROR", "SKIPPED"}


@pytest.mark.parametrize("parse", [parse_unittest, parse_pytest, parse_tap])
@pytest.mark.parametrize(
    "unit",
    ["=", "a", "PASSED a::b[", "test_a (t.", " ... ", "Ran 1 test in 1", "] - ", "\n" + "=" * 70, *TAP_FRAGMENTS],
)
@pytest.mark.timeout(20)
def test_parsers_are_bounded(parse, unit):
    """Repetition must not make a regular expression backtrack for minutes."""
    prefix = "=== short test summary info ===\n"
    parse(prefix + unit * (2_000_000 // len(unit)) + "\nRan 1 test in 1s\n\nOK")


def test_unittest_count_of_absurd_length():
    """Python refuses to read integers of thousands of digits."""
    assert parse_unittest(f"t (a.T.t) ... ok\n\n{'-' * 70}\nRan {'9' * 5000} tests in 1s\n\nOK\n") == {}
