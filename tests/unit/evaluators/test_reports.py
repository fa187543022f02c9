"""What is read of a test run: JUnit reports, the witness's record, swebench's own report."""

import hashlib
import hmac
import importlib.util
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from polar_gym.errors import how_to_install
from polar_gym.evaluators import witness
from polar_gym.evaluators.junit import parse_junit
from polar_gym.evaluators.swe import SweOptions
from polar_gym.evaluators.swebench_report import END, START, known_parsers, reports
from polar_gym.evaluators.twins import Twins
from polar_gym.evaluators.verdict import read_reports
from tests.support.requirements import need


def test_junit():
    report = b"""<testsuites><testsuite>
        <testcase classname="a.T" name="ok"/><testcase name="alone"/>
        <testcase classname="a.T" name="bad"><failure>x</failure></testcase>
        <testcase classname="a.T" name="bad"/>
        <testcase classname="a.T" name="broken"><error/></testcase>
        <testcase classname="a.T" name="left"><skipped/></testcase>
    </testsuite></testsuites>"""
    assert parse_junit(report) == {
        "a.T.ok": "PASSED",
        "alone": "PASSED",
        "a.T.bad": "FAILED",
        "a.T.broken": "ERROR",
        "a.T.left": "SKIPPED",
    }


@pytest.mark.parametrize("report", [b"", b"<a", b"<html/>", b'<!DOCTYPE a [<!ENTITY x "y">]><testsuite/>'])
def test_what_is_no_junit_report(report):
    with pytest.raises(ValueError, match=r"not XML|not a JUnit report|document type"):
        parse_junit(report)


# The witness ----------------------------------------------------------------------------------------------------------

KEY = b"k" * 32
ENTRIES = [
    {"begin": "3.11"},
    {"test": "t.py::a", "says": "passed", "when": "call", "xfail": False},
    {"test": "t.py::b", "says": "failed", "when": "setup", "xfail": False},
    {"test": "t.py::c", "says": "skipped", "when": "call", "xfail": True},
    {"test": "t.T.d", "says": "ok", "text": "d (t.T.d)"},
    {"test": "t.T.e", "says": "unexpected success", "text": "e (t.T.e)"},
    {"end": "pytest", "exit": 1, "altered": []},
]


def sealed(entries: list[dict[str, object]]) -> list[bytes]:
    key, lines = KEY, []
    for entry in entries:
        line = json.dumps(entry).encode()
        lines.append(hmac.new(key, line, "sha256").hexdigest().encode() + b" " + line)
        key = hashlib.sha256(key).digest()
    return lines


def heard(lines: list[bytes]) -> witness.Testimony:
    return witness.heard(b"".join(line + b"\n" for line in lines), KEY)


def test_a_record_is_heard_as_it_was_written():
    testimony = heard(sealed(ENTRIES))
    assert testimony.problem == ""
    assert testimony.tests == {
        "t.py::a": "PASSED",
        "t.py::b": "ERROR",
        "t.py::c": "PASSED",
        "t.T.d": "PASSED",
        "t.T.e": "FAILED",
    }
    assert testimony.log.splitlines() == [
        *("PASSED t.py::a", "ERROR t.py::b", "XFAIL t.py::c"),
        *("d (t.T.d) ... ok", "e (t.T.e) ... unexpected success"),
    ]


def test_a_failure_at_any_time_wins():
    again = {"test": "t.py::b", "says": "passed", "when": "call", "xfail": False}
    assert heard(sealed([*ENTRIES[:3], again])).tests["t.py::b"] == "ERROR"


@given(st.data())
def test_no_line_can_be_changed_removed_or_put_in(data: st.DataObject):
    lines = sealed(ENTRIES)
    at = data.draw(st.integers(0, len(lines) - 1))
    how = data.draw(st.sampled_from(["change", "remove", "repeat", "put in"]))
    if how == "change":
        lines[at] = lines[at].replace(b'"', b"'", 1)
    elif how == "remove":
        del lines[at]
    elif how == "repeat":
        lines.insert(at, lines[at])
    else:
        lines.insert(at, data.draw(st.binary(min_size=1).filter(lambda line: len(line.splitlines()) == 1)))
    assert heard(lines).problem != ""


@pytest.mark.parametrize(
    ("through", "status"),
    [
        (["/w/tests/helping.py", "/w/tests/test_a.py"], "PASSED"),
        (["/w/tests/test_a.py", "/w/pkg/total.py"], "FAILED"),
        (["/w/tests/test_a.py", "/w/pkg/total.py", "/w/tests/helping.py"], "FAILED"),
        (["/w/tests/test_a.py", "<string>"], "FAILED"),
    ],
)
def test_agents_code_expects_no_failures(through: list[str], status: str) -> None:
    entry = {"test": "t.py::a", "says": "skipped", "when": "call", "xfail": True, "through": through}
    record = b"".join(line + b"\n" for line in sealed([entry]))
    assert witness.heard(record, KEY, ["pkg/total.py"]).tests == {"t.py::a": status}


@pytest.mark.parametrize(
    "entry",
    [{"test": "a", "says": "nonsense"}, {"test": ["a"], "says": "passed", "xfail": 0}, {"end": 1}, 7, {"test": "a"}],
)
def test_a_sealed_line_that_cannot_be_read_breaks_the_record(entry: Any) -> None:
    assert heard(sealed([entry])).broken


def test_altered_machinery_is_a_problem():
    assert (
        "unittest.case.TestCase.run" in heard(sealed([{"end": "x", "altered": ["unittest.case.TestCase.run"]}])).problem
    )


# swebench -------------------------------------------------------------------------------------------------------------


def swebench() -> None:
    need(importlib.util.find_spec("swebench"), "swebench", how_to_install("swe"))


INSTANCE = {
    **{"instance_id": "a__b-1", "repo": "a/b", "version": "1", "image": "", "eval_script": "x"},
    **{"log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"},
    **{"FAIL_TO_PASS": ["t.py::a"], "PASS_TO_PASS": ["t.py::b"]},
}


async def test_swebench_itself_reports():
    swebench()
    assert {"parse_log_pytest", "parse_log_django"} <= known_parsers()
    good, bad, cut = await reports(
        INSTANCE,
        [
            f"{START}\nPASSED t.py::a\nPASSED t.py::b\n{END}\n",
            f"{START}\nPASSED t.py::a\nFAILED t.py::b - x\n{END}\n",
            "PASSED t.py::a\nPASSED t.py::b\n",
        ],
    )
    assert (good.resolved, bad.resolved, cut.resolved) == (True, False, False)
    assert bad.passed == {"t.py::a"}
    assert bad.statuses == {"t.py::a": "PASSED", "t.py::b": "FAILED"}


@pytest.mark.parametrize(("body", "reported"), [("  512 passing (2s)\n", True), ("npm ERR! no such file\n", False)])
async def test_a_suite_that_names_failures_alone_ran_without_one(body: str, reported: bool) -> None:
    """Guards against the reward 0 for right solutions of eslint, whose log names no test then."""
    swebench()
    rows = {"repo": "eslint/eslint", "version": "8.0", "log_parser": "parse_log_eslint", "eval_type": "fail_only"}
    log = f"+ : '{START}'\n{body}\n+ : '{END}'\n"
    no_twins = Twins(texts={}, originals={}, altered=())
    verdict = await read_reports({**INSTANCE, **rows}, log, witness.Testimony(), no_twins)
    assert (verdict.reported, verdict.resolved) == (reported, reported)


@pytest.mark.parametrize("parser", ["parse_log_pytest", "parse_log_pytest_options", "parse_log_pytest_v2"])
@pytest.mark.parametrize(
    ("fail_to_pass", "printed", "witnessed", "resolved"),
    [
        ("t.py::a", "t.py::a t.py::b [100%]", "t.py::a t.py::b", True),
        ("t.py::a", "t.py::a t.py::b", "t.py::a t.py::b", False),
        ("t.py::a", "t.py::a t.py::b [100%]", "t.py::a", False),
        ("t.py::a", "t.py::a t.py::b [100%]", "t.py::b", False),
        ("t.py::a [50%]", "t.py::a t.py::b [50%] [100%]", "t.py::a t.py::b", False),
    ],
    ids=["as it is", "not in the log", "no test to keep", "no test to mend", "no witness of a test to mend"],
)
async def test_the_log_alone_decides_on_an_id_that_no_witness_can_name(
    parser: str, fail_to_pass: str, printed: str, witnessed: str, resolved: bool
) -> None:
    """Guards against the reward 0 for the solutions of rows of pytest's own repository."""
    swebench()
    lists = {"FAIL_TO_PASS": fail_to_pass.split(), "PASS_TO_PASS": ["t.py::b", "[100%]"]}
    log, record = ("".join(f"PASSED {test}\n" for test in names.split()) for names in (printed, witnessed))
    tests = dict.fromkeys(witnessed.split(), "PASSED")
    testimony = witness.Testimony(began=True, ended=True, tests=tests, log=record)
    no_twins = Twins(texts={}, originals={}, altered=())
    verdict = await read_reports(
        {**INSTANCE, **lists, "log_parser": parser}, f"{START}\n{log}{END}\n", testimony, no_twins
    )
    assert verdict.resolved == resolved


# Options --------------------------------------------------------------------------------------------------------------

SCRIPT = f"echo '{START}'\npytest\necho '{END}'\n"


def test_test_lists_as_swebench_has_them():
    options = SweOptions(test_command="x", FAIL_TO_PASS='["a", "b"]', PASS_TO_PASS=["c"])  # pyright: ignore[reportArgumentType]
    assert options.tests == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "either test_command or eval_script"),
        ({"test_command": "x", "eval_script": SCRIPT}, "either test_command or eval_script"),
        ({"eval_script": f"git apply -v - < x\n{SCRIPT}"}, "test_patch is empty, and eval_script applies a patch"),
        ({"eval_script": "pytest"}, "does not print"),
        ({"test_command": "x", "log_parser": "nope"}, "unknown log parser 'nope'"),
        ({"test_command": "x", "log_parser": "parse_log_nope"}, "unknown log parser 'parse_log_nope'"),
        ({"test_command": "x", "eval_type": "fail_only"}, "needs one of swebench's log parsers"),
        ({"test_command": "x", "FAIL_TO_PASS": []}, "at least 1 item"),
        ({"test_command": "x", "FAIL_TO_PASS": "a"}, "FAIL_TO_PASS"),
    ],
)
def test_options_that_cannot_be(options, says):
    with pytest.raises(ValidationError, match=says):
        SweOptions.model_validate({"FAIL_TO_PASS": ["a"], **options})
