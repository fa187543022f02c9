"""Task sources: the loader's errors, the bundled suite, and the git repositories made from workspaces."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from polar_gym.tasks.bundled import SUITE
from polar_gym.workspaces.repository import WorkspaceError, make_repository, pack_git_dir
from tests.support.task_files import ROW, git, load, write

# The loader -----------------------------------------------------------------------------------------------------------


def test_test_lists_may_be_json_text(tmp_path):
    row = {**ROW, "FAIL_TO_PASS": '["t.A.b"]', "PASS_TO_PASS": ["t.A.c"], "hints_text": "kept"}
    (task,) = load("jsonl", path=write(tmp_path, row))
    assert (task.FAIL_TO_PASS, task.PASS_TO_PASS) == (["t.A.b"], ["t.A.c"])
    assert task.model_extra == {"hints_text": "kept"}


def test_a_test_list_in_lower_case_is_no_task_without_regression_tests(tmp_path):
    """Guards against a row whose `pass_to_pass` was ignored, beside a `FAIL_TO_PASS` that was read."""
    row = {**ROW, "FAIL_TO_PASS": ["t.A.b"]}
    with pytest.raises(ValueError, match=r"pass_to_pass: unknown key, .*; rename it to PASS_TO_PASS, or remove it"):
        load("jsonl", path=write(tmp_path, {**row, "pass_to_pass": ["t.A.c"]}))
    (task,) = load("jsonl", path=write(tmp_path, {**row, "PASS_TO_PASS": ["t.A.c"], "pass_to_pass": "kept"}))
    assert task.PASS_TO_PASS == ["t.A.c"]


def test_workspace_is_relative_to_the_file(tmp_path, monkeypatch):
    (tmp_path / "data" / "repo").mkdir(parents=True)
    write(tmp_path / "data", {**ROW, "workspace": "repo"})
    monkeypatch.chdir(tmp_path)
    (task,) = load("jsonl", path="data/tasks.jsonl")
    assert task.workspace == str(tmp_path / "data" / "repo")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"tasks\.jsonl:3: not JSON"),
        ("[]", r"tasks\.jsonl:3: expected a JSON object, got list"),
        ({**ROW, "FAIL_TO_PASS": "[1"}, r"tasks\.jsonl:3: FAIL_TO_PASS: not the JSON text of a list"),
        ({**ROW, "PASS_TO_PASS": [1]}, r"tasks\.jsonl:3: PASS_TO_PASS: expected a list of test ids"),
        ({**ROW, "PASS_TO_PASS": '"t.A.b"'}, r"tasks\.jsonl:3: PASS_TO_PASS: expected a list of test ids"),
        ({**ROW, "PASS_TO_PASS": None}, r"tasks\.jsonl:3: PASS_TO_PASS: expected a list of test ids, got 'None'"),
        ({**ROW, "PaTCH": ""}, r"tasks\.jsonl:3: PaTCH: unknown key, .*; rename it to patch, or remove it"),
        ({"instance_id": "b", "image": "i"}, r"tasks\.jsonl:3: problem_statement: Field required"),
        ({**ROW, "instance_id": " "}, r"tasks\.jsonl:3: instance_id: must not be empty"),
        ({**ROW, "patch": 3}, r"tasks\.jsonl:3: patch: "),
        ({**ROW, "image": None}, r"tasks\.jsonl:3: workspace, image: "),
        ({**ROW, "workspace": "nowhere"}, r"tasks\.jsonl:3: workspace: .*nowhere is not a directory"),
        (
            {**ROW, "problem_statement": "\ud800 x"},
            r"tasks\.jsonl:3: problem_statement: .*surrogates not allowed; correct",
        ),
        ({**ROW, "gym_row": {"a": ["\ud800"]}}, r"tasks\.jsonl:3: gym_row: .*surrogates not allowed; correct it, got "),
        ("[" * 100_000, r"tasks\.jsonl:3: nested too deeply to be read; leave this line out"),
        ({**ROW, "FAIL_TO_PASS": "[" * 100_000}, r"tasks\.jsonl:3: FAIL_TO_PASS: not the JSON text of a list"),
        ({**ROW, "instance_id": "first"}, r"tasks\.jsonl:3: instance_id: 'first' occurs twice"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path, row, message):
    path = write(tmp_path, {**ROW, "instance_id": "first"}, "", row)
    with pytest.raises(ValueError, match=message):
        load("jsonl", path=path)


def test_every_bad_row_has_a_line(tmp_path):
    """Guards against a file of many rows whose faults come to light one run after the other."""
    path = write(tmp_path, {"instance_id": "a"}, ROW, {**ROW, "instance_id": " "}, "{")
    with pytest.raises(ValueError, match="3 rows cannot be used") as raised:
        load("jsonl", path=path)
    said = str(raised.value).splitlines()[1:]
    assert [line.split(":")[1] for line in said] == ["1", "3", "4"]
    path = write(tmp_path, *[{}] * 30)
    with pytest.raises(ValueError, match="30 rows cannot be used") as raised:
        load("jsonl", path=path)
    assert str(raised.value).splitlines()[21:] == ["and 10 more"]


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.jsonl: cannot read the task file: No such file"):
        load("jsonl", path=tmp_path / "nothing.jsonl")


def test_selection(tmp_path):
    path = write(tmp_path, *({**ROW, "instance_id": name} for name in "abc"))
    assert [task.instance_id for task in load("jsonl", path=path, limit=2)] == ["a", "b"]
    assert [task.instance_id for task in load("jsonl", path=path, instance_ids=["c", "a"])] == ["a", "c"]
    with pytest.raises(ValueError, match="no task named d; known: a, b, c"):
        load("jsonl", path=path, instance_ids=["d"])


# The bundled suite ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", load("bundled"), ids=lambda task: task.instance_id)
def test_base_commit_is_the_workspaces(task, tmp_path):
    """An edit of a bundled repository must come with its new base commit, or its patches do not mean anything."""
    assert make_repository(Path(task.workspace), tmp_path / "repository") == task.base_commit


def test_bundled_repositories_hold_no_solutions_and_no_build_products():
    tracked = [path for path in (SUITE.parent / "repos").rglob("*") if "__pycache__" not in path.parts]
    assert {path.suffix for path in tracked if path.is_file()} <= {".py", ".md"}
    sources = "\n".join(path.read_text() for path in tracked if path.is_file())
    for task in load("bundled"):
        assert task.FAIL_TO_PASS
        for test in task.FAIL_TO_PASS:
            assert test.rpartition(".")[2] not in sources


# Repositories from workspaces -----------------------------------------------------------------------------------------


def test_commit_does_not_depend_on_the_users_git(tmp_path, monkeypatch):
    """A user's hooks, signing, line endings and templates once changed what a base commit was."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_bytes(b"one\r\ntwo\n")
    (source / ".gitignore").write_text("*.log\n")
    (source / "kept.log").write_text("ignored files are committed too\n")
    plain = make_repository(source, tmp_path / "plain")
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "pre-commit").write_text("#!/bin/sh\nexit 1\n")
    (hooks / "pre-commit").chmod(0o755)
    config = tmp_path / "gitconfig"
    config.write_text(
        f"[core]\nautocrlf = input\nhooksPath = {hooks}\nfileMode = false\n[commit]\ngpgSign = true\n"
        "[init]\ndefaultBranch = trunk\n[user]\nuseConfigOnly = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody")
    assert make_repository(source, tmp_path / "configured") == plain
    monkeypatch.undo()
    assert git(tmp_path / "configured", "status", "--porcelain") == ""
    assert git(tmp_path / "configured", "ls-files").split() == [".gitignore", "a.txt", "kept.log"]


def test_commit_depends_on_content_and_mode(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "run.sh").write_text("true\n")
    shas = [make_repository(source, tmp_path / "first")]
    (source / "run.sh").chmod(0o755)
    shas.append(make_repository(source, tmp_path / "second"))
    (source / "run.sh").write_text("false\n")
    shas.append(make_repository(source, tmp_path / "third"))
    assert len(set(shas)) == 3


def test_compiled_files_are_left_out(tmp_path):
    """pip compiles every module that it installs, the bundled repositories' too."""
    source = tmp_path / "source"
    (source / "__pycache__").mkdir(parents=True)
    (source / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"x")
    (source / "a.py").write_text("")
    make_repository(source, tmp_path / "repository")
    assert git(tmp_path / "repository", "ls-files") == "a.py"
    assert not (tmp_path / "repository" / "__pycache__").exists()


def test_history_of_a_repository_ends_at_its_head(tmp_path):
    """A fix that is in the source's object store must not be readable where the agent works."""
    source = tmp_path / "source"
    source.mkdir()
    git(source, "init", "-q", "-b", "trunk")
    for text in ("first", "base", "fix"):
        (source / "a.txt").write_text(text)
        git(source, "add", ".")
        git(source, "commit", "-qm", text)
    fix, base = git(source, "rev-parse", "HEAD"), git(source, "rev-parse", "HEAD~1")
    git(source, "tag", "v2")
    git(source, "branch", "fixed")
    git(source, "remote", "add", "origin", "/nowhere")
    git(source, "reset", "-q", "--hard", base)
    (source / "a.txt").write_text("not committed")

    repository = tmp_path / "repository"
    assert make_repository(source, repository) == base
    assert (repository / "a.txt").read_text() == "base"
    assert git(repository, "log", "--format=%s").split() == ["base", "first"]
    assert git(repository, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert git(repository, "remote") == ""
    assert subprocess.run(["git", "-C", repository, "cat-file", "-e", fix], check=False).returncode != 0
    assert not (repository / ".git" / "logs").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_repository_of_another_user_is_read(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    git(source, "init", "-q")
    git(source, "commit", "-q", "--allow-empty", "-m", "base")
    head = git(source, "rev-parse", "HEAD")
    for path in (source, *source.rglob("*")):
        os.chown(path, 1234, 1234)
    assert make_repository(source, tmp_path / "repository") == head


def test_repository_without_commits_is_named(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    git(source, "init", "-q")
    with pytest.raises(WorkspaceError, match="HEAD"):
        make_repository(source, tmp_path / "repository")
    with pytest.raises(WorkspaceError, match="nothing is not a directory"):
        make_repository(tmp_path / "nothing", tmp_path / "repository")


def test_packed_git_dir_is_a_repository_again(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("base\n")
    repository = tmp_path / "repository"
    head = make_repository(source, repository)
    restored = tmp_path / "restored"
    restored.mkdir()
    subprocess.run(["tar", "-x", "-C", restored], input=pack_git_dir(repository), check=True)
    (source / "a.txt").write_text("changed\n")
    diff = git(source, f"--git-dir={restored}", "--work-tree=.", "diff", head)
    assert "-base" in diff
    assert "+changed" in diff
