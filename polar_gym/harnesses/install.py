"""Install a harness's npm or PyPI package, unmodified, into a cache on the gateway's machine, and name its mounts.

All processes of the machine share the cache: `durable.make_once` makes each installation once and whole. No script of a
package is run: npm's are ignored, and of PyPI only wheels are taken. The installation of a PyPI package brings a Python
of its own (`interpreter`). All functions here block: call them in a thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

from polar_gym.durable import make_once, open_to_all
from polar_gym.harnesses import Harness, interpreter
from polar_gym.runtimes import TOOLCHAIN, Mount

NODE_MAJOR = 20
"""The oldest node that every harness runs on."""

TIMEOUT_SECONDS = 900
"""How long npm or pip may take."""

_OTHER_PYTHON = re.compile(r"\S+ Requires-Python ([^\s;]+)")
"""How pip names a version of a package that is not for this Python, one after another in a line."""
_SHEBANG = re.compile(rb"#!(/bin/sh\n'''exec' .*\n' '''|.*python.*)\n")
"""The head of a script of a Python package: the path of the Python that installed it, in two forms."""
_RELOCATABLE = b"#!/bin/sh\n'''exec' \"${0%/*}/python3\" -I \"$0\" \"$@\"\n' '''\n"
"""Takes its place: text that sh runs and Python skips, and that finds the Python beside the script."""


class InstallError(Exception):
    """A harness cannot be installed on this machine. The message names the remedy."""


def place(harness: Harness, cache: Path) -> Path:
    """Return the place of the installation at the pinned versions. An installation that exists is whole."""
    pins = "\n".join(sorted(harness.pypi_pins))
    pinned = f"+{hashlib.sha256(pins.encode()).hexdigest()[:8]}" if pins else ""
    return cache / "harnesses" / f"{_slug(harness)}-{harness.version}{pinned}"


def install(harness: Harness, cache: Path) -> Path:
    """Install the harness at its pinned version if it is missing, and return the directory of its programs.

    Raises `InstallError`.
    """
    if not harness.version[:1].isdigit():
        raise InstallError(f"version={harness.version!r}: name one version of {harness.package}, such as '1.2.3'")
    target = place(harness, cache)
    if not target.exists():
        make = partial(_npm_install, npm=_npm()) if harness.npm_package else partial(_pip_install, pip=_pip())
        target.parent.mkdir(parents=True, exist_ok=True)
        make_once(target, partial(make, harness=harness))
    open_to_all(target)
    _check_program(target, harness)
    return target / _programs(harness)


def toolchain_mounts(harness: Harness, cache: Path) -> tuple[list[Mount], list[str]]:
    """Return the read-only mounts that a sandbox needs to run the harness, and the first arguments of its argv.

    Both are empty for a harness without a package. Raises `InstallError`.
    """
    if harness.package is None:
        return [], []
    inside, node = f"{TOOLCHAIN}/{_slug(harness)}", f"{TOOLCHAIN}/bin/node"
    install(harness, cache)
    mounts = [Mount(place(harness, cache), inside)]
    if _by_node(harness):
        mounts.append(Mount(_node(), node))
    rg = Path(shutil.which("rg") or "/nowhere").resolve()
    if rg.exists() and (os.geteuid() != 0 or rg.stat().st_mode & 0o005 == 0o005):  # root's agent has another uid
        mounts.append(Mount(rg, f"{TOOLCHAIN}/bin/rg"))
    return mounts, executable(harness, f"{inside}/{_programs(harness)}", node)


def executable(harness: Harness, programs: str, node: str) -> list[str]:
    """Return the first arguments of argv for the harness whose programs are in a directory. Raises `InstallError`."""
    program = f"{programs}/{_program(harness)}"
    return [node, program] if _by_node(harness) else [program]


def missing() -> list[str]:
    """Return the programs that this machine lacks for harnesses, each with the command that installs it."""
    lacking = []
    for check in (_node, _npm):
        try:
            check()
        except InstallError as error:
            lacking.append(str(error))
    return lacking


def _slug(harness: Harness) -> str:
    assert harness.package is not None
    return harness.package.removeprefix("@").replace("/", "-")


def _by_node(harness: Harness) -> bool:
    return harness.npm_package is not None and not harness.native_programs


def _programs(harness: Harness) -> str:
    """Return the directory of the programs in an installation."""
    return "node_modules" if harness.npm_package else "bin"


def _program(harness: Harness) -> str:
    """Return the program's path below the directory of the programs. Raises `InstallError`."""
    if not harness.native_programs:
        return f"{harness.npm_package}/{harness.script}" if harness.npm_package else harness.script
    machine = platform.machine()
    if machine not in harness.native_programs:
        built_for = ", ".join(sorted(harness.native_programs))
        raise InstallError(f"{harness.npm_package} is a native program, and none is built for {machine}: {built_for}")
    return harness.native_programs[machine]


def _program_here(name: str) -> str | None:
    """Return the path of a program of this Python's environment, else of PATH."""
    return shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)


def _node() -> Path:
    """Return the path of the real node binary. Raises `InstallError`."""
    advice = (
        f"install Node.js {NODE_MAJOR} or newer: from https://nodejs.org/en/download (Debian 12's own is too old), "
        "or with apt-get install nodejs npm where the distribution's is new enough"
    )
    found = _program_here("node")
    if found is None:
        raise InstallError(f"node is not on PATH; {advice}")
    # A version manager may have put a script in node's place: ask node itself for the path of its binary.
    asked = subprocess.run(
        [found, "-p", "process.versions.node + ' ' + process.execPath"], capture_output=True, text=True, timeout=60
    )
    version, _, path = asked.stdout.strip().partition(" ")
    if asked.returncode != 0 or not version.partition(".")[0].isdigit():
        raise InstallError(f"{found} does not run (exit code {asked.returncode}): {asked.stderr.strip()}; {advice}")
    if int(version.partition(".")[0]) < NODE_MAJOR:
        raise InstallError(f"{found} is version {version}, too old; {advice}")
    return Path(path).resolve()


def _npm() -> str:
    npm = _program_here("npm")
    if npm is None:
        raise InstallError("npm is not on PATH; install it: apt-get install npm")
    return npm


def _pip() -> list[str]:
    """Return the beginning of a command that installs packages for this Python. Raises `InstallError`."""
    # Not importlib.util.find_spec: after such a search for pip, setuptools cannot be imported any more.
    if PathFinder.find_spec("pip"):
        return [sys.executable, "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--quiet"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable, "--compile-bytecode", "--quiet"]
    raise InstallError(f"{sys.executable} has no pip; install it: {sys.executable} -m ensurepip, or put uv on PATH")


def _npm_install(scratch: Path, harness: Harness, npm: str) -> Path:
    """Return the directory in `scratch` that becomes the installation. Raises `InstallError`."""
    wanted = f"{harness.npm_package}@{harness.version}"
    _run([npm, "install", "--prefix", str(scratch), "--no-audit", "--no-fund", "--ignore-scripts"], wanted)
    # npm's own files stay behind.
    ready = scratch / "ready"
    ready.mkdir()
    (scratch / "node_modules").rename(ready / "node_modules")
    return ready


def _pip_install(scratch: Path, harness: Harness, pip: Sequence[str]) -> Path:
    """Return the same as `_npm_install`, for a PyPI package."""
    wanted = f"{harness.pypi_package}=={harness.version}"
    ready = scratch / "ready"
    ready.mkdir()
    try:
        packages = interpreter.copy_into(ready)
    except (OSError, subprocess.SubprocessError) as error:
        raise InstallError(f"{sys.executable} cannot be copied for sandboxes: {error}") from error
    _run([*pip, "--only-binary", ":all:", "--target", str(packages), *harness.pypi_pins], wanted)
    for script in (packages / "bin").iterdir() if (packages / "bin").exists() else ():
        if script.is_file():
            script.write_bytes(_SHEBANG.sub(_RELOCATABLE, script.read_bytes(), count=1))
            script.rename(ready / "bin" / script.name)
    return ready


def _run(command: Sequence[str], wanted: str) -> None:
    """Run an installer. Raises `InstallError`."""
    name = f"{'npm' if Path(command[0]).name == 'npm' else 'pip'} install {wanted}"
    try:
        done = subprocess.run(
            [*command, wanted], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"{name} took over {TIMEOUT_SECONDS} s; is its registry reachable?") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("WARNING:")]
        if others := sorted({*_OTHER_PYTHON.findall(done.stderr)}):
            lines = [line for line in lines if not _OTHER_PYTHON.search(line)]
            lines.append(f"polar-gym runs on Python {platform.python_version()}; other versions: {', '.join(others)}")
        said = "\n".join(lines)
        raise InstallError(f"{name} failed (exit code {done.returncode}):\n{said}")


def _check_program(target: Path, harness: Harness) -> None:
    """Raise `InstallError` where an installation lacks the harness's program."""
    if not (target / _programs(harness) / _program(harness)).is_file():
        wanted = f"{harness.package}{'@' if harness.npm_package else '=='}{harness.version}"
        named = "native_programs" if harness.native_programs else f"script={harness.script!r}"
        offered = ", ".join(_offered(target, harness)) or "none"
        raise InstallError(f"{wanted} has no {_program(harness)}: mend {named}; programs of the package: {offered}")


def _offered(target: Path, harness: Harness) -> list[str]:
    """Return the values for `script` that the package offers."""
    if not harness.npm_package:
        return sorted(path.name for path in (target / "bin").iterdir() if not path.name.startswith("python"))
    described = json.loads((target / "node_modules" / harness.npm_package / "package.json").read_text("utf-8"))
    programs = described.get("bin") or {}
    return [programs] if isinstance(programs, str) else sorted(set(programs.values()))
