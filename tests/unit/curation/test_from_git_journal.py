"""The journal of a search of a git history, and the commits that it reads: what is tried again, and what is said."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from polar_gym.errors import ConfigError

pytest.importorskip("packaging")

from polar_gym.curation.from_git import commits, journal, open_history, tried
from polar_gym.curation.making import instance_ids


def git(repository: Path, *arguments: str) -> None:
    own = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    subprocess.run(["git", "-C", str(repository), *own, *arguments], check=True, capture_output=True)


def test_a_commit_that_fell_is_tried_again_with_other_options(tmp_path: Path) -> None:
    """Guards against advice without effect: `--require` was told, and the commit was skipped for ever."""
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "Begin")
    plain = open_history(tmp_path, "o/a")
    numpy = replace(plain, extra_requirements=["numpy"])
    out = tmp_path / "tasks.jsonl"
    lines = [
        {"commit": "a", "task": "o__a-a", "fell": "", "why": ""},  # as earlier versions wrote it
        {"commit": "b", "task": "", "fell": "running the tests", "why": "name the packages with --require: numpy"},
        {"commit": "b", "task": "", "fell": "running the tests", "why": "", "options": numpy.options},
        {"commit": "c", "task": "", "fell": "running the tests", "why": "", "options": numpy.options},
    ]
    journal(out).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(tried(out, plain.options)) == ["a", "b"]
    assert list(tried(out, numpy.options)) == ["a", "b", "c"]


def test_bad_lines_are_named(tmp_path: Path) -> None:
    """Guards against tracebacks at a journal of a newer version, and at rows that are no tasks."""
    out = tmp_path / "tasks.jsonl"
    journal(out).write_text('{"commit": "a", "of_a_newer_version": 1}\n')
    with pytest.raises(ConfigError, match=r"tasks\.tried\.jsonl:1: not a line of this version's journal: .*newer"):
        tried(out, "")
    out.write_text('{"id": "a"}\n')
    with pytest.raises(ConfigError, match=r"tasks\.jsonl:1: instance_id: is missing"):
        instance_ids(out)


def test_a_message_may_have_any_character(tmp_path: Path) -> None:
    """Guards against a history that cannot be searched, for one message with a separator of ours."""
    git(tmp_path, "init")
    (tmp_path / "a.py").write_text("1\n")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-m", "One\x1ftwo\x1ethree")
    (commit,) = commits(open_history(tmp_path, "o/a"))
    assert commit.message.strip() == "One\x1ftwo\x1ethree"
    assert list(commit.files) == ["a.py"]
