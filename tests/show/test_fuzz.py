"""Tests of the search for inputs that break a law: it finds them and keeps them as examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
LAWS = '''"""Laws of a sort that loses what is equal."""

from hypothesis import given
from hypothesis import strategies as st


def sort(values):
    return sorted(set(values))


@given(values=st.lists(st.integers()))
def test_it_keeps_the_length(values):
    assert len(sort(values)) == len(values)


@given(st.data())
def test_it_keeps_the_sum(data):
    values = data.draw(st.lists(st.integers(1, 3)))
    assert sum(sort(values)) == sum(values)


@given(values=st.lists(st.integers()))
def test_it_sorts(values):
    assert sort(sort(values)) == sort(values)


def test_that_is_no_law():
    raise AssertionError
'''


def run(directory: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)} | environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_what_it_finds_becomes_an_example_that_every_run_tries(tmp_path: Path) -> None:
    conftest = (CHECKOUT / "tests" / "conftest.py").read_text(encoding="utf-8")
    (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
    laws = tmp_path / "test_laws.py"
    laws.write_text(LAWS, encoding="utf-8")

    search = run(tmp_path, "-m", "tests.show.fuzz", "--rounds=2", "--seed=1", ".", CI="true")
    assert search.returncode == 1, search.stdout
    written = json.loads((tmp_path / "build/show/fuzz.json").read_text(encoding="utf-8"))
    figures = written["figures"]
    failed = {failure["test"]: failure for failure in figures["failures"]}
    assert failed.keys() == {"test_laws.py::test_it_keeps_the_length", "test_laws.py::test_it_keeps_the_sum"}
    assert "values=[0, 0]" in failed["test_laws.py::test_it_keeps_the_length"]["said"]
    assert (figures["tests"], figures["tests_collected"], figures["seed"]) == (3, 3, 1)
    assert figures["examples_added_to"] == ["test_laws.py"]
    assert figures["rounds"] == 2
    assert figures["examples"] >= 200, "those of the law that holds"
    text = laws.read_text(encoding="utf-8")
    assert text.startswith(LAWS.partition("from")[0] + "from hypothesis import example, given\n")
    assert text.count("@example(") == 1, "hypothesis has no examples of drawn data"

    later = run(tmp_path, "-m", "pytest", "-k", "length", CI="true")
    assert later.returncode == 1
    assert "Failing explicit example" in later.stdout
    laws.write_text(text.replace("sorted(set(values))", "sorted(values)"), encoding="utf-8")
    assert run(tmp_path, "-m", "tests.show.fuzz", "--rounds=1", ".").returncode == 0
    assert not (tmp_path / ".hypothesis" / "patches").exists()
