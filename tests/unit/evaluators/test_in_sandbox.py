"""Which Python process takes the witness's key: the first one that runs tests. Which packages are found in copies."""

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


COPIED = ("site-packages/doubler", "work/src/doubler", "work/tests")


def run(words: list[str], place: str, tmp_path: Path) -> str:
    """The output of a Python that has copies in `site-packages`, under the witness."""
    for package in COPIED:
        (tmp_path / package).mkdir(parents=True, exist_ok=True)
        (tmp_path / package / "__init__.py").touch()
    placed = shutil.copytree(IN_SANDBOX, tmp_path / "witness", dirs_exist_ok=True)
    (placed / "key").write_bytes(bytes(32))
    program = placed / "sitecustomize.py"
    start = f"import sys\np = {str(tmp_path / 'site-packages')!r}\nsys.path.{place}\n"
    program.write_text(program.read_text().replace("import os\n", f"import os\n{start}", 1))
    environment = {"PYTHONPATH": str(placed), "POLAR_GYM_ROOTS": str(tmp_path / "work" / "src")}
    done = subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True, timeout=60)
    return done.stdout.decode().strip()


@pytest.mark.parametrize("place", ["append(p)", "insert(0, p)"], ids=["copy is last", "copy is first"])
def test_a_workspace_goes_before_its_copy(place: str, tmp_path: Path) -> None:
    """Guards against a copy that is tested in place of the workspace; old setuptools put it first."""
    program = str(IN_SANDBOX / "polar_gym_copies.py")
    assert run([program, str(tmp_path / "work"), "mark"], place, tmp_path) == str(tmp_path / "work" / "src")
    found = run(["-c", "import doubler; print(doubler.__file__)"], place, tmp_path)
    assert found == str(tmp_path / "work" / "src" / "doubler" / "__init__.py")


def test_no_module_of_the_workspace_sees_the_key(tmp_path: Path) -> None:
    """Guards against a workspace on PYTHONPATH: its `hmac` was imported while the key was in a variable."""
    (tmp_path / "work" / "src").mkdir(parents=True)
    (tmp_path / "work" / "src" / "hmac.py").write_text("print('taken')\nfrom _hashlib import hmac_new as new\n")
    assert run(["-c", "test = 'began'; print(test)"], "append(p)", tmp_path) == "began"
    assert (tmp_path / "witness" / "record").exists()
    assert not (tmp_path / "witness" / "key").exists()
