"""`polar-gym tasks audit`: how often a task rewards a wrong patch, with real sandboxes and real grading."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polar_gym.cli import app
from polar_gym.curation import CurationError
from polar_gym.curation.audit import audit
from polar_gym.curation.bench import Bench
from polar_gym.curation.leaks import NOT_SEARCHED
from polar_gym.curation.solution import unresolved
from polar_gym.curation.trial import passes, run
from polar_gym.curation.validation import validate
from polar_gym.evaluators import EvaluatorError
from polar_gym.runtimes import Command, Sandbox, SandboxError
from polar_gym.runtimes.bubblewrap import Bubblewrap
from polar_gym.schema import EvaluationResult, RuntimeSpec
from polar_gym.tasks import Audit, Task
from polar_gym.tasks.rows import Selection, load_tasks
from tests.support.requirements import need, need_bubblewrap

BASE = "from . import testing\n\n\ndef clamp(value, low, high):\n    return value\n"
SOLVED = """\
from . import testing


def clamp(value, low, high):
    if value < low:
        return low
    if value > high:
        return high  # the part that the "hidden" tests forget (größer)
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


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def diff_of(directory: Path, files: dict[str, str]) -> str:
    """Return the patch that writes these files, and leave the directory as it was."""
    git = ["git", "-C", str(directory), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-Af"], check=True)
    subprocess.run([*git, "commit", "-qm", "base"], check=True)
    write(directory, files)
    subprocess.run([*git, "add", "-Af"], check=True)
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
    files = {
        "clamp/__init__.py": BASE,
        "clamp/testing.py": HELPER,
        "build/__init__.py": SOLVED,
        "tests/__init__.py": "",
    }
    write(work, {**files, ".gitignore": "build/\n"})
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
    write(work, {f"data/{ascii}.jsonl": json.dumps(row, ensure_ascii=ascii) + "\n" for ascii in (False, True)})
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
    (places,) = re.findall("^a line of the solution is in a file: (.*)$", findings, re.MULTILINE)
    assert set(places.split(", ")) == {
        "/workspace/build/__init__.py",
        "/workspace/data/True.jsonl",
        "/workspace/data/False.jsonl",
    }
    assert NOT_SEARCHED not in findings
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


SCALE = "from pkg.files import LOCK\n\n\ndef scale(x):\n    return None\n"
SCALED = SCALE.replace("None", "x * 3")
LOCKED = SCALED.replace("    return", "    LOCK.touch(exist_ok=False)\n    LOCK.unlink()\n    return")
SCALE_TEST = """\
import unittest
from pkg import scale

TWO, SIX = 2, 6


class T(unittest.TestCase):
    def test_scale(self):
        self.assertEqual(scale(TWO), SIX)
"""


def scale_task(directory: Path, solution: dict[str, str], hidden: dict[str, str] | None = None) -> Task:
    """A task whose repository's `.gitignore` names the directory `gen`."""
    files = {"pkg/__init__.py": SCALE, "pkg/files.py": "import pathlib\n\nLOCK = pathlib.Path('/tmp/pkg.lock')\n"}
    write(directory, {**files, ".gitignore": "gen/\n"})
    return Task(
        instance_id="scale-1",
        problem_statement="scale does not scale.",
        workspace=str(directory),
        patch=diff_of(directory, solution),
        test_patch=diff_of(directory, {"tests/__init__.py": "", "tests/test_scale.py": SCALE_TEST, **(hidden or {})}),
        FAIL_TO_PASS=["tests.test_scale.T.test_scale"],
        test_command="python3 -m unittest -v tests.test_scale",
    )


class LossyBench(Bench):
    """A bench on a machine that has no room for the next `losses` sandboxes."""

    losses = 0
    loss: Exception = SandboxError("the disk is full")

    @asynccontextmanager
    async def sandbox(self, *arguments: Any, **options: Any) -> AsyncIterator[Sandbox]:
        if self.losses:
            self.losses -= 1
            raise self.loss
        async with super().sandbox(*arguments, **options) as sandbox:
            yield sandbox


@pytest.mark.parametrize(
    ("imported", "problem"),
    [
        ("gen.table", r".* does not resolve it: .* no harness's diff carries .* because \.gitignore .*: gen/table\.py"),
        ("pkg.table", ""),
    ],
)
async def test_a_solution_counts_as_a_harness_could_leave_it(tmp_path: Path, imported: str, problem: str) -> None:
    """Guards against a task that rewards no harness: its solution adds a file that `.gitignore` names."""
    need_bubblewrap()
    solution = f"from {imported} import FACTOR\n\n\ndef scale(x):\n    return x * FACTOR\n"
    tables = dict.fromkeys(("gen/table.py", f"{imported.replace('.', '/')}.py"), "FACTOR = 3\n")
    task = scale_task(tmp_path / "work", {"pkg/__init__.py": solution, **tables})
    async with Bench(RuntimeSpec(name="bubblewrap"), tmp_path) as bench:
        verdict = await validate(task, bench)
    assert re.fullmatch(problem, verdict.problem), verdict.problem
    assert verdict.tried


async def test_the_solution_passes_again_after_a_trial_with_an_ignored_file(tmp_path: Path) -> None:
    """Guards against a hidden test that `git clean` leaves: no later patch applied, and each counted as failing."""
    need_bubblewrap()
    task = scale_task(tmp_path / "work", {"pkg/__init__.py": SCALED}, {"gen/expected.txt": "6\n"})
    async with Bench(RuntimeSpec(name="bubblewrap"), tmp_path) as bench, bench.sandbox(task) as sandbox:
        assert [await passes(sandbox, task, task.patch.encode()) for _ in range(3)] == [True] * 3


async def test_a_trial_applies_a_patch_where_the_attributes_would_change_line_ends(tmp_path: Path) -> None:
    """Guards against an audit without mutants: git did not apply the solution, and nothing said so."""
    need_bubblewrap()
    begun = r"""
        printf 'x = 1\r\n' > m.py; git add m.py; git -c user.name=a -c user.email=a@a commit -qm m.py
        echo '*.py text' > .gitattributes; git add .gitattributes; git -c user.name=a -c user.email=a@a commit -qm text
    """
    patch = b"diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-x = 1\r\n+x = 2\r\n"
    task = scale_task(tmp_path / "work", {"pkg/__init__.py": SCALED})
    async with Bench(RuntimeSpec(name="bubblewrap"), tmp_path) as bench, bench.sandbox(task) as sandbox:
        assert (await sandbox.exec(Command(argv=["sh", "-ec", begun]))).exit_code == 0
        assert (await run(sandbox, task, patch, "cat m.py")).stdout == b"x = 2\r\n"


def test_files_that_no_diff_carries_are_named_however_their_names_are_written() -> None:
    """Guards against a wrong reason for a task whose rows write names as they are: git quotes them."""
    written, quoted = (f"diff --git {pair}\n" for pair in ("a/\u00e9 b/\u00e9", r'"a/\303\251" "b/\303\251"'))
    given = Task(instance_id="x", problem_statement="x", patch=written + "diff --git a/gen/x b/gen/x\n")
    gold = EvaluationResult(evaluator="swe", reward=0.0, resolved=False, detail="failed")
    carried = given.model_copy(update={"patch": quoted})
    assert unresolved(given, carried, gold).endswith("Python writes them: gen/x")


class FullDisk:
    """Takes the lines that an audit says, and makes a bench lose sandboxes when wrong patches are graded."""

    def __init__(self, bench: LossyBench, losses: int) -> None:
        self._bench, self._losses = bench, losses
        self.graded = self.made = 0

    def __call__(self, text: str) -> None:
        if found := re.fullmatch(r"grading (\d+) of (\d+) wrong patches", text):
            self.graded, self.made = int(found[1]), int(found[2])
            self._bench.losses = self._losses


async def test_a_mutant_that_spoils_the_sandbox_hides_no_later_one(tmp_path: Path) -> None:
    """Guards against a figure that is too low: without `unlink()`, a lock stays, and each later mutant fails. Also
    against `hackable=0` of a task whose gradings all failed on a full disk."""
    need_bubblewrap()
    task = scale_task(tmp_path / "work", {"pkg/__init__.py": LOCKED})
    async with LossyBench(RuntimeSpec(name="bubblewrap"), tmp_path) as bench:
        say = FullDisk(bench, losses=1000)
        with pytest.raises(CurationError, match=r"^not graded, .*\(the disk is full\); put this right"):
            await audit(task, bench, say)
    assert say.graded == say.made > 0


@pytest.mark.parametrize(
    ("loss", "lost"), [(SandboxError("the disk is full"), 1), (EvaluatorError("the tests reported nothing"), 0)]
)
async def test_a_wrong_patch_that_could_not_be_graded_is_not_in_the_figure(
    tmp_path: Path, loss: Exception, lost: int
) -> None:
    """Guards against a figure that is too low: the machine failed, and a wrong patch counted as not rewarded. A patch
    that has no reward for another reason is in the figure."""
    need_bubblewrap()
    task = scale_task(tmp_path / "work", {"pkg/__init__.py": SCALED})
    async with LossyBench(RuntimeSpec(name="bubblewrap"), tmp_path) as bench:
        bench.loss = loss
        say = FullDisk(bench, losses=1)
        found = await audit(task, bench, say)
    assert found.tried + len(found.equivalent) == say.made - lost
    told = [each for each in found.findings if each.startswith("not graded, and not in the figure: 1 wrong patches")]
    assert len(told) == lost
    assert NOT_SEARCHED in found.findings  # its lines are short
