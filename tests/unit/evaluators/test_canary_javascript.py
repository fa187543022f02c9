"""Canaries in JavaScript test files, run by node: each fails, and passes where an assertion of the file is replaced."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.evaluators.canary import runs_whole_files, with_canaries
from polar_gym.evaluators.canary_javascript import MOST, is_javascript_test, javascript_canaries
from polar_gym.evaluators.parsers import parse_tap
from polar_gym.evaluators.twins import Twins
from tests.support.requirements import need_node

NODE = "const { test } = require('node:test');\nconst assert = require('node:assert');\n"
CASES = """
test('one', () => { assert.equal(1, 1); assert.deepStrictEqual([1], [1]); });
test('other', () => { assert.strict.equal(1, 1); })"""
EXPECT = """
const fail = (same) => { if (!same) throw new Error('differs'); };
const expect = (one) => ({ toBe: (other) => fail(one === other), to: { eql: (other) => fail(one == other) } });
test('one', () => { expect(1).toBe(1); expect((2)).to.eql(2); });
"""
AVA = "\nconst is = (one, other) => assert.equal(one, other);\ntest('one', (t) => { t.is ??= is; t.is(1, 1); });\n"
CHECKED = "\ntest('one', () => { if (1 > 2) throw new Error('differs'); });\n"


def run(directory: Path, source: str) -> dict[str, str]:
    """Return the status of each test of this file, by node's test runner."""
    need_node()
    (directory / "a.test.js").write_text(source)
    command = ["node", "--test", "--test-reporter=tap", "a.test.js"]
    return parse_tap(subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False).stdout)


def planted(source: str, file: str = "a.test.js") -> tuple[Twins, str]:
    """Return a file with canaries, as an object and as a text."""
    twins = with_canaries(Twins({file: source.encode()}, {}, ()), [file])
    return twins, twins.texts[file].decode()


@pytest.mark.parametrize(("cases", "canaries"), [(CASES, 3), (EXPECT, 2), (AVA, 2), (CHECKED, 1)])
def test_canaries_fail_beside_the_tests(tmp_path: Path, cases: str, canaries: int) -> None:
    twins, text = planted(NODE + cases)
    statuses = run(tmp_path, text)
    mine = {test: status for test, status in statuses.items() if test in twins.canaries}
    assert list(mine.values()) == ["FAILED"] * canaries
    assert {status for test, status in statuses.items() if test not in mine} == {"PASSED"}
    assert twins.check(statuses, {}, "the log") == ("", "")


@pytest.mark.parametrize("replaced", ["equal", "deepStrictEqual", "strict.equal"])
def test_canary_passes_where_an_assertion_is_replaced(tmp_path: Path, replaced: str) -> None:
    """With `require('assert').equal = () => {}` in the tested code, every comparison once passed unnoticed."""
    twins, text = planted(NODE + CASES)
    statuses = run(tmp_path, f"require('assert').{replaced} = () => {{}};\n{text}")
    assert "is reported as passed" in twins.check(statuses, {}, "the log")[0]


def test_canaries_of_a_module(tmp_path: Path) -> None:
    source = "import { describe, it } from 'node:test';\nimport assert from 'node:assert/strict';\n"
    source += "describe('suite', () => {\n  it('one', () => { assert.deepEqual([1], [1]); });\n});\n"
    (tmp_path / "package.json").write_text('{"type": "module"}')
    statuses = run(tmp_path, planted(source)[1])
    assert sorted(statuses.values()) == ["FAILED", "PASSED", "PASSED"]


def test_files_without_a_place_for_canaries() -> None:
    for file, source in (
        ("tests/helper.js", "exports.sum = (a, b) => a + b;\n"),
        ("tests/a.test.js", "test('one', () => {});\ntest.run();\n"),
        ("lib/index.js", CASES),
    ):
        twins, text = planted(source, file)
        assert (text, twins.canaries) == (source, ())
    assert "TestCase" in planted("", "tests/test_a.py")[1]


@pytest.mark.parametrize(
    ("path", "is_test"),
    [
        ("a.test.js", True),
        ("src/a.spec.tsx", True),
        ("a-test.mjs", True),
        ("tests/unit/a.cjs", True),
        ("src/__tests__/a.ts", True),
        ("src/index.js", False),
        ("latest.js", False),
        ("tests/data.json", False),
        ("tests/test_a.py", False),
    ],
)
def test_javascript_test_files(path: str, is_test: bool) -> None:
    assert is_javascript_test(path) is is_test


FRAGMENTS = st.sampled_from(["test('a', ", "it(`", "assert.equal(", "expect(1).toBe(", "t.is(", "\n", "\\", "%d{}"])


@given(st.lists(st.one_of(FRAGMENTS, st.text(max_size=9)), max_size=30).map("".join))
def test_canaries_of_any_text(source: str) -> None:
    titles = [f"title {number}" for number in range(MOST)]
    text = javascript_canaries(source, titles, (101, 202, 303))
    assert len(text.splitlines()) <= MOST + 1
    assert not text or titles[0] in text


@pytest.mark.parametrize(
    "option", ["-g name", "--grep=name", "--bail", "--test-name-pattern=name", "--testNamePattern a"]
)
def test_canaries_go_where_all_tests_run(option: str) -> None:
    assert runs_whole_files("npx jest tests/a.test.js")
    assert not runs_whole_files(f"npx jest {option} tests/a.test.js")
