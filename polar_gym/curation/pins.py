"""Pins what the tests of a package need: each package at one version that has a wheel, so that no foreign build code
runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from polar_gym.curation import CurationError
from polar_gym.errors import ConfigError
from polar_gym.workspaces.requirements import check_requirement
from polar_gym.workspaces.venv import INTERPRETER, VenvError, ensure_venv

PYTEST = "pytest<9"
"""Version 9 rejects code that is still in many packages' conftest.py."""
PIP = "pip>=26"
"""The first pip that leaves out what was uploaded after a date."""

_NOT_FETCHED = re.compile(r"Could not fetch URL (\S+): (?!403 |404 |410 )(.*) - skipping")
"""How pip's log tells of an index that does not answer. Indexes answer 403, 404 or 410 for a package that they lack."""

SHOWN = 3
"""How many requirements an error names."""


class MachineError(ConfigError):
    """This machine or its package index is at fault, and not the requirements."""


class NoWheelError(CurationError):
    """No wheel fits one of the requirements."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name
        """The package that has none, which may be a dependency of a requirement."""


def resolve_available(
    wanted: Sequence[str], cache: Path, *, before: datetime | None = None
) -> tuple[list[str], list[str]]:
    """Return what `resolve` returns, and the requirements that it had to leave out because no wheel fits.

    Raises as `resolve` does, also where a dependency has no wheel that fits.
    """
    left = list(wanted)
    while True:
        try:
            return resolve(left, cache, before=before), [each for each in wanted if each not in left]
        except NoWheelError as error:
            rest = [each for each in left if canonicalize_name(Requirement(each).name) != error.name]
            if len(rest) == len(left):
                raise
            left = rest


def resolve(
    wanted: Sequence[str], cache: Path, *, constraints: Sequence[str] = (), before: datetime | None = None
) -> list[str]:
    """Return pytest, `wanted` and their dependencies, pinned. `before`: leave out versions that were uploaded later.

    Raises `CurationError` where no wheels fit; with `before`, also where the index does not tell dates. Raises
    `MachineError` where the index does not answer, or pip does not run.
    """
    for requirement in wanted:
        try:
            check_requirement(requirement)
        except ValueError as error:
            raise CurationError(f"the tests need {requirement!r}: {error}") from error
    try:
        python = ensure_venv([PIP], cache) / "bin" / "python"
    except VenvError as error:
        raise MachineError(str(error)) from error
    options = ["--dry-run", "--ignore-installed", "--only-binary", ":all:", "--quiet", "--no-input"]
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="polar-gym-pins-") as scratch:
        if before is not None:
            options += ["--uploaded-prior-to", before.isoformat()]
            environment |= _dated_sources(python, scratch)
        limits, report, log = Path(scratch, "constraints.txt"), Path(scratch, "report.json"), Path(scratch, "pip.log")
        limits.write_text("".join(f"{constraint}\n" for constraint in constraints))
        options += ["--constraint", str(limits), "--report", str(report), "--log", str(log)]
        asked = [*wanted] if any(_names_versions_of_pytest(each) for each in wanted) else [PYTEST, *wanted]
        command = [str(python), "-I", "-m", "pip", "install", *options, "--", *asked]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        except subprocess.TimeoutExpired as error:
            raise MachineError(f"pip found no versions of {', '.join(asked)} within {error.timeout:.0f} s") from error
        if done.returncode:
            if away := _NOT_FETCHED.search(log.read_text() if log.exists() else ""):
                raise MachineError(f"the package index does not answer: {away[1]}: {away[2]}")
            told = "".join(f" with {constraint}" for constraint in constraints)
            told += f" from before {before.date()}" if before else ""
            errors = re.findall(r"^ERROR: (.*)", done.stderr, re.MULTILINE)
            more = f" and {len(asked) - SHOWN} more" if len(asked) > SHOWN else ""
            why = "; ".join(errors)[:1000] or done.stderr.strip()[-1000:]
            message = f"no wheels for {', '.join(asked[:SHOWN])}{more}{told}: {why}"
            missing = re.search(r"^ERROR: No matching distribution found for ([\w.-]+)", done.stderr, re.MULTILINE)
            raise NoWheelError(message, canonicalize_name(missing[1])) if missing else CurationError(message)
        packages = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return sorted(f"{package['name']}=={package['version']}" for package in packages)


def _names_versions_of_pytest(text: str) -> bool:
    requirement = Requirement(text)
    return requirement.name == "pytest" and bool(requirement.specifier)


def _dated_sources(python: Path, empty: str) -> dict[str, str]:
    """Return variables that take pip's sources on this machine's disk away: pip takes their files at any date.
    `empty`: a directory without packages."""
    command = [str(python), "-I", "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    settings = dict(re.findall(r"^\S+\.([\w-]+)='(.*)'$", listing, re.MULTILINE))  # those of variables come last
    more = [url for url in settings.get("extra-index-url", "").replace("\\n", " ").split() if url.startswith("http")]
    return {"PIP_FIND_LINKS": empty, "PIP_EXTRA_INDEX_URL": " ".join(more) or empty}  # "" would set nothing


def python_version() -> str:
    """Return the version of the Python that tests run with, e.g. `3.11.2`."""
    command = [INTERPRETER, "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
