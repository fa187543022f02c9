"""Runs swebench's log parsers and its report in a separate process.

Importing swebench's grading takes seconds and imports a hundred packages. Its parsers are regular expressions over the
output of the tested code. Neither belongs into the gateway's process. As a program, this module reads one JSON object
on stdin, `{"instance": {...}, "logs": [...]}`, and writes one report for each log.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from polar_gym.evaluators import EvaluatorError
from polar_gym.runtimes import processes

START, END, EXIT_CODE = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"
"""swebench's marks in a log: around the output of the tests, and before their command's exit code."""

TIMEOUT_SECONDS = 300.0


_PARSER = re.compile(r"^(?:def )?(parse_log_\w+)(?:\(| = parse_log_)", re.MULTILINE)
"""Matches the definition of a parser, or another name for one."""


@dataclass(frozen=True, slots=True)
class Report:
    """swebench's report on one log."""

    resolved: bool
    passed: frozenset[str]
    """The tests of FAIL_TO_PASS and PASS_TO_PASS that passed."""
    statuses: dict[str, str]
    """Every status that the log parser found."""


@cache
def known_parsers() -> frozenset[str]:
    """Return the names of swebench's log parsers, read from its files; empty where swebench is not installed."""
    spec = importlib.util.find_spec("swebench")
    if spec is None or spec.origin is None:
        return frozenset()
    files = (Path(spec.origin).parent / "harness" / "log_parsers").glob("*.py")
    return frozenset(name for file in files for name in _PARSER.findall(file.read_text()))


async def reports(instance: dict[str, Any], logs: list[str]) -> list[Report]:
    """Return one report for each log. Raises `EvaluatorError`."""
    asked = json.dumps({"instance": instance, "logs": logs}).encode()
    code, stdout, stderr = await processes.run([sys.executable, "-m", __name__], asked, TIMEOUT_SECONDS)
    if code != 0:
        raise EvaluatorError(f"swebench's grading failed: {stderr.decode(errors='replace').strip()[-2000:]}")
    return [
        Report(one["resolved"], frozenset(one["passed"]), one["statuses"])
        for one in json.loads(stdout.splitlines()[-1])
    ]


def _report(instance: dict[str, Any], log: str) -> dict[str, Any]:
    from swebench.harness.grading import get_eval_report, get_logs_eval
    from swebench.harness.utils import make_test_spec

    spec = make_test_spec(instance)
    prediction = {"instance_id": spec.instance_id, "model_name_or_path": "policy", "model_patch": "x"}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(log)
        file.flush()
        report = get_eval_report(spec, prediction, file.name, include_tests_status=True)[spec.instance_id]
        statuses, _ = get_logs_eval(spec, file.name)
    groups = report.get("tests_status", {})
    passed = [test for name in ("FAIL_TO_PASS", "PASS_TO_PASS") for test in groups.get(name, {}).get("success", [])]
    return {"resolved": report["resolved"], "passed": passed, "statuses": statuses}


def main() -> None:
    asked = json.load(sys.stdin)
    answer = [_report(asked["instance"], log) for log in asked["logs"]]
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
