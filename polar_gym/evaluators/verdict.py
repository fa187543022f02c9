"""Compares all reports of one test run: a test has passed where every report says so."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    reported: bool = True
    """True where the log shows that the tests ran."""
    forged: str = ""
    """What in the reports only forging can bring about."""
    problem: str = ""
    """Why the reports cannot be believed, though the tested code may not be to blame."""

    @property
    def ran(self) -> bool:
        """Return whether a listed test ran. Where the tests cannot be imported, the silence of others says nothing."""
        return any(status != MISSING for status in self.tests.values())


async def read_reports(instance: dict[str, Any], log: str, testimony: Testimony, twins: Twins) -> Verdict:
    """Return the verdict on a run with this log. `instance` has swebench's field names. Raises `EvaluatorError`.

    The originals of twins are reported under other names than the listed ones, which the verdict has.
    """
    listed = [*instance["FAIL_TO_PASS"], *instance["PASS_TO_PASS"]]
    names = await asyncio.to_thread(lambda: {test: twins.reported(test) for test in listed})
    instance |= {group: [names[test] for test in instance[group]] for group in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    name = instance["log_parser"]
    if name.startswith("parse_log_"):
        heard = "\n".join([START, testimony.log, *(f"{PASSED} {test}" for test in _unheard(instance)), END, ""])
        found = await reports(instance, [log, heard] if testimony.tests else [log])
        statuses = found[0].statuses
        reported = set.intersection(*(set(report.passed) for report in found))
        resolved = all(report.resolved for report in found)
    else:
        statuses = await asyncio.to_thread(get_parser(name), log)
        sources = [statuses, testimony.tests] if name in PARSERS and testimony.began else [statuses]
        reported = {test for test in names.values() if all(source.get(test) == PASSED for source in sources)}
        resolved = reported.issuperset(names.values())
    verdict = Verdict(
        tests={
            test: PASSED if name in reported else _failing(name, statuses, testimony) for test, name in names.items()
        },
        resolved=resolved,
        statuses=statuses,
        # Parsers of `fail_only` name failures alone; swebench looks for another sign that the suite ran.
        reported=bool(statuses) or (resolved and instance.get("eval_type") == "fail_only"),
    )
    said = [(statuses, "the log"), *([(testimony.tests, "the witness")] if testimony.began else [])]
    for each, source in said if statuses else ():
        forged, silent = await asyncio.to_thread(twins.check, each, names, source)
        verdict.forged, verdict.problem = verdict.forged or forged, verdict.problem or silent
    return verdict


def _unheard(instance: dict[str, Any]) -> list[str]:
    """Return the ids of PASS_TO_PASS that no witness can name, so that the log alone decides on them.

    swebench's parsers for pytest make an id of any line that begins with a status: the progress `PASSED [100%]` gives
    `[100%]`, which rows of pytest's own repository list. The id of a test of pytest has `::`.
    """
    if not all("::" in test for test in instance["FAIL_TO_PASS"]):
        return []
    return [test for test in instance["PASS_TO_PASS"] if "::" not in test]


def _failing(test: str, statuses: Mapping[str, str], testimony: Testimony) -> str:
    """Return the status of a test that has not passed, even where one of the reports says that it passed."""
    said = [status for source in (statuses, testimony.tests) if (status := source.get(test)) not in (None, PASSED)]
    return said[0] if said and said[0] else FAILED if test in statuses and test in testimony.tests else MISSING
