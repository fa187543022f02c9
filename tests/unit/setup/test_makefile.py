"""The list that `make help` prints, held against the Makefile's targets."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.requirements import need_program

CHECKOUT = Path(__file__).parents[3]
INTERNAL = {"core", "dev", "dev,swe"}
"""Targets that only other targets name."""


@pytest.fixture(autouse=True)
def _make() -> None:
    need_program("make", "apt-get install make")


def make(*arguments: str) -> str:
    """Return the output of a make that knows nothing of the make that may have started the tests."""
    command = ["make", "--no-print-directory", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False, timeout=60
    ).stdout


def phony() -> set[str]:
    (line,) = re.findall(r"^\.PHONY:(.*)$", make("-pRrn", "help"), re.MULTILINE)
    return set(line.split())


def listed() -> set[str]:
    return set(re.findall(r"^  make (\S+) +\S", make("help"), re.MULTILINE))


def test_help_lists_every_target_that_a_person_may_make() -> None:
    assert listed() == phony() - INTERNAL


def test_every_target_is_phony() -> None:
    """A file that is named like a target would keep make from running the recipe."""
    targets = re.findall(r"^([a-z][a-z0-9-]*):(?!=)", (CHECKOUT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(targets) <= phony()


def test_help_fits_a_terminal_and_has_groups() -> None:
    lines = make("help").splitlines()
    assert max(map(len, lines)) <= 100
    groups = [line.partition(" (")[0] for line in lines if line and not line.startswith(" ")]
    assert groups == ["First run", "Develop", "Show", "Bench", "House-keeping"]


def test_a_show_target_checks_what_it_needs_and_passes_its_arguments() -> None:
    commands = make("-n", "show-attacks", "ARGS=--quick").splitlines()
    assert commands == [
        ".ci/inside .ci/needs demo",
        "make --no-print-directory dev",
        ".ci/venv dev",
        ".venv/bin/python -m tests.show.attacks --quick",
    ]
    assert ".ci/inside .ci/needs test" in make("-n", "show-pypi-tasks").splitlines()
    assert ".ci/venv dev,swe" in make("-n", "show-pypi-tasks").splitlines()
