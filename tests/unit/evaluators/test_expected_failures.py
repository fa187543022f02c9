"""Only a test may expect its failure, however pytest runs and reports it."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polar_gym.evaluators.parsers import FAILED, PASSED
from polar_gym.evaluators.witness import IN_SANDBOX, heard

pytest.importorskip("xdist")

FILES = {
    "lib.py": "import pytest\n\ndef total(numbers):\n    pytest.xfail('todo')\n",
    "test_lib.py": """
import unittest
import pytest
from lib import total

def test_total():
    assert total([1, 2]) == 3

@pytest.mark.xfail
def test_is_marked():
    assert False

class TestOld(unittest.TestCase):
    @unittest.expectedFailure
    def test_is_decorated(self):
        self.fail()

    def test_of_unittest(self):
        self.assertEqual(total([1]), 1)
""",
}
AFTERWARDS = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""
"""Reports a test when all of it has run, as pytest-rerunfailures does."""


@pytest.mark.parametrize(
    ("arguments", "conftest"), [([], ""), (["-n", "1"], ""), ([], AFTERWARDS)], ids=["alone", "xdist", "afterwards"]
)
def test_tested_code_may_not_expect_a_failure(tmp_path: Path, arguments: list[str], conftest: str) -> None:
    """Guards against `pytest.xfail()` in the agent's code, which made all tests pass that came to it: the origin of the
    exception was looked for in another process, or was that of another phase."""
    for name, text in {**FILES, "conftest.py": conftest}.items():
        (tmp_path / name).write_text(text)
    witness = tmp_path / "witness"
    shutil.copytree(IN_SANDBOX, witness)
    (witness / "key").write_bytes(key := secrets.token_bytes(32))
    subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, "test_lib.py"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(witness)},
        capture_output=True,
        check=False,
    )
    testimony = heard((witness / "record").read_bytes(), key, ["lib.py"])
    assert testimony.problem == ""
    assert testimony.tests == {
        "test_lib.py::test_total": FAILED,
        "test_lib.py::test_is_marked": PASSED,
        "test_lib.py::TestOld::test_is_decorated": PASSED,
        "test_lib.py::TestOld::test_of_unittest": FAILED,
    }
