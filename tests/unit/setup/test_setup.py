"""The set-up scripts, on machines that lack something: PATHs made for the purpose, in a copy of `.ci`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / ".ci"
TOOLS = ("bash", "cat", "compgen", "dirname", "env", "grep", "mktemp", "rm", "sed", "sleep", "tail")
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
    for what in ("Python >= 3.11", "git", "bubblewrap"):
        assert what in done.stderr
    assert "apt-get install -qq --no-install-recommends python3 python3-venv git bubblewrap" in done.stderr


def test_a_machine_that_has_everything_is_told_nothing(machine: Machine) -> None:
    machine.add_python("python3.13", "3.13.1")
    machine.add("node", "echo v20.1.0")
    for program in ("git", "npm", "bwrap"):
        machine.add(program, "exit 0")
    done = machine.run("needs", "demo")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_bubblewrap_that_cannot_make_a_sandbox_is_quoted(machine: Machine) -> None:
    """Once the script ended here with status 1 and not a word."""
    machine.add("bwrap", "echo 'bwrap: no namespaces today' >&2; exit 1")
    done = machine.run("needs", "test")
    assert done.returncode == 1
    assert "bwrap: no namespaces today" in done.stderr


def test_missing_parts_of_tests_are_an_error_in_ci(machine: Machine) -> None:
    machine.add_python("python3.12", "3.12.1")
    done = machine.run("needs", "test", CI="true")
    assert done.returncode == 1
    for part in ("docker.io", "Python 3.11", "Python 3.13"):
        assert part in done.stderr
    assert "Python 3.12" not in done.stderr, "it is there"


needs_user = pytest.mark.skipif(os.geteuid() == 0, reason="root has no need of user namespaces; run this as a user")


@needs_user
def test_a_user_whom_apparmor_stops_is_told_of_a_profile_and_of_no_setting_of_the_machine(machine: Machine) -> None:
    """The setting is faked: a file in a directory that takes the place of /proc/sys."""
    setting = machine.checkout / "sys" / "kernel" / "apparmor_restrict_unprivileged_userns"
    setting.parent.mkdir(parents=True)
    setting.write_text("1\n", encoding="utf-8")
    machine.add("bwrap", "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1")
    done = machine.run("needs", "demo", POLAR_GYM_PROC_SYS=str(machine.checkout / "sys"))
    assert done.returncode == 1
    assert "profile bwrap /usr/bin/bwrap" in done.stderr
    assert "sysctl" not in done.stderr


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root installs packages")


@needs_root
def test_root_gets_what_a_demo_lacks_and_is_told_first(machine: Machine) -> None:
    """Guards against a root user on a bare machine who is told six commands and given none of them."""
    machine.add_python("python3", "3.13.1")
    machine.add("git", "exit 0")
    machine.add("chmod", f'exec {shutil.which("chmod")} "$@"')
    bwrap = machine.programs / "bwrap"
    machine.add("apt-get", f"[[ $1 == update ]] || {{ echo '#!/bin/sh' > {bwrap}; chmod +x {bwrap}; }}")
    done = machine.run("needs", "demo")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "apt-get" in line or "packages" in line]
    assert said[0] == "installing the system's packages: bubblewrap"
    assert said[1] == "apt-get update ..."


@needs_root
def test_what_an_installation_did_not_bring_is_still_missing(machine: Machine) -> None:
    machine.add("apt-get", "exit 0")
    machine.add("npm", "exit 0")
    done = machine.run("needs", "demo")
    assert done.returncode == 1
    assert "the machine lacks" in done.stderr


@needs_root
def test_root_without_namespaces_is_told_that_the_demo_has_no_sandbox(machine: Machine) -> None:
    """No package mends that, so none is installed; status 3 is for `./demo` alone."""
    machine.add_python("python3.13", "3.13.1")
    machine.add("node", "echo v22.1.0")
    machine.add("bwrap", "echo 'bwrap: no namespaces today' >&2; exit 1")
    for program in ("git", "npm", "apt-get"):
        machine.add(program, "exit 0")
    done = machine.run("needs", "demo")
    assert done.returncode == 3
    assert "no namespaces today" in done.stderr
    assert "WITHOUT A SANDBOX (runtime=unconfined)" in done.stderr
    assert "installing" not in done.stderr
    assert machine.run("needs", "test").returncode == 1


def test_the_clock_of_a_step_ends_with_the_step(machine: Machine) -> None:
    """Guards against a sleep that is left, which held the output of `./demo | tee` open for ten seconds a step."""
    slow = shutil.which("sleep")
    (machine.programs / "sleep").unlink()
    machine.add("sleep", f"exec {slow} 600")
    assert machine.run("progress", "step", "rm", "-f", "nothing").stderr.startswith("step ...\nstep: done in ")


def test_tests_that_look_for_processes_have_procps_named(machine: Machine) -> None:
    """Debian's minimal system has neither `ps` nor `pgrep`."""
    assert "procps" in machine.run("needs", "test", CI="true").stderr


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
