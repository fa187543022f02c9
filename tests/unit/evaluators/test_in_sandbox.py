"""Which Python process takes the witness's key: the first one that runs tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polar_gym.evaluators import witness

IN_SANDBOX = Path(witness.__file__).parent / "in_sandbox"


@pytest.mark.parametrize(
    ("words", "takes"),
    [
        (["conda", "shell.posix", "activate", "testbed"], False),
        (["poetry", "run", "pytest", "tests"], False),
        (["pip3.11", "install", "-e", ".[test]"], False),
        (["-u", "conda", "run", "pytest"], False),
        (["-m", "nox", "-s", "tests"], False),
        (["pytest", "tests/pip"], True),
        (["pytest", "-k", "conda"], True),
        (["-m", "unittest", "tests.pip"], True),
        (["-W", "error", "runtests.py", "pip"], True),
        (["main.py", "pip"], False),
    ],
)
def test_the_first_program_that_runs_tests_takes_the_key(words: list[str], takes: bool, tmp_path: Path) -> None:
    """Guards against a launcher that takes the key, after which the tests have no witness, and against a runner that
    leaves it because of its arguments."""
    placed = shutil.copytree(IN_SANDBOX, tmp_path / "witness")
    (placed / "key").write_bytes(bytes(32))
    for name in ("conda", "poetry", "pip3.11", "pytest", "main.py", "runtests.py", "nox.py"):
        (tmp_path / name).write_text("")
    environment = os.environ | {"PYTHONPATH": str(placed)}
    subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, check=False, capture_output=True, timeout=60
    )
    assert (placed / "key").exists() != takes
