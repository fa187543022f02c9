"""Virtual environments for tasks, built with the system's interpreter from a wheel made on the spot (no network)."""

import os
import re
import subprocess
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from polar_gym.workspaces.requirements import check_requirement
from polar_gym.workspaces.venv import ENVIRONMENTS, INTERPRETER, VenvError, ensure_venv, inside, variables
from tests.support.files import closed
from tests.support.requirements import need
from tests.support.task_files import ROW, load, write

RAN = "import pathlib; pathlib.Path({mark!r}).touch()\n"
SAMPLE = ["polar-sample==1.0"]


def make_wheel(directory: Path, metadata: str = "") -> Path:
    """With code that leaves `directory/ran` where any Python of its environment starts."""
    wheel = directory / "polar_sample-1.0-py3-none-any.whl"
    files = {
        "polar_sample.py": "ANSWER = 42\n",
        "polar_sample-1.0.data/scripts/sample.py": "#!python\nprint(42)\n",  # pip compiles it: bin/__pycache__
        "polar_sample.pth": RAN.format(mark=str(directory / "ran")),
        "polar_sample-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: polar-sample\nVersion: 1.0\n{metadata}",
        "polar_sample-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "polar_sample-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def make_source(directory: Path) -> Path:
    """A package that leaves `directory/ran` where it is built."""
    source = directory / "source"
    source.mkdir()
    (source / "setup.py").write_text(RAN.format(mark=str(directory / "ran")))
    archive = directory / "polar_source-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, "polar_source-1.0")
    return archive


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds what is in `tmp_path`, and nothing else."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture(autouse=True)
def _venv_module():
    probe = [INTERPRETER, "-c", "import venv, ensurepip"]
    present = Path(INTERPRETER).exists() and subprocess.run(probe, check=False).returncode == 0
    need(present, "the system's python3-venv", "apt-get install python3-venv")


def test_its_programs_run_where_a_sandbox_has_it(tmp_path):
    """Guards against mounting it where it was built, which may lie in a directory that is closed to the agent."""
    make_wheel(tmp_path)
    venv = ensure_venv(SAMPLE, tmp_path / "cache")
    assert not (tmp_path / "ran").exists(), "a package's .pth file ran on this machine"
    pip = (venv / "bin" / "pip").read_text()
    assert pip.startswith(f"#!{inside(venv)}/bin/python")
    for script in (venv / "bin").iterdir():
        assert script.is_symlink() or script.is_dir() or str(venv) not in script.read_text(errors="replace"), script
    assert variables(venv, "/usr/bin") == {"VIRTUAL_ENV": inside(venv), "PATH": f"{inside(venv)}/bin:/usr/bin"}


def test_built_once_also_by_two_at_a_time_and_rebuilt_when_unfinished(tmp_path):
    make_wheel(tmp_path)
    requirements = SAMPLE
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

    for cut_off in ("", None):  # as if the machine had crashed, or the build had been killed
        (first / "polar-gym.json").unlink() if cut_off is None else (first / "polar-gym.json").write_text(cut_off)
        (first / "stays").touch()
        assert ensure_venv(requirements, tmp_path / "cache") == first
        assert not (first / "stays").exists()


def test_the_agent_may_read_it_whatever_the_umask(tmp_path, monkeypatch):
    """Guards against packages that root's agents could not import, for no other user could read them."""
    make_wheel(tmp_path)
    before = os.umask(0o077)
    try:
        venv = ensure_venv(SAMPLE, tmp_path / "cache")
    finally:
        os.umask(before)
    assert closed(venv) == []
    made = {path: path.lstat().st_mode for path in venv.rglob("*")}
    subprocess.run(["chmod", "-R", "go-rwx", venv], check=True)  # as an earlier version has left it
    ensure_venv(SAMPLE, tmp_path / "cache")
    assert closed(venv) == []
    assert {path: path.lstat().st_mode for path in venv.rglob("*")} == made, "not built again"


def test_failure_holds_the_command_and_what_pip_said(tmp_path):
    with pytest.raises(VenvError, match=r"(?s)pip.* install .*nothing==1\.0.*failed with exit code 1:.*nothing==1\.0"):
        ensure_venv(["nothing==1.0"], tmp_path / "cache")


def test_a_package_without_a_wheel_is_not_built(tmp_path):
    """Guards against a `setup.py` of somebody else's that runs on the gateway's machine."""
    make_source(tmp_path)
    with pytest.raises(VenvError, match="polar-source"):
        ensure_venv(["polar-source==1.0"], tmp_path / "cache")
    assert not (tmp_path / "ran").exists()


def test_a_package_that_a_wheel_names_by_its_url_is_not_built(tmp_path):
    """Guards against a `setup.py` that comes in by the metadata of a wheel, where pip takes sources in any case."""
    make_wheel(tmp_path, f"Requires-Dist: polar-source @ file://{make_source(tmp_path)}\n")
    with pytest.raises(VenvError, match=rf"No such file or directory: .{ENVIRONMENTS}"):
        ensure_venv(SAMPLE, tmp_path / "cache")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "requirement",
    [
        *("{source}", "file://{archive}", "polar-source @ file://{archive}", "polar_source-1.0.tar.gz"),
        *("-e {source}", "--index-url=http://localhost/", "-r{archive}", "git+file://{source}", ".", ""),
    ],
)
def test_nothing_but_a_package_of_an_index_is_a_requirement(tmp_path, monkeypatch, requirement):
    """Guards against rows and requests that have pip open, fetch or build what they name."""
    archive = make_source(tmp_path)
    monkeypatch.chdir(tmp_path)
    named = requirement.format(source=tmp_path / "source", archive=archive)
    with pytest.raises(VenvError, match=rf"^python_requirements: {re.escape(repr(named))}: "):
        ensure_venv([named], tmp_path / "cache")
    with pytest.raises(ValueError, match=r"python_requirements\.0: .*name"):
        load("jsonl", path=write(tmp_path, {**ROW, "python_requirements": [named]}))
    assert not (tmp_path / "ran").exists()


def test_versions_extras_and_markers_are_a_requirement():
    for text in ("attrs", "attrs[tests]>=23,<26", "tomli~=2.0; python_version < '3.11'", "a.b-c_d==1.0.post1"):
        assert check_requirement(text) == text
