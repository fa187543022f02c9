"""Writes the `eval_script` of a task whose tests run with pytest, in the form of swebench's scripts.

Images of SWE-Gym and SWE-smith are made like SWE-bench's: the repository at `/testbed`, a conda environment `testbed`
(https://github.com/SWE-Gym/SWE-Bench-Fork and https://github.com/SWE-bench/SWE-smith, `swesmith/harness/utils.py`).
Their scripts may install the repository again before the tests. Ours do not: a sandbox has no network, and the image
already has the repository installed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from polar_gym.evaluators.swebench_report import END, START

WORKSPACE = "/testbed"
ACTIVATE = ("source /opt/miniconda3/bin/activate", "conda activate testbed")

_DATA = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
"""Endings of files of a test patch that swebench does not pass to the test runner."""
_PLACEHOLDERS = re.compile(r"\{(files|cases)\}")


def eval_script(command: str, test_patch: str = "", workspace: str = WORKSPACE) -> str:
    """Return a script that applies the test patch and runs `command` between swebench's marks.

    Both happen in the environment of the image.
    """
    place = shlex.quote(workspace)
    lines = ["#!/bin/bash", "set -xo pipefail", *ACTIVATE, f"cd {place}"]
    if test_patch.strip():
        patch = test_patch.removesuffix("\n")
        lines += [f"git -c safe.directory={place} apply -v - <<'{_delimiter(patch)}'", patch, _delimiter(patch)]
    lines += [f": '{START}'", command, f": '{END}'"]
    return "\n".join(lines) + "\n"


def filled_in(template: str, *, files: Sequence[str], cases: Sequence[str]) -> str:
    """Return `template` with `{files}` and `{cases}` filled in. Raises `ValueError` where a needed list is empty."""
    if "{files}" in template and not files:
        raise ValueError("neither the test patch nor the tests' ids name a test file")
    if "{cases}" in template and not cases:
        raise ValueError("neither the test patch nor the tests' ids name a test case")
    values = {"files": shlex.join(files), "cases": shlex.quote(" or ".join(cases))}
    return _PLACEHOLDERS.sub(lambda match: values[match[1]], template)


def patched_files(test_patch: str) -> list[str]:
    """Return the files of a test patch that a test runner takes, by their new names, without removed files."""
    sections = re.split(r"^(?=diff --git )", test_patch, flags=re.MULTILINE)
    kept = (section for section in sections if not re.search(r"^\+\+\+ /dev/null$", section, re.MULTILINE))
    names = (name for section in kept for name in re.findall(r"^diff --git a/.* b/(.*)$", section, re.MULTILINE))
    return [name for name in names if not name.endswith(_DATA)]


def files_of_tests(tests: Iterable[str]) -> list[str]:
    """Return the Python files in test ids of pytest's form, each once."""
    files = (test.partition("::")[0] for test in tests if "::" in test)
    return sorted({file for file in files if PurePosixPath(file).suffix == ".py"})


def cases_of(test_patch: str, tests: Iterable[str]) -> list[str]:
    """Return mypy's data-driven cases: the cases in a test patch, else the last parts of the tests' ids."""
    shown = re.findall(r"^[ +]\[case ([^\]]+)\]", test_patch, re.MULTILINE)
    return list(dict.fromkeys(shown or (test.rpartition("::")[2] for test in tests)))


def _delimiter(text: str) -> str:
    """Return a word that does not occur in `text`."""
    delimiter = "END_OF_TEST_PATCH"
    while delimiter in text:
        delimiter += "_"
    return delimiter
