"""Tasks made out of two releases of a small package, with real sandboxes, a real environment and real grading."""

import asyncio
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polar_gym.cli import app
from polar_gym.curation import CurationError
from polar_gym.curation.bench import Bench
from polar_gym.curation.from_pypi import Release, pinned
from polar_gym.curation.pins import resolve
from polar_gym.curation.validation import validate
from polar_gym.paths import cache_dir
from polar_gym.runtimes.bubblewrap import Bubblewrap
from polar_gym.schema import RuntimeSpec
from polar_gym.tasks.rows import Selection, load_tasks
from tests.support.requirements import need

MARK = Path("/tmp/polar-gym-test-curation-ran")
"""What the package leaves where it is imported."""

OLD = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: doubler\nVersion: 1.0\n",
    "src/doubler/__init__.py": f"import pathlib\npathlib.Path('{MARK}').touch()\n\ndef double(x):\n    return x + 2\n",
    "tests/test_doubler.py": "from doubler import double\n\ndef test_two():\n    assert double(2) == 4\n",
    "CHANGES.md": "# Changes\n\n## 1.0\n\n- First.\n",
}
NEW = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: doubler\nVersion: 1.1\n",
    "src/doubler/__init__.py": OLD["src/doubler/__init__.py"].replace("x + 2", "x * 2"),
    "tests/test_doubler.py": OLD["tests/test_doubler.py"]
    + "\ndef test_three():\n    assert double(3) == 6\n"
    + "\ndef test_metadata():\n    from importlib.metadata import version\n    assert version('doubler') == '1.0'\n",
    "CHANGES.md": "# Changes\n\n## 1.1\n\n- Numbers other than two are doubled, too.\n\n## 1.0\n\n- First.\n",
}
UNTESTED = {
    "src/doubler/__init__.py": NEW["src/doubler/__init__.py"] + "\nNAME = 'doubler'\n",
    "tests/test_doubler.py": NEW["tests/test_doubler.py"] + "\ndef test_four():\n    assert double(4) == 8\n",
}


def put_release(cache: Path, version: str, files: Mapping[str, str]) -> None:
    """Where a downloaded release would be."""
    path = cache / "sdists" / "doubler" / version / f"doubler-{version}.tar.gz"
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"doubler-{version}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


def run(*arguments: str) -> tuple[int, str]:
    """A command of the command line: its exit code, and what it said."""
    result = CliRunner().invoke(app, [*arguments, "runtime=bubblewrap"])
    return result.exit_code, f"{result.output}{result.exception or ''}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file that `polar-gym tasks from-pypi doubler 1.0 1.1` wrote."""
    missing = Bubblewrap(Bubblewrap.Options()).check()
    need(not missing, "a working bubblewrap", "; ".join(missing))
    directory = tmp_path_factory.mktemp("curation")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLAR_GYM_CACHE", str(directory / "cache"))
        for version, files in (("1.0", OLD), ("1.1", NEW), ("1.2", {**NEW, **UNTESTED})):
            put_release(directory / "cache", version, files)
        out = directory / "tasks" / "pypi.jsonl"
        code, said = run("tasks", "from-pypi", "doubler", "1.0", "1.1", "--out", str(out))
        assert code == 0, said
        yield out


def test_tests_are_sorted_by_running_them(made):
    (task,) = load_tasks(made, Selection())
    settled = {"test_three": task.FAIL_TO_PASS, "test_two": task.PASS_TO_PASS, "test_metadata": task.PASS_TO_PASS}
    for name, group in settled.items():
        assert f"tests/test_doubler.py::{name}" in group
    assert len(task.FAIL_TO_PASS) + len(task.PASS_TO_PASS) == len(settled)


def test_the_workspace_is_the_old_release_and_the_instruction_the_maintainers_own(made):
    (task,) = load_tasks(made, Selection())
    workspace = Path(task.workspace or "")
    assert "x + 2" in (workspace / "src/doubler/__init__.py").read_text()
    assert "test_three" not in (workspace / "tests/test_doubler.py").read_text()
    assert "- Numbers other than two are doubled, too." in task.problem_statement
    assert "x * 2" not in task.problem_statement


def test_code_of_a_release_runs_in_sandboxes_only(made):
    assert not MARK.exists()


def test_a_task_is_made_once(made):
    before = made.read_bytes()
    code, said = run("tasks", "from-pypi", "doubler", "1.0", "1.1", "--out", str(made))
    assert code != 0
    assert "has doubler__doubler-1.0-1.1 already" in said
    assert made.read_bytes() == before


def test_nothing_is_written_for_releases_that_no_test_tells_apart(made):
    before = sorted(made.parent.rglob("*"))
    code, said = run("tasks", "from-pypi", "doubler", "1.1", "1.2", "--out", str(made))
    assert code != 0
    assert "no test fails before the change" in said
    assert sorted(made.parent.rglob("*")) == before


def test_validation_accepts_a_task_that_means_what_it_says(made):
    code, said = run("tasks", "validate", str(made))
    assert code == 0, said
    assert "1 of 1 tasks valid in bubblewrap" in said


def test_validation_names_what_is_wrong_with_a_task(made):
    row = json.loads(made.read_text())
    wrong = {
        "broken-gold": {"patch": row["patch"].replace("x * 2", "x * 3")},
        "no-gold": {"patch": ""},
        "no-op-resolves": {"FAIL_TO_PASS": row["PASS_TO_PASS"], "PASS_TO_PASS": []},
        "wrong-list": {"PASS_TO_PASS": row["FAIL_TO_PASS"]},
    }
    mixed = made.with_name("mixed.jsonl")
    mixed.write_text(
        "".join(json.dumps({**row, **changes, "instance_id": name}) + "\n" for name, changes in wrong.items())
    )
    verdicts = asyncio.run(validated(mixed))
    mixed.unlink()
    expected = {
        "broken-gold": "does not resolve it",
        "no-gold": "no reference solution",
        "no-op-resolves": "doing nothing resolves it",
        "wrong-list": "in the wrong list",
    }
    assert verdicts.keys() == expected.keys()
    for name, problem in expected.items():
        assert problem in verdicts[name]


async def validated(file: Path) -> dict[str, str]:
    async with Bench(RuntimeSpec(name="bubblewrap"), cache_dir()) as bench:
        tasks = load_tasks(file, Selection())
        return {task.instance_id: (await validate(task, bench)).problem for task in tasks}


def test_no_row_runs_its_tests_output_on_the_gateways_machine(tmp_path: Path) -> None:
    """Guards against `log_parser: os:system`: the log of the tests was executed outside of the sandbox."""
    mark = tmp_path / "ran"
    (tmp_path / "work").mkdir()
    row = {
        "instance_id": "a",
        "problem_statement": "It breaks.",
        "workspace": "work",
        "patch": "diff --git a/a b/a\nnew file mode 100644\n--- /dev/null\n+++ b/a\n@@ -0,0 +1 @@\n+a\n",
        "FAIL_TO_PASS": ["t"],
        "PASS_TO_PASS": [],
        "test_command": f"echo 'touch {mark}'",
        "log_parser": "os:system",
    }
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(row) + "\n")
    code, said = run("tasks", "validate", str(file))
    assert not mark.exists()
    assert code != 0
    assert f"{file}:1: log_parser: " in said


def test_the_environment_does_not_have_the_release_with_the_solution(made: Path) -> None:
    """pytest itself needs this package, and would bring the newest release."""
    release = Release(package="packaging", old="24.0", new="24.1")
    assert "packaging==24.0" in pinned(release, [], cache_dir())
    with pytest.raises(CurationError, match=r"no wheels for pytest<9, packaging>=24\.1 with packaging==24\.0"):
        pinned(release, ["packaging>=24.1"], cache_dir())


def test_pins_of_a_date_have_nothing_that_was_uploaded_later() -> None:
    """Guards against newer versions from sources on the machine's disk, whose files tell no date."""
    assert "pytest==7.4.3" in resolve([], cache_dir(), before=datetime(2023, 12, 9, tzinfo=UTC))
