"""Compares all reports of one test run: a test has passed where every report says so."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polar_gym.evaluators.canary import Canary
from polar_gym.evaluators.parsers import FAILED, MISSING, PARSERS, PASSED, get_parser
from polar_gym.evaluators.swebench_report import END, START, reports
from polar_gym.evaluators.twins import Twins
from polar_gym.evaluators.witness import Testimony


@dataclass(slots=True)
class Verdict:
    """The combined statement of the reports."""

    tests: dict[str, str]
    """Listed test -> its status; PASSED only if every report says so."""
    resolved: bool
    statuses: Mapping[str, str]
    """The status of every test in the log."""
    problem: str = ""
    """Why the reports cannot be believed."""
    passed: set[str] = field(default_factory=set)


async def read_reports(
    instance: dict[str, Any], log: str, testimony: Testimony, canary: Canary | None, twins: Twins
) -> Verdict:
    """Return the verdict on a run with this log. `instance` has swebench's field names. Raises `EvaluatorError`.

    In the log and in the testimony, the originals of twins have their own names.
    """
    tests = [*instance["FAIL_TO_PASS"], *instance["PASS_TO_PASS"]]
    name = instance["log_parser"]
    if name.startswith("parse_log_"):
        logs = [log, f"{START}\n{testimony.log}\n{END}\n"] if testimony.tests else [log]
        found = await reports(instance, logs)
        statuses = found[0].statuses
        passed = set.intersection(*(set(report.passed) for report in found))
        resolved = all(report.resolved for report in found)
    else:
        statuses = await asyncio.to_thread(get_parser(name), log)
        sources = [statuses, testimony.tests] if name in PARSERS and testimony.began else [statuses]
        passed = {test for test in tests if all(source.get(test) == PASSED for source in sources)}
        resolved = passed.issuperset(tests)
    verdict = Verdict(
        tests={test: PASSED if test in passed else _failing(test, statuses, testimony) for test in tests},
        resolved=resolved,
        statuses=statuses,
        passed=passed,
    )
    for judge in (canary, twins) if statuses else ():
        if judge is not None:
            verdict.problem = verdict.problem or judge.problem(statuses, "the log")
            if testimony.began:
                verdict.problem = verdict.problem or judge.problem(testimony.tests, "the witness")
    return verdict


def _failing(test: str, statuses: Mapping[str, str], testimony: Testimony) -> str:
    """Return the status of a test that has not passed, even where one of the reports says that it passed."""
    said = [status for source in (statuses, testimony.tests) if (status := source.get(test)) not in (None, PASSED)]
    return said[0] if said and said[0] else FAILED if test in statuses and test in testimony.tests else MISSING
