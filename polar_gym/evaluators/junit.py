"""Reads the status of each test from a JUnit XML report."""

from __future__ import annotations

from xml.etree import ElementTree

from polar_gym.evaluators.parsers import ERROR, FAILED, PASSED, SKIPPED

_WORST = (ERROR, FAILED, SKIPPED, PASSED)


def parse_junit(report: bytes) -> dict[str, str]:
    """Return test id (`classname.name`, or `name` alone) -> PASSED | FAILED | ERROR | SKIPPED.

    Where two results have one id, the worse counts. Raises `ValueError` where `report` is not a JUnit report.
    """
    if b"<!DOCTYPE" in report or b"<!ENTITY" in report:
        raise ValueError("a JUnit report has no document type; this one could expand to any length")
    try:
        root = ElementTree.fromstring(report)
    except ElementTree.ParseError as error:
        raise ValueError(f"not XML: {error}") from error
    if root.tag not in ("testsuites", "testsuite"):
        raise ValueError(f"not a JUnit report: its root is <{root.tag}>")
    statuses: dict[str, str] = {}
    for case in root.iter("testcase"):
        test = ".".join(part for part in (case.get("classname"), case.get("name")) if part)
        found = {"error": ERROR, "failure": FAILED, "skipped": SKIPPED}
        status = next((found[name] for name in found if case.find(name) is not None), PASSED)
        statuses[test] = min(status, statuses.get(test, PASSED), key=_WORST.index)
    return statuses
