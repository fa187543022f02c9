"""The searches of `polar-gym tasks audit` for the solution: in the objects of a repository, and in vendored copies."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from polar_gym.curation.leaks import OBJECTS, copies_of

LINE = "return the_solution_of_the_task(argument)"


def run(directory: Path, *command: str, text: str = "") -> str:
    git = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    done = subprocess.run(command, cwd=directory, env=git, input=text, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "a.py").write_text("pass\n")
    run(tmp_path, "git", "init", "-q")
    run(tmp_path, "git", "add", "-A")
    run(tmp_path, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "base")
    return tmp_path


def found(repository: Path) -> str:
    return run(repository, "sh", "-c", OBJECTS, "sh", LINE)


def test_an_object_that_nothing_names_is_found(repository):
    assert found(repository) == ""
    run(repository, "git", "hash-object", "-w", "--stdin", text=f"def f(argument):\n    {LINE}\n")
    assert LINE in found(repository)


def test_a_line_of_the_base_commit_is_no_history(repository):
    (repository / "copy.py").write_text(f"    {LINE}\n")
    run(repository, "git", "add", "-A")
    run(repository, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "more")
    assert found(repository) == ""


@pytest.mark.parametrize(
    "copy",
    [
        "site-packages/some_package-1.0.dist-info/METADATA",
        "cache/some-package-1.0.tar.gz",
        "site-packages/pip/_vendor/some_package/core.py",
        "site-packages/setuptools/_vendor/some_package.py",
    ],
)
def test_copies_of_the_package_outside_of_the_workspace_are_found(tmp_path, copy):
    for place in (copy, f"workspace/{copy}", "site-packages/some_package_more-1.0.dist-info/METADATA"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    script = copies_of("some-package").replace("find /", f"find {tmp_path}", 1)
    (place,) = run(tmp_path / "workspace", "sh", "-c", script).splitlines()
    assert f"{tmp_path}/{copy}".startswith(place)
