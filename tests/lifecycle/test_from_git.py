"""Tasks made out of the commits of a small repository, with real git, real sandboxes and real grading."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polar_gym.cli import app
from polar_gym.curation.bench import Bench
from polar_gym.curation.from_git import commits, journal, open_history, tried, try_commit
from polar_gym.curation.pins import resolve
from polar_gym.errors import ConfigError
from polar_gym.paths import cache_dir
from polar_gym.runtimes.bubblewrap import Bubblewrap
from polar_gym.schema import RuntimeSpec
from polar_gym.tasks.rows import Selection, load_tasks
from tests.support.history import MARK, PROJECT, SOURCE, TEST, commit, git, make_history
from tests.support.requirements import need, need_bubblewrap


@dataclass(frozen=True)
class Searched:
    repository: Path
    out: Path
    said: str


def search(repository: Path, out: Path, *options: str) -> tuple[int, str]:
    arguments = ["tasks", "from-git", str(repository), "runtime=bubblewrap", "--out", str(out), *options]
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, f"{result.output}{result.exception or ''}"


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """The repository and the file that `polar-gym tasks from-git` wrote, and its output."""
    missing = Bubblewrap(Bubblewrap.Options()).check()
    need(not missing, "a working bubblewrap", "; ".join(missing))
    directory = tmp_path_factory.mktemp("from-git")
    repository = directory / "doubler"
    make_history(repository)
    out = directory / "tasks" / "git.jsonl"
    code, said = search(repository, out)
    assert code == 0, said
    return Searched(repository, out, said)


def test_a_commit_that_mends_what_its_tests_show_becomes_a_task(searched: Searched) -> None:
    (task,) = load_tasks(searched.out, Selection())
    sha = git(searched.repository, "rev-parse", "HEAD~2").strip()
    assert task.instance_id == f"some__doubler-{sha[:12]}"
    assert task.FAIL_TO_PASS == ["tests/test_doubler.py::test_three"]
    assert task.PASS_TO_PASS == ["tests/test_doubler.py::test_two"]
    assert task.problem_statement.startswith("Double numbers other than two\n\nThree was five.")
    assert "Signed-off-by" not in task.problem_statement
    assert "x * 2" in task.patch
    assert "x * 2" not in task.problem_statement
    row = json.loads(searched.out.read_text())
    assert (row["commit"], row["problem_statement_source"]) == (sha, "commit message")
    assert row["requirements_left_out"] == ["polar-gym-no-such-package"]


def test_the_workspace_is_the_commit_before_without_what_came_later(searched: Searched) -> None:
    (task,) = load_tasks(searched.out, Selection())
    workspace = Path(task.workspace or "")
    assert "x + 2" in (workspace / "src/doubler/__init__.py").read_text()
    assert "test_three" not in (workspace / "tests/test_doubler.py").read_text()
    assert not (workspace / ".git").exists()
    assert "Version: 0" in (workspace / "src/doubler.egg-info/PKG-INFO").read_text()


def test_the_table_says_why_commits_are_no_tasks(searched: Searched) -> None:
    for reason, count in (
        ("it changes no test file", 2),
        ("it changes no source file", 1),
        ("it is the first commit", 1),
        ("fell: running the tests before and after the change", 2),
        ("not tried", 0),
        ("tasks", 1),
    ):
        assert any(reason in line and str(count) in line for line in searched.said.splitlines()), (
            reason,
            searched.said,
        )
    assert "no test fails before the change" in searched.said
    assert "name the packages of these modules with --require: no_such_package_here" in searched.said


def test_a_search_goes_on_where_it_was(searched: Searched) -> None:
    """The task's line is there and the journal's is not, as after a kill between the two: no second task is made."""
    tasks, journal = searched.out.read_bytes(), searched.out.with_suffix(".tried.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if b"some__doubler" not in line))
    code, said = search(searched.repository, searched.out)
    assert code == 0, said
    assert "3 candidates, 1 not tried yet" in said
    assert searched.out.read_bytes() == tasks
    assert "0 not tried yet" in search(searched.repository, searched.out)[1]


def test_code_of_a_repository_runs_in_sandboxes_only(searched: Searched) -> None:
    assert not MARK.exists()


def test_validation_accepts_the_task(searched: Searched) -> None:
    result = CliRunner().invoke(app, ["tasks", "validate", str(searched.out), "runtime=bubblewrap"])
    assert result.exit_code == 0, result.output
    assert "1 of 1 tasks valid in bubblewrap" in result.output


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--head", "no-such-branch"], "--head=no-such-branch: names no commit of"),
        (["--issues", "/nowhere.jsonl"], "cannot read the issues"),
        (["--writer", "model"], "expected MODEL@URL"),
        (["--writer", "m@http://127.0.0.1:1/v1", "--writer-key-env", "NO_SUCH_KEY"], "there is no such variable"),
        (["--name", "?"], "expected OWNER/NAME"),
    ],
)
def test_bad_input_is_named_before_anything_starts(searched: Searched, options: list[str], problem: str) -> None:
    code, said = search(searched.repository, searched.out.with_name("other.jsonl"), *options)
    assert code != 0
    assert problem in said


def test_a_directory_without_a_history_is_named(tmp_path: Path) -> None:
    code, said = search(tmp_path, tmp_path / "tasks.jsonl")
    assert code != 0
    assert f"{tmp_path}: no git history here" in said


def test_a_history_without_candidates_is_named(tmp_path: Path) -> None:
    make_history(tmp_path / "doubler")
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init")
    code, said = search(tmp_path / "doubler", tmp_path / "tasks.jsonl", "--since", "2990-01-01")
    assert code != 0
    assert "of 0 commits none changes a source file and a test" in said
    code, said = search(tmp_path / "empty", tmp_path / "tasks.jsonl")
    assert code != 0
    assert "names no commit of" in said


async def test_a_link_that_leads_out_of_the_repository_is_not_followed(tmp_path: Path) -> None:
    """Guards against a file with the version that is written through a link to a directory of this machine."""
    repository, elsewhere = tmp_path / "doubler", tmp_path / "elsewhere"
    elsewhere.mkdir()
    make_history(repository)
    (repository / "linked").symlink_to(elsewhere)
    commit(repository, "Link", {"pyproject.toml": PROJECT.replace("src/doubler", "linked")})
    commit(repository, "Change both", {"src/doubler/__init__.py": SOURCE + "\n", "tests/test_doubler.py": TEST + "\n"})
    history = open_history(repository, None)
    async with Bench(RuntimeSpec(name="bubblewrap"), cache_dir()) as bench:
        result = await try_commit(history, next(commits(history)), bench, tmp_path / "tasks.jsonl", lambda text: None)
    assert "linked/_version.py: " in result.why
    assert not list(elsewhere.iterdir())


async def test_an_index_that_is_away_is_not_the_fate_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against commits that count as without wheels, and are never tried again, because the index was away."""
    need_bubblewrap()
    make_history(tmp_path / "doubler")
    history = open_history(tmp_path / "doubler", None)
    candidate, out = next(commits(history)), tmp_path / "tasks.jsonl"
    assert resolve(["packaging"], cache_dir())  # pip itself is made while there is an index
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "0", "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    async with Bench(RuntimeSpec(name="bubblewrap"), cache_dir()) as bench:
        stopped = rf"stopped at {candidate.sha[:12]}, .* index does not answer: http://127\.0\.0\.1:9/simple/.* goes on"
        with pytest.raises(ConfigError, match=stopped):
            await try_commit(history, candidate, bench, out, lambda step: None)
    assert not journal(out).exists()


async def test_a_fault_of_the_machine_is_not_the_fate_of_a_commit(tmp_path: Path) -> None:
    """Guards against commits that are never tried again, because the sandboxes' directory or daemon was away."""
    need_bubblewrap()
    make_history(tmp_path / "doubler")
    history = open_history(tmp_path / "doubler", None)
    candidate, out = next(commits(history)), tmp_path / "tasks.jsonl"
    with tempfile.TemporaryDirectory() as parent:
        (scratch := Path(parent, "scratch")).mkdir()
        spec = RuntimeSpec.model_validate({"name": "bubblewrap", "scratch": str(scratch)})
        async with Bench(spec, cache_dir()) as bench:

            def lose(step: str) -> None:
                if step.startswith("running the tests"):
                    scratch.rmdir()

            stopped = rf"stopped at {candidate.sha[:12]}, running the tests .*: no scratch directory .* goes on"
            with pytest.raises(ConfigError, match=stopped):
                await try_commit(history, candidate, bench, out, lose)
            assert not journal(out).exists()
            scratch.mkdir()
            result = await try_commit(history, candidate, bench, out, lambda step: None)
    assert "no_such_package_here" in result.why
    assert tried(out, "") == {candidate.sha: result}
