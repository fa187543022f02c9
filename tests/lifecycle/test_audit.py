"""`polar-gym tasks audit`: how often a task rewards a wrong patch, with real sandboxes and real grading."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polar_gym.cli import app
from polar_gym.runtimes.bubblewrap import Bubblewrap
from polar_gym.tasks import Audit
from polar_gym.tasks.rows import Selection, load_tasks
from tests.support.requirements import need

BASE = "from . import testing\n\n\ndef clamp(value, low, high):\n    return value\n"
SOLVED = """\
from . import testing


def clamp(value, low, high):
    if value < low:
        return low
    if value > high:
        return high  # the part that the hidden tests forget
    return value
"""
TESTS = """\
import unittest

from clamp import clamp, testing


class ClampTest(unittest.TestCase):
    def test_low(self):
        for value in (-7, 0, 2):
            testing.same(self, clamp(value, 3, 9), 3)

    def test_between(self):
        testing.same(self, clamp(5, 3, 9), 5)
"""
HELPER = "def same(case, got, wanted):\n    case.assertEqual(got, wanted)\n"


def diff_of(directory: Path, files: dict[str, str]) -> str:
    """Return the patch that writes these files, and leave the directory as it was."""
    git = ["git", "-C", str(directory), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "base"], check=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    subprocess.run([*git, "add", "-A"], check=True)
    diff = subprocess.run([*git, "diff", "--cached"], check=True, capture_output=True, text=True).stdout
    subprocess.run([*git, "reset", "-q", "--hard"], check=True)
    subprocess.run(["rm", "-rf", str(directory / ".git")], check=True)
    return diff


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a task whose hidden tests never try a value above the upper bound."""
    missing = Bubblewrap(Bubblewrap.Options()).check()
    need(not missing, "a working bubblewrap", "; ".join(missing))
    directory = tmp_path_factory.mktemp("audit")
    work = directory / "work"
    for name, text in {
        "clamp/__init__.py": BASE,
        "clamp/testing.py": HELPER,
        "build/__init__.py": SOLVED,
        "tests/__init__.py": "",
    }.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    (work / ".gitignore").write_text("build/\n")
    row = {
        "instance_id": "weak-1",
        "problem_statement": "clamp does not clamp.",
        "workspace": "work",
        "patch": diff_of(work, {"clamp/__init__.py": SOLVED}),
        "test_patch": diff_of(work, {"tests/test_clamp.py": TESTS}),
        "FAIL_TO_PASS": ["tests.test_clamp.ClampTest.test_low"],
        "PASS_TO_PASS": ["tests.test_clamp.ClampTest.test_between"],
        "test_command": "python3 -P -m unittest discover -v -t . -s tests",
    }
    file = directory / "tasks.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps({**row, "instance_id": "broken-1", "patch": ""}) + "\n")
    return file


@pytest.fixture(scope="module")
def audited(weak: Path) -> tuple[Path, str]:
    """The rows with their figures, and what the command printed."""
    out = weak.with_name("audited.jsonl")
    result = CliRunner().invoke(app, ["tasks", "audit", str(weak), "--out", str(out), "runtime=bubblewrap"])
    assert result.exit_code == 1, f"{result.output}{result.exception or ''}"
    return out, result.output


def figures(file: Path) -> Audit:
    task = load_tasks(file, Selection())[0]
    assert task.audit is not None
    return task.audit


def test_weak_hidden_tests_show_in_the_figure(audited):
    audit = figures(audited[0])
    assert audit.rewarded == len(audit.accepted) > 0
    assert audit.tried > audit.rewarded
    assert f"weak-1: {audit.rewarded}/{audit.tried} wrong patches rewarded" in audited[1]
    assert "clamp/__init__.py:8: return high -> return None" in audit.accepted


def test_a_mutant_that_behaves_as_the_solution_is_set_aside_with_the_inputs(audited):
    audit = figures(audited[0])
    (same,) = [told for told in audit.equivalent if "value > high -> value >= high" in told]
    assert re.search(r"the same: \d\d+ altered tests, e\.g\. test_\w+: \(?\d.* -> \(?-?\d", same)
    assert not any("value > high" in told for told in audit.accepted)


def test_leaks_and_open_helpers_are_found_and_not_in_the_figure(audited):
    findings = "\n".join(figures(audited[0]).findings)
    assert "a line of the solution is in a file: /workspace/build/__init__.py" in findings
    assert "the tests trust a file that a solution may change: clamp/testing.py" in findings


def test_a_task_without_a_solution_cannot_be_audited(audited):
    out, said = audited
    assert "broken-1: cannot be audited: patch: is empty" in said
    assert "audit" not in json.loads(out.read_text().splitlines()[1])


def test_a_rollout_can_refuse_tasks_by_their_figure(audited):
    out, _ = audited
    figure = figures(out).hackable
    assert figure is not None
    assert load_tasks(out, Selection(instance_ids=["weak-1"], max_hackable=figure))
    with pytest.raises(
        ValueError, match=r"max_hackable=0.01: 2 of 2 tasks .* weak-1 \(0\.\d+\), broken-1 \(no figure\)"
    ):
        load_tasks(out, Selection(max_hackable=0.01))
    result = CliRunner().invoke(app, ["rollout", "tasks=jsonl", f"tasks.path={out}", "tasks.max_hackable=0.01"])
    assert result.exit_code != 0
    assert "polar-gym tasks audit FILE --out FILE" in str(result.exception)


def test_rows_stay_beside_their_workspaces(weak, tmp_path):
    result = CliRunner().invoke(app, ["tasks", "audit", str(weak), "--out", str(tmp_path / "a.jsonl")])
    assert "must be beside" in str(result.exception)
