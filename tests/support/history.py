"""A small git repository whose commits become tasks, or do not, each for another reason."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

MARK = Path("/tmp/polar-gym-test-from-git-ran")
"""The file that the package creates when it is imported."""
PROJECT = '[project]\nname = "doubler"\ndynamic = ["version"]\n[tool.setuptools_scm]\n'
PROJECT += 'version_file = "src/doubler/_version.py"\n'
PROJECT += '[dependency-groups]\ntest = ["polar-gym-no-such-package"]\n'
SOURCE = f"import pathlib\npathlib.Path('{MARK}').touch()\nfrom doubler._version import version\n\n"
SOURCE += "def double(x):\n    return x + 2\n"
TEST = "from doubler import double\n\ndef test_two():\n    assert double(2) == 4\n"
COMMITS: list[tuple[str, dict[str, str]]] = [
    ("Begin", {"pyproject.toml": PROJECT, "src/doubler/__init__.py": SOURCE, "tests/test_doubler.py": TEST}),
    ("Describe it", {"README.md": "It doubles.\n"}),
    ("Rename a thing", {"src/doubler/__init__.py": SOURCE + "\nNAME = 'doubler'\n"}),
    ("Test a thing", {"tests/test_doubler.py": TEST + "\ndef test_four():\n    assert double(2) + 0 == 4\n"}),
    (
        "Double numbers other than two\n\nThree was five. Fixes #7\n\nSigned-off-by: A <a@example.org>\n",
        {
            "src/doubler/__init__.py": SOURCE.replace("x + 2", "x * 2"),
            "tests/test_doubler.py": TEST + "\ndef test_three():\n    assert double(3) == 6\n",
            ".gitattributes": "tests export-ignore\n",
        },
    ),
    (
        "Name the doubler, and test what was right before",
        {
            "src/doubler/__init__.py": SOURCE.replace("x + 2", "x * 2") + "\nNAME = 'doubler'\n",
            "tests/test_doubler.py": TEST + "\ndef test_five():\n    assert double(5) == 10\n",
        },
    ),
    (
        "Halve, too, with a package that is nowhere",
        {
            "src/doubler/__init__.py": SOURCE.replace("x + 2", "x * 2") + "\ndef halve(x):\n    return x / 2\n",
            "tests/test_doubler.py": "import no_such_package_here\n" + TEST,
        },
    ),
]


def git(directory: Path, *arguments: str) -> str:
    names = {f"GIT_{who}_{what}": "a@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    names |= {"GIT_COMMITTER_DATE": "2025-03-01T12:00:00Z", "GIT_AUTHOR_DATE": "2025-03-01T12:00:00Z"}
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, env={**os.environ, **names}, check=True, capture_output=True, text=True).stdout


def commit(repository: Path, message: str, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(repository, "add", "--all")
    git(repository, "commit", "-q", "-m", message)


def make_history(repository: Path) -> None:
    """Make the repository in a new directory."""
    repository.mkdir(parents=True)
    git(repository, "init", "-q", "-b", "main")
    git(repository, "remote", "add", "origin", "https://example.org/some/doubler.git")
    for message, files in COMMITS:
        commit(repository, message, files)
