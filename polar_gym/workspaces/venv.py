"""Virtual environments for tasks that need packages.

An environment has another path inside a sandbox (`inside`), because the path where it was built may lie in a directory
that the sandbox's user cannot enter. The environment's programs name the path inside. The environment must be built
with the interpreter that the sandbox has: `/usr/bin/python3`. It is built once for each set of requirements and
interpreter. A lock file keeps other processes from using a half-built environment. A marker file, written last, tells a
finished environment from the rest of a build that was killed.

Rows and requests name the packages, so none of their code may run on the gateway's machine. Only wheels are installed,
which is unpacking. No program of a finished environment is started here, not even its `python`: it would run the `.pth`
files of the packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from polar_gym import durable
from polar_gym.durable import locked, open_to_all
from polar_gym.workspaces.requirements import check_requirement

INTERPRETER = "/usr/bin/python3"
ENVIRONMENTS = "/opt/polar-gym-environments"
_TIMEOUT_SECONDS = 1800
_PIP = "import runpy, sys; sys.executable = sys.argv.pop(1); runpy.run_module('pip', run_name='__main__')"
"""Starts pip, and tells it the Python's path inside a sandbox, where this machine has no Python. Programs then get that
path. A package that pip would have to build, because a wheel names its URL, cannot be built."""


class VenvError(Exception):
    """A virtual environment could not be built. The message holds the command and its output."""


def inside(venv: Path) -> str:
    """Return the environment's path inside a sandbox."""
    return f"{ENVIRONMENTS}/{venv.name}"


def variables(venv: Path, path: str) -> dict[str, str]:
    """Return the variables that choose the environment inside a sandbox whose `PATH` is `path`."""
    return {"VIRTUAL_ENV": inside(venv), "PATH": f"{inside(venv)}/bin:{path}"}


def ensure_venv(requirements: Sequence[str], cache: Path) -> Path:
    """Return the virtual environment with `requirements`, and build it below `cache` if it is missing.

    The path is absolute and final, and the agent may read what is there. Blocks while this or another process builds.
    Raises `VenvError`.
    """
    for requirement in requirements:
        try:
            check_requirement(requirement)
        except ValueError as error:
            raise VenvError(f"python_requirements: {requirement!r}: {error}") from error
    key = json.dumps([ENVIRONMENTS, INTERPRETER, _run([INTERPRETER, "-VV"]).strip(), list(requirements)])
    cache = cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    venv = cache / hashlib.sha256(key.encode()).hexdigest()[:16]
    finished = venv / "polar-gym.json"
    with locked(Path(f"{venv}.lock")):
        if not (finished.exists() and finished.read_text() == key):
            if venv.exists():
                shutil.rmtree(venv)
            _build(venv, requirements)
            durable.sync_file_system(venv)
            durable.write(finished, key.encode())
        open_to_all(venv)
    return venv


def _build(venv: Path, requirements: Sequence[str]) -> None:
    try:
        _run([INTERPRETER, "-I", "-m", "venv", str(venv)])
    except VenvError as error:
        if "ensurepip" not in str(error):
            raise
        raise VenvError(f"python3-venv is missing; install it with: apt-get install python3-venv\n{error}") from error
    pip = [str(venv / "bin" / "python"), "-I", "-c", _PIP, f"{inside(venv)}/bin/python", "install"]
    options = ["--only-binary", ":all:", "--quiet", "--no-input", "--disable-pip-version-check"]
    # In an empty directory, no requirement can be the name of a file.
    with tempfile.TemporaryDirectory(prefix="polar-gym-pip-") as empty:
        _run([*pip, *options, "--", *requirements], Path(empty))
    for script in (venv / "bin").iterdir():
        text = script.read_bytes() if script.is_file() and not script.is_symlink() else b""
        if text.startswith(b"#!") or script.name.lower().startswith("activate"):
            script.write_bytes(text.replace(os.fsencode(venv), inside(venv).encode()))


def _run(command: list[str], directory: Path = Path("/")) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except FileNotFoundError as error:
        raise VenvError(f"{command[0]} is missing; install it with: apt-get install python3 python3-venv") from error
    except subprocess.TimeoutExpired as error:
        raise VenvError(f"{' '.join(command)} took over {_TIMEOUT_SECONDS} s") from error
    if done.returncode:
        raise VenvError(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stdout.strip()[-4000:]}")
    return done.stdout
