"""Virtual environments for tasks, built with the system's interpreter from a wheel made on the spot (no network)."""

import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from polar_gym.tasks.venv import INTERPRETER, VenvError, ensure_venv, inside, variables
from tests.requirements import need


def make_wheel(directory: Path) -> Path:
    wheel = directory / "polar_sample-1.0-py3-none-any.whl"
    files = {
        "polar_sample.py": "ANSWER = 42\n",
        "polar_sample-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: polar-sample\nVersion: 1.0\n",
        "polar_sample-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "polar_sample-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


@pytest.fixture(autouse=True)
def _venv_module():
    probe = [INTERPRETER, "-c", "import venv, ensurepip"]
    present = Path(INTERPRETER).exists() and subprocess.run(probe, check=False).returncode == 0
    need(present, "the system's python3-venv", "apt-get install python3-venv")


def test_its_programs_run_where_a_sandbox_has_it(tmp_path):
    """Guards against mounting it where it was built, which may lie in a directory that is closed to the agent."""
    venv = ensure_venv([str(make_wheel(tmp_path))], tmp_path / "cache")
    pip = (venv / "bin" / "pip").read_text()
    assert pip.startswith(f"#!{inside(venv)}/bin/python")
    for script in (venv / "bin").iterdir():
        assert script.is_symlink() or str(venv) not in script.read_text(errors="replace"), script
    assert variables(venv, "/usr/bin") == {"VIRTUAL_ENV": inside(venv), "PATH": f"{inside(venv)}/bin:/usr/bin"}


def test_built_once_also_by_two_at_a_time_and_rebuilt_when_unfinished(tmp_path):
    requirements = [str(make_wheel(tmp_path))]
    built: list[Path] = []
    threads = [
        threading.Thread(target=lambda: built.append(ensure_venv(requirements, tmp_path / "cache"))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = built
    assert first == second
    shown = subprocess.run(
        [first / "bin" / "python", "-c", "import polar_sample; print(polar_sample.ANSWER)"],
        capture_output=True,
        text=True,
    )
    assert shown.stdout == "42\n", shown.stderr

    (first / "stays").touch()
    assert ensure_venv(requirements, tmp_path / "cache") == first
    assert (first / "stays").exists()

    (first / "polar-gym.json").unlink()  # as if the build had been killed
    assert ensure_venv(requirements, tmp_path / "cache") == first
    assert not (first / "stays").exists()


def test_failure_holds_the_command_and_what_pip_said(tmp_path):
    wheel = tmp_path / "nothing-1.0-py3-none-any.whl"
    with pytest.raises(VenvError, match=r"(?s)pip install .*nothing-1\.0.*failed with exit code 1:.*nothing-1\.0"):
        ensure_venv([str(wheel)], tmp_path / "cache")
