"""The set-up scripts, on machines that lack something: PATHs made for the purpose, in a copy of `.ci`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / ".ci"
TOOLS = ("bash", "cat", "compgen", "dirname", "env", "grep", "sed")
"""What the scripts themselves are made of."""


class Machine:
    """A checkout with nothing but `.ci`, and a PATH with nothing but the scripts' own tools."""

    def __init__(self, directory: Path) -> None:
        self.checkout = directory / "checkout"
        self.programs = directory / "bin"
        self.programs.mkdir()
        shutil.copytree(SCRIPTS, self.checkout / ".ci")
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.programs / tool).symlink_to(found)

    def add(self, program: str, script: str) -> Path:
        path = self.programs / program
        path.write_text(f"#!/usr/bin/env bash\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    def add_python(self, program: str, version: str, *, venv: bool = True) -> Path:
        """A stand-in that answers the three questions that `find-python` asks of an interpreter."""
        major_minor = version.rpartition(".")[0]
        suits = f'[[ "${{3:-}}" == {major_minor} || ( -z "${{3:-}}" && {major_minor} > 3.10 ) ]]'
        path = self.programs / program
        return self.add(
            program,
            f'case "$2" in *ensurepip*) exit {int(not venv)} ;; *print*) echo {path} ;; *) {suits} ;; esac',
        )

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.checkout / ".ci" / script, *arguments],
            env={"PATH": str(self.programs), "HOME": str(self.checkout), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_all_that_a_demo_lacks_is_said_at_once_with_the_commands(machine: Machine) -> None:
    done = machine.run("needs", "demo")
    assert done.returncode == 1
    for what in ("Python >= 3.11", "git", "node >= 20", "bubblewrap"):
        assert what in done.stderr
    assert "apt-get install -qq --no-install-recommends python3 python3-venv git nodejs npm bubblewrap" in done.stderr
    assert "npm install --global node@22" in done.stderr


def test_a_machine_that_has_everything_is_told_nothing(machine: Machine) -> None:
    machine.add_python("python3.13", "3.13.1")
    machine.add("node", "echo v20.1.0")
    for program in ("git", "npm", "bwrap"):
        machine.add(program, "exit 0")
    done = machine.run("needs", "demo")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_node_that_is_too_old_is_not_reinstalled_from_debian(machine: Machine) -> None:
    """Debian 12's nodejs is 18: installing that package again would change nothing."""
    machine.add_python("python3", "3.11.2")
    machine.add("node", "echo v18.19.0")
    for program in ("git", "npm", "bwrap"):
        machine.add(program, "exit 0")
    done = machine.run("needs", "demo")
    assert done.returncode == 1
    assert "v18.19.0" in done.stderr
    assert "npm install --global node@22" in done.stderr
    assert "apt-get" not in done.stderr


def test_a_bubblewrap_that_cannot_make_a_sandbox_is_quoted(machine: Machine) -> None:
    """Once the script ended here with status 1 and not a word."""
    machine.add("bwrap", "echo 'bwrap: no namespaces today' >&2; exit 1")
    done = machine.run("needs", "demo")
    assert done.returncode == 1
    assert "bwrap: no namespaces today" in done.stderr


def test_missing_parts_of_tests_are_named_and_only_in_ci_an_error(machine: Machine) -> None:
    machine.add_python("python3.12", "3.12.1")
    locally, in_ci = machine.run("needs", "test"), machine.run("needs", "test", CI="true")
    assert (locally.returncode, in_ci.returncode) == (0, 1)
    for done in (locally, in_ci):
        assert "docker.io" in done.stderr
        for python in ("Python 3.11", "Python 3.13"):
            assert python in done.stderr, "each of vLLM and the two versions of NeMo Gym wants its own"
        assert "Python 3.12" not in done.stderr, "it is there"
        assert "uv python install" not in done.stderr


def test_a_python_that_tests_want_is_got_by_uv_where_it_is(machine: Machine) -> None:
    """`python find` finds nothing here: the stand-in has installed nothing."""
    machine.add("uv", "exit 2")
    release = Path("/etc/os-release").read_text(encoding="utf-8")
    packaged = {"3.11": "bookworm", "3.12": "noble", "3.13": "trixie"}
    said = machine.run("needs", "test").stderr
    for version, codename in packaged.items():
        if f"VERSION_CODENAME={codename}" in release:
            assert f"python{version}-venv" in said
        else:
            assert f"uv python install {version}\n" in said


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root installs packages")


@needs_root
def test_root_gets_what_a_demo_lacks_and_is_told_first(machine: Machine) -> None:
    """Guards against a root user on a bare machine who is told six commands and given none of them."""
    machine.add_python("python3", "3.13.1")
    machine.add("git", "exit 0")
    machine.add("chmod", f'exec {shutil.which("chmod")} "$@"')
    node, bwrap = machine.programs / "node", machine.programs / "bwrap"
    old, new = (f"echo '#!/bin/sh\necho {version}' > {node}" for version in ("v18.19.0", "v22.1.0"))
    packages = f"{old}; echo '#!/bin/sh' > {bwrap}; chmod +x {node} {bwrap}"
    machine.add("apt-get", f"[[ $1 == update ]] || {{ {packages}; }}")
    machine.add("npm", new)
    done = machine.run("needs", "demo")
    assert done.returncode == 0, done.stderr
    assert "installs now" in done.stderr.partition("needs: ")[0]
    assert [line for line in done.stderr.splitlines() if line.startswith("needs: ")] == [
        "needs: apt-get update -qq",
        "needs: apt-get install -qq --no-install-recommends nodejs npm bubblewrap",
        "needs: npm install --global node@22",
    ]


@needs_root
def test_what_an_installation_did_not_bring_is_still_missing(machine: Machine) -> None:
    machine.add("apt-get", "exit 0")
    machine.add("npm", "exit 0")
    done = machine.run("needs", "demo")
    assert done.returncode == 1
    assert "the machine lacks" in done.stderr.rpartition("needs: ")[2]


@needs_root
def test_a_fault_that_no_package_mends_is_not_said_to_be_installed(machine: Machine) -> None:
    machine.add_python("python3.13", "3.13.1")
    machine.add("node", "echo v22.1.0")
    machine.add("bwrap", "echo 'bwrap: no namespaces today' >&2; exit 1")
    for program in ("git", "npm", "apt-get"):
        machine.add(program, "exit 0")
    done = machine.run("needs", "demo")
    assert done.returncode == 1
    assert "no namespaces today" in done.stderr
    assert "installs now" not in done.stderr


def test_tests_that_look_for_processes_have_procps_named(machine: Machine) -> None:
    """Debian's minimal system has neither `ps` nor `pgrep`."""
    assert "procps" in machine.run("needs", "test").stderr


def test_a_shim_that_fails_when_called_is_passed_over(machine: Machine) -> None:
    machine.add("python3.13", "echo 'shim: python3.13: command not found' >&2; exit 127")
    working = machine.add_python("python3.12", "3.12.1")
    machine.add_python("python3.11", "3.11.2")
    assert machine.run("find-python").stdout.strip() == str(working)


def test_an_asked_for_version_is_the_only_one_that_will_do(machine: Machine) -> None:
    machine.add_python("python3.13", "3.13.1")
    assert machine.run("find-python", "3.11").returncode == 1
    wanted = machine.add_python("python3.11", "3.11.2")
    assert machine.run("find-python", "3.11").stdout.strip() == str(wanted)


def test_the_interpreter_that_the_user_chose_is_the_only_candidate(machine: Machine) -> None:
    machine.add_python("python3.13", "3.13.1")
    chosen = machine.add_python("mine", "3.12.1")
    assert machine.run("find-python", PYTHON="mine").stdout.strip() == str(chosen)
    assert machine.run("find-python", PYTHON="nothing-like-it").returncode == 1


def test_a_debian_python_without_venv_gets_the_package_named(machine: Machine) -> None:
    machine.add_python("python3", "3.11.2", venv=False)
    assert machine.run("find-python").returncode == 2
    done = machine.run("needs", "demo")
    assert "cannot make virtual environments" in done.stderr
    assert "python3-venv" in done.stderr


def daemon(report: Path) -> str:
    """Starts a process in a session of its own that writes its id to `report`, a new fifo, when it can be ended.

    It takes SIGINT, which a shell lets its background processes ignore: the tests would wait for SIGTERM.
    """
    os.mkfifo(report)
    return f"setsid env --default-signal=INT bash -c 'echo $$ > {report}; exec sleep 600' &"


def alive(pid: str) -> bool:
    """Not ended; a zombie that nobody has waited for has."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("status", [0, 7])
def test_a_command_that_leaves_a_daemon_keeps_its_status_and_loses_the_daemon(tmp_path: Path, status: int) -> None:
    command = f"{daemon(tmp_path / 'pid')} cat {tmp_path / 'pid'}; exit {status}"
    done = subprocess.run(
        [SCRIPTS / "leave-nothing", "bash", "-c", command], stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode == status
    assert not alive(done.stdout.strip())


def test_a_stopped_command_takes_its_daemon_along(tmp_path: Path) -> None:
    command = f"{daemon(tmp_path / 'pid')} wait"
    run = subprocess.Popen([SCRIPTS / "leave-nothing", "bash", "-c", command])
    pid = (tmp_path / "pid").read_text().strip()
    assert alive(pid)
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=60) == 128 + signal.SIGTERM
    assert not alive(pid)
