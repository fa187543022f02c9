"""The script of a task in swebench's form, with the tests under the witness."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from polar_gym.evaluators import hidden_tests
from polar_gym.evaluators.swebench_report import END, START

SCRIPT = f"""\
cat > patch <<'END_OF_PATCH'
{{}}
END_OF_PATCH
echo "$PYTHONPATH" > before
: '{START}'
echo "$PYTHONPATH" > during
false
: '{END}'
"""
Run = Callable[[str], str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script with a test file in a directory, and returns its output."""
    monkeypatch.setattr(hidden_tests, "_KILL_LEFTOVERS", ":")  # it ends all processes of the machine
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def in_directory(script: str) -> str:
        text = hidden_tests.eval_script(script, str(tmp_path), {"test_a.py": b"\x00"}, "/witness")
        (tmp_path / "script").write_bytes(text.encode())
        return subprocess.run(["bash", "script"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    return in_directory


@pytest.mark.parametrize("separator", ["\r\n", "\r", "\f", "\v", "\x1c", "\x85", "\u2028"])
def test_a_patch_in_the_script_stays_as_it_is(separator: str, run: Run, tmp_path: Path) -> None:
    """Guards against a test patch that does not apply, so that its data files are missing."""
    run(SCRIPT.format(f"+a{separator}b"))
    assert (tmp_path / "patch").read_bytes() == f"+a{separator}b\n".encode()


def test_only_the_tests_run_under_the_witness(run: Run, tmp_path: Path) -> None:
    """Guards against a program before the tests that takes the witness's key, such as `conda activate testbed`."""
    said = run(SCRIPT)
    assert (tmp_path / "before").read_text() == "\n"
    assert (tmp_path / "during").read_text() == "/witness\n"
    assert (tmp_path / "test_a.py").read_bytes() == b"\x00"
    assert said.splitlines()[-1].endswith(": 1")
