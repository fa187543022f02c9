"""Reads the status of each test from a log.

A parser is a total function: any text gives a dictionary. A log that does not reach its end gives no passed tests. The
runner's output is mixed with the output of the code under test. Therefore stray or forged lines make results worse,
never better, as long as the runner itself finishes. A failure named anywhere wins over a success, and the log may not
name more tests than the runner counted. Code under test runs in the runner's process and could replace the runner as a
whole. No parser can see that.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Container, Iterator

PASSED, FAILED, ERROR, SKIPPED, MISSING = "PASSED", "FAILED", "ERROR", "SKIPPED", "MISSING"

Parser = Callable[[str], dict[str, str]]
"""Log -> test id -> PASSED | FAILED | ERROR | SKIPPED."""

_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def get_parser(name: str) -> Parser:
    """Return the parser called `name`, one of `PARSERS` or `package.module:function`. Raises `ValueError`."""
    if name in PARSERS:
        return PARSERS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"unknown log parser {name!r}; known: {', '.join(PARSERS)}, or package.module:function")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"log parser {name!r} cannot be imported: {error}") from error


# unittest -v ----------------------------------------------------------------------------------------------------------

_RAN = re.compile(r"^Ran (\d{1,9}) tests? in [\d.]+s\n\n(?:OK|FAILED|NO TESTS RAN)\b", re.MULTILINE)
_TEST = re.compile(r"(\S{1,500}) \(([\w.]{1,1000})\)(?: \.\.\. ?(.*))?")
_PROBLEM = re.compile(r"^={70}\n(ERROR|FAIL|UNEXPECTED SUCCESS): (\S{1,500}) \(([\w.]{1,1000})\)", re.MULTILINE)
_FIXTURES = ("setUpClass", "tearDownClass", "setUpModule", "tearDownModule")


def parse_unittest(log: str) -> dict[str, str]:
    """Parse the log of `python -m unittest -v`. Ids are `module.Class.method`.

    A success comes from the verbose line. A failure comes from the heading of its traceback, which also covers
    sub-tests and clean-ups. A test that printed between its name and its `ok` is still found.
    """
    log = _COLORS.sub("", log.replace("\r\n", "\n"))
    endings = list(_RAN.finditer(log))
    if not endings:
        return {}
    log = log[: endings[-1].end()]
    statuses: dict[str, str] = {}
    current = ""
    lines = log.split("\n")
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        match = _TEST.fullmatch(line)
        if match and (match[3] is not None or " ... " in following):
            current = _unittest_id(match[1], match[2])
        elif line.startswith(("======", "------")):
            current = ""
        status = _unittest_status(line.rpartition(" ... ")[2])
        if current and status and statuses.get(current) != SKIPPED:
            statuses[current] = status
    for kind, name, path in _PROBLEM.findall(log):
        statuses[_unittest_id(name, path)] = ERROR if kind == "ERROR" else FAILED
    tests = [test for test in statuses if test.rpartition(".")[2] not in _FIXTURES]
    if len(tests) > sum(int(ending[1]) for ending in endings):
        return {}
    return statuses


def _unittest_id(name: str, path: str) -> str:
    """Return the id of a test: Python 3.11 prints `test (module.Class.test)`, older versions `test (module.Class)`."""
    return path if path.endswith(f".{name}") else f"{path}.{name}"


def _unittest_status(text: str) -> str | None:
    if text.endswith("ok") or text == "expected failure":
        return PASSED
    return SKIPPED if text.startswith(("skipped '", 'skipped "')) else None


# pytest -rA -----------------------------------------------------------------------------------------------------------

_SUMMARY = re.compile(r"^=+ short test summary info =+\n", re.MULTILINE)
_RESULT = re.compile(r"(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S.*)")
_SUBTEST = re.compile(r"SUBFAILED|(?:[\[(].* )?SUBFAIL ")
"""Matches the line of a failed subtest, whose test may be PASSED: of pytest 9, and of the plugin pytest-subtests."""
_COUNTS = re.compile(r"=+ (.{0,500}) in [\d.]+s(?: \([\d:]+\))? =+")
_PYTEST = {"PASSED": PASSED, "XPASS": PASSED, "XFAIL": PASSED, "FAILED": FAILED, "ERROR": ERROR}


def parse_pytest(log: str) -> dict[str, str]:
    """Parse the log of `pytest -rA`. Ids are `path::Class::method[parameters]`.

    Only the last short summary counts, and only with the line of counts below it. Skipped tests have no id there.
    """
    log = _COLORS.sub("", log.replace("\r\n", "\n"))
    headings = list(_SUMMARY.finditer(log))
    if not headings:
        return {}
    statuses: dict[str, str] = {}
    for line in log[headings[-1].end() :].split("\n"):
        counts = _COUNTS.fullmatch(line)
        if counts:
            return statuses if _agree(statuses, counts[1]) else {}
        if _SUBTEST.match(line):
            statuses |= dict.fromkeys(itertools.islice(_named(line, statuses), 1), FAILED)
        elif match := _RESULT.fullmatch(line):
            test = match[2] if match[1] == "PASSED" else _without_message(match[2])
            if statuses.get(test) not in (FAILED, ERROR):
                statuses[test] = _PYTEST[match[1]]
    return {}


def _named(line: str, tests: Container[str]) -> Iterator[str]:
    """Yield those of the tests that may be the id in `SUBFAILED[MESSAGE] (PARAMETERS) ID - MESSAGE`."""
    line = line[:2000]
    for place in itertools.islice(re.finditer(" ", line), 100):
        end = line[place.end() :]
        yield from (test for test in (end, _without_message(end), end.partition(" - ")[0]) if test in tests)


def _without_message(text: str) -> str:
    """Return the id at the beginning of `ID - MESSAGE`. An id with parameters ends with a bracket: the first one after
    which all are closed, or, where a parameter is a lone bracket, the first one."""
    opened = closed = start = 0
    shortest = text
    for cut in re.finditer(" - ", text):
        opened += text.count("[", start, cut.start())
        closed += text.count("]", start, cut.start())
        start = cut.start()
        ends = text[start - 1] == "]"
        if not opened or (opened == closed and ends):
            return text[:start]
        shortest = text[:start] if ends and shortest is text else shortest
    return shortest


def _agree(statuses: dict[str, str], counts: str) -> bool:
    """Return whether at most as many tests are PASSED as the runner counted."""
    counted = re.findall(r"(\d{1,9}) (?:passed|xfailed|xpassed)\b", counts)
    return sum(status == PASSED for status in statuses.values()) <= sum(map(int, counted))


# TAP: node --test --test-reporter=tap ---------------------------------------------------------------------------------

_LEVELS, _RESULTS = 9, 50_000
"""The most levels of suites and the most results of a log: an id repeats the names of all suites around its test."""
_POINT = re.compile(
    r"( {0,32})(not )?ok\b(?: \d{1,9})?(?: -)? ?(.{0,2000}?)(?: # (?i:SKIP|TODO)\b(.*))?(?: # time=[\d.]+m?s)?"
)
_PLAN = re.compile(r"1\.\.(\d{1,9})(?: .*)?")
_YAML = re.compile(r"^( *)---\n.*?(?:^\1\.\.\.$|\Z)", re.MULTILINE | re.DOTALL)


def parse_tap(log: str) -> dict[str, str]:
    """Parse a log in TAP, as node's test runner prints with `--test-reporter=tap`. Ids are `suite > test`.

    The log must hold exactly as many results at its outermost level as its plans (`1..N`) announce. A test that is
    marked as TODO or SKIP counts as skipped.
    """
    log = _YAML.sub("", _COLORS.sub("", log.replace("\r\n", "\n")))
    levels: list[list[tuple[str, str]]] = [[] for _ in range(_LEVELS)]
    planned = found = results = 0
    for line in log.split("\n"):
        if plan := _PLAN.fullmatch(line):
            planned += int(plan[1])
        elif line.startswith("Bail out!") or results > _RESULTS:
            return {}
        elif point := _POINT.fullmatch(line):
            depth, name = len(point[1]) // 4, re.sub(r"\\([\\#])", r"\1", point[3])
            for level in levels[depth + 1 :]:  # a suite's tests come before the suite
                levels[depth] += [(f"{name} > {test}", status) for test, status in level]
                level.clear()
            levels[depth].append((name, SKIPPED if point[4] is not None else FAILED if point[2] else PASSED))
            found += depth == 0
            results += 1
    failed = {test for test, status in levels[0] if status == FAILED}
    return {**dict(levels[0]), **dict.fromkeys(failed, FAILED)} if planned == found else {}


PARSERS: dict[str, Parser] = {"unittest": parse_unittest, "pytest": parse_pytest, "tap": parse_tap}
