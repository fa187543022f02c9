"""Install a harness's npm package, unmodified, into a cache on the gateway's machine, and name the mounts for it.

All processes of the machine share the cache: `durable.make_once` makes each installation once and whole. Package
scripts are not run. All functions here block: call them in a thread.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from functools import partial
from pathlib import Path

from polar_gym.durable import make_once
from polar_gym.harnesses import Harness
from polar_gym.runtimes import TOOLCHAIN, Mount

NODE_MAJOR = 20
"""The oldest node that every harness runs on."""

NPM_TIMEOUT_SECONDS = 900


class InstallError(Exception):
    """A harness cannot be installed on this machine. The message names the remedy."""


def place(harness: Harness, cache: Path) -> Path:
    """Return the place of the installation at the pinned version. An installation that exists is whole."""
    return cache / "harnesses" / f"{_slug(harness)}-{harness.version}"


def install(harness: Harness, cache: Path) -> Path:
    """Install the harness at its pinned version if it is missing, and return its `node_modules` directory.

    Raises `InstallError`.
    """
    target = place(harness, cache)
    if not target.exists():
        npm = _npm()
        target.parent.mkdir(parents=True, exist_ok=True)
        make_once(target, partial(_install_into, harness=harness, npm=npm))
    return target / "node_modules"


def toolchain_mounts(harness: Harness, cache: Path) -> tuple[list[Mount], list[str]]:
    """Return the read-only mounts that a sandbox needs to run the harness, and the first arguments of its argv.

    Both are empty for a harness without an npm package. Raises `InstallError`.
    """
    if harness.npm_package is None:
        return [], []
    inside, node = f"{TOOLCHAIN}/{_slug(harness)}/node_modules", f"{TOOLCHAIN}/bin/node"
    mounts = [Mount(install(harness, cache), inside)]
    if not harness.native_programs:
        mounts.append(Mount(_node(), node))
    if rg := shutil.which("rg"):
        mounts.append(Mount(Path(rg).resolve(), f"{TOOLCHAIN}/bin/rg"))
    return mounts, executable(harness, inside, node)


def executable(harness: Harness, node_modules: str, node: str) -> list[str]:
    """Return the first arguments of argv for the harness installed in `node_modules`. Raises `InstallError`."""
    program = f"{node_modules}/{_program(harness)}"
    return [program] if harness.native_programs else [node, program]


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
    assert harness.npm_package is not None
    return harness.npm_package.removeprefix("@").replace("/", "-")


def _program(harness: Harness) -> str:
    """Return the program's path below `node_modules`. Raises `InstallError`."""
    if not harness.native_programs:
        return f"{harness.npm_package}/{harness.script}"
    machine = platform.machine()
    if machine not in harness.native_programs:
        built_for = ", ".join(sorted(harness.native_programs))
        raise InstallError(f"{harness.npm_package} is a native program, and none is built for {machine}: {built_for}")
    return harness.native_programs[machine]


def _node() -> Path:
    """Return the path of the real node binary. Raises `InstallError`."""
    advice = (
        f"install Node.js {NODE_MAJOR} or newer: from https://nodejs.org/en/download (Debian 12's own is too old), "
        "or with apt-get install nodejs npm where the distribution's is new enough"
    )
    found = shutil.which("node")
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
    npm = shutil.which("npm")
    if npm is None:
        raise InstallError("npm is not on PATH; install it: apt-get install npm")
    return npm


def _install_into(scratch: Path, harness: Harness, npm: str) -> Path:
    """Return the directory in `scratch` that becomes the installation. Raises `InstallError`."""
    wanted = f"{harness.npm_package}@{harness.version}"
    command = [npm, "install", "--prefix", str(scratch), "--no-audit", "--no-fund", "--ignore-scripts", wanted]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=NPM_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise InstallError(
            f"npm install {wanted} took over {NPM_TIMEOUT_SECONDS} s; is its registry reachable?"
        ) from error
    if done.returncode != 0:
        raise InstallError(f"npm install {wanted} failed (exit code {done.returncode}):\n{done.stderr.strip()}")
    program = _program(harness)
    if not (scratch / "node_modules" / program).is_file():
        raise InstallError(f"{wanted} has no {program}: the harness's description does not fit its version")
    # npm's own files stay behind; a sandbox's user must be able to read the rest.
    ready = scratch / "ready"
    ready.mkdir(mode=0o755)
    (scratch / "node_modules").rename(ready / "node_modules")
    return ready
