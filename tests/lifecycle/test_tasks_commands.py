"""`polar-gym tasks validate | twins`: what they grade with, and what stays in the rows; with real sandboxes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polar_gym.cli import app
from polar_gym.curation.bench import Bench
from polar_gym.curation.validation import validate
from polar_gym.schema import EvaluatorSpec, RuntimeSpec
from polar_gym.tasks.bundled import SUITE
from polar_gym.tasks.rows import Selection, load_tasks
from tests.support.processes import POLAR_GYM
from tests.support.requirements import need_bubblewrap
from tests.support.task_files import git

ROW = {**json.loads(SUITE.read_text().splitlines()[0]), "twins": None}
TWINS = {"tests/test_intervals.py": {"IntervalSetTest.test_old": [[1, 2, 3]]}}
"""The twins that a row has before the command runs."""
PARSER = "def parse(log):\n    return dict.fromkeys({tests!r}, 'PASSED' if 'OK' in log else 'FAILED')\n"


def put(directory: Path, *changes: dict) -> Path:
    """Write a file of rows: the first bundled task, with these changes in each row."""
    need_bubblewrap()
    shutil.copytree(SUITE.parent / ROW["workspace"], directory / ROW["workspace"])
    file = directory / "tasks.jsonl"
    file.write_text("".join(json.dumps({**ROW, **change}) + "\n" for change in changes))
    return file


def run(*arguments: str) -> tuple[int, str]:
    """Return the exit code of a command of `polar-gym tasks`, and what it said."""
    done = CliRunner().invoke(app, ["tasks", *arguments, "runtime=bubblewrap"], env={"COLUMNS": "400"})
    return done.exit_code, f"{done.output}{done.exception or ''}"


def twins_in(file: Path) -> list[dict | None]:
    return [json.loads(line).get("twins") for line in file.read_text().splitlines()]


def test_the_evaluators_settings_have_an_effect(tmp_path: Path) -> None:
    file = put(tmp_path, {})
    code, said = run("validate", str(file), "evaluator.timeout_seconds=0.01")
    assert code == 1
    assert "0.01 s" in said


def test_a_log_parser_of_the_config_reads_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a row that names code tells people to set it."""
    file = put(tmp_path, {"FAIL_TO_PASS": ["all of them"], "PASS_TO_PASS": []})
    (tmp_path / "one_test.py").write_text(PARSER.format(tests=["all of them"]))
    monkeypatch.syspath_prepend(tmp_path)
    code, said = run("validate", str(file), "evaluator.log_parser=one_test:parse", "evaluator.canary=off")
    assert code == 0, said


@pytest.mark.parametrize("command", ["validate", "twins", "audit"])
def test_a_solution_that_renames_a_file_is_right(tmp_path: Path, command: str) -> None:
    file = put(tmp_path, {})
    work = Path(shutil.copytree(tmp_path / ROW["workspace"], tmp_path / "solved"))
    (tmp_path / "solution.patch").write_text(ROW["patch"])
    git(work, "init", "-q")
    git(work, "add", "-A")
    git(work, "commit", "-qm", "base")
    git(work, "apply", "--index", str(tmp_path / "solution.patch"))
    git(work, "mv", "README.md", "READ ME.md")
    patch = git(work, "diff", "--cached", "--find-renames") + "\n"
    assert "\nrename from README.md\n" in patch
    file.write_text(json.dumps({**ROW, "patch": patch}) + "\n")
    code, said = run(command, str(file))
    assert code == 0, said
    assert json.loads(file.read_text())["patch"] == patch


async def test_options_that_the_evaluator_does_not_take_are_a_problem_of_the_task(tmp_path: Path) -> None:
    file = put(tmp_path, {})
    (task,) = load_tasks(file, Selection())
    evaluator = EvaluatorSpec.model_validate({"name": "swe", "tiemout": 3})
    async with Bench(RuntimeSpec(name="bubblewrap"), tmp_path, evaluator) as bench:
        problem = (await validate(task, bench)).problem
    assert problem.startswith(f"{file}:1: evaluator.tiemout=3: unknown key; known here: FAIL_TO_PASS")


def test_twins_stay_where_a_grading_cannot_be_tried(tmp_path: Path) -> None:
    file = put(tmp_path, {"twins": TWINS})
    code, said = run("twins", str(file), "evaluator.timeout_seconds=0.01")
    assert code == 1, said
    assert twins_in(file) == [TWINS]


def test_what_a_run_that_was_stopped_wrote_stays_in_out(tmp_path: Path) -> None:
    """Guards against rows of FILE in the place of all that an earlier run found."""
    file, out = put(tmp_path, {}, {"instance_id": "second"}), tmp_path / "twinned.jsonl"
    rows = [{**json.loads(line), "twins": TWINS} for line in file.read_text().splitlines()]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said = run("twins", str(file), "--out", str(out), "evaluator.timeout_seconds=0.01")
    assert code == 1, said
    assert twins_in(out) == [TWINS, TWINS]
    assert twins_in(file) == [None, None]


def test_an_audit_stays_where_twins_are_searched_for(tmp_path: Path) -> None:
    """Guards against hours of one command that are gone after the other one with the same --out."""
    later = {"rewarded": 1, "tried": 2}
    first, second = {"audit": None}, {"instance_id": "second", "audit": later}
    file, out = put(tmp_path, first, second), tmp_path / "twinned.jsonl"
    earlier = {"rewarded": 0, "tried": 1}
    rows = [{**json.loads(line), "audit": earlier, "twins": TWINS} for line in file.read_text().splitlines()]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said = run("twins", str(file), "--out", str(out), "evaluator.timeout_seconds=0.01")
    assert code == 1, said
    audits = [json.loads(line)["audit"] for line in out.read_text().splitlines()]
    assert audits == [earlier, later], "a figure of FILE is not replaced by one of --out"


def test_a_figure_of_other_tests_does_not_stay(tmp_path: Path) -> None:
    """Guards against `tasks.max_hackable` that accepts a task by the figure of its earlier tests."""
    first, second = {"audit": None}, {"instance_id": "second", "audit": None}
    file, out = put(tmp_path, first, second), tmp_path / "audited.jsonl"
    rows = [{**json.loads(line), "audit": {"rewarded": 0, "tried": 1}} for line in file.read_text().splitlines()]
    rows[1]["test_command"] = "earlier tests"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said = run("twins", str(file), "--out", str(out), "evaluator.timeout_seconds=0.01")
    assert code == 1, said
    audits = [json.loads(line)["audit"] for line in out.read_text().splitlines()]
    assert audits == [{"rewarded": 0, "tried": 1}, None]


def test_rows_of_another_file_are_not_replaced(tmp_path: Path) -> None:
    """Guards against hours of an audit that are gone after the audit of another file with the same --out."""
    file, out = put(tmp_path, {}), tmp_path / "audited.jsonl"
    text = json.dumps({**json.loads(file.read_text()), "instance_id": "other"}) + "\n"
    out.write_text(text)
    code, said = run("audit", str(file), "--out", str(out))
    assert code != 0
    assert f"--out={out}: has rows that {file} lacks, such as 'other'; name another file" in said
    assert out.read_text() == text


def test_an_out_that_holds_no_rows_is_not_replaced(tmp_path: Path) -> None:
    file, out = put(tmp_path, {}), tmp_path / "notes.jsonl"
    out.write_text("not a row\n")
    code, said = run("audit", str(file), "--out", str(out))
    assert code != 0
    assert f"--out={out}: holds no rows: {out}:1: " in said
    assert out.read_text() == "not a row\n"


def test_twins_go_where_the_task_is_not_valid(tmp_path: Path) -> None:
    """The solution is one that solves nothing."""
    patch = "diff --git a/a b/a\nnew file mode 100644\n--- /dev/null\n+++ b/a\n@@ -0,0 +1 @@\n+a\n"
    file = put(tmp_path, {"twins": TWINS, "patch": patch})
    code, said = run("twins", str(file))
    assert code == 1, said
    assert twins_in(file) == [{}]


def test_twins_are_written_after_each_task(tmp_path: Path) -> None:
    """A search that is interrupted at the second task keeps what it found for the first."""
    file = put(tmp_path, {}, {"instance_id": "second"})
    command = [*POLAR_GYM, "tasks", "twins", str(file), "runtime=bubblewrap"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as search:
        assert search.stdout is not None
        assert search.stdout.readline().startswith(f"{ROW['instance_id']}: ")
        search.send_signal(signal.SIGINT)
        search.communicate(timeout=60)
    first, second = twins_in(file)
    assert first
    assert second is None
