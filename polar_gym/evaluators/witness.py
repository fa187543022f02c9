"""The gateway's side of the witness: a second report of a test run, which printing cannot forge.

The log of a test run is the output of its processes, and some parsers let the last line win. Therefore, for Python
tests, `in_sandbox/` goes into the grading sandbox before the harness's diff. The first process that runs tests then
keeps a sealed record of each result. A test counts as passed only if log and record both say so.

The record is made in the process in which the tested code runs. Code that alters the test process from inside can still
forge the record. Such code is caught only if it also makes the canaries pass, or leaves traces in the test machinery.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polar_gym.evaluators.parsers import ERROR, FAILED, PASSED, SKIPPED
from polar_gym.runtimes import HOME, Sandbox
from polar_gym.runtimes.files import UnreadableFileError, read_file, write_files

IN_SANDBOX = Path(__file__).parent / "in_sandbox"
_UNITTEST = {
    "ok": PASSED,
    "expected failure": PASSED,
    "skipped": SKIPPED,
    "ERROR": ERROR,
    "FAIL": FAILED,
    "unexpected success": FAILED,
}
_PYTEST = {"passed": PASSED, "failed": FAILED, "skipped": SKIPPED}


@dataclass(slots=True)
class Testimony:
    """The witness's record of a test run."""

    began: bool = False
    """A Python process that runs tests started the record."""
    ended: bool = False
    """The test run reached its end."""
    broken: bool = False
    """The record was altered after the witness wrote it."""
    altered: list[str] = field(default_factory=list)
    """Functions of the test machinery that were replaced while the tests ran."""
    tests: dict[str, str] = field(default_factory=dict)
    """Test id -> PASSED | FAILED | ERROR | SKIPPED; a failure at any time wins."""
    log: str = ""
    """The same results in the runner's words, for parsers that read logs."""

    @property
    def silent(self) -> bool:
        """Return whether the witness began and heard of no test and no end.

        Either the witness does not know the runner, or the tested code ended the run before its first test.
        """
        return self.began and not (self.ended or self.broken or self.tests)

    @property
    def problem(self) -> str:
        """Return why no result of this run can be believed; "" where the results can be believed."""
        if self.broken:
            return "the record of the test run was altered"
        if self.altered:
            return f"the test machinery was altered by the tested code: {', '.join(self.altered[:5])}"
        if self.began and not self.ended:
            return "the test run did not come to its own end"
        return ""


class Witness:
    """The witness of one grading: write its files, run the tests with its directory on PYTHONPATH, then call `hear`."""

    def __init__(self) -> None:
        self.directory = f"{HOME}/.polar-gym-{secrets.token_hex(8)}"
        """The witness's directory inside the sandbox. The tests need it on PYTHONPATH."""
        self.key = secrets.token_bytes(32)
        self.key_file = f"{self.directory}/key"

    @property
    def programs(self) -> dict[str, bytes]:
        """Return path in the sandbox -> content, of all files but the key's."""
        return {f"{self.directory}/{path.name}": path.read_bytes() for path in IN_SANDBOX.glob("*.py")}

    async def place(self, sandbox: Sandbox) -> None:
        """Write programs and key into a sandbox in which no code of the harness has run. Raises `SandboxError`."""
        await write_files(sandbox, {**self.programs, self.key_file: self.key})

    async def hear(self, sandbox: Sandbox, changed: Collection[str]) -> Testimony:
        """Return the testimony. Call this after the tests, when none of their processes is left. Raises `SandboxError`.

        `changed`: the files of the workspace that the harness changed.
        """
        try:
            record = await read_file(sandbox, f"{self.directory}/record")
        except FileNotFoundError:  # if the key is gone too, a record was begun and removed
            return Testimony(began=not await self._has_key(sandbox))
        except UnreadableFileError:  # the record exists, but is not a regular file any more
            return Testimony(began=True, broken=True)
        return await asyncio.to_thread(heard, record, self.key, changed)

    async def _has_key(self, sandbox: Sandbox) -> bool:
        """Return whether the key lies where it was placed: then no process has begun a record."""
        try:
            return await read_file(sandbox, self.key_file) == self.key
        except (FileNotFoundError, UnreadableFileError):
            return False


def under_witness(directory: str) -> str:
    """Return the line of a script after which Python processes run under the witness in this directory."""
    return f'export PYTHONPATH="{directory}${{PYTHONPATH:+:$PYTHONPATH}}"'


def heard(record: bytes, key: bytes, changed: Collection[str] = ()) -> Testimony:
    """Return the testimony in a record that was begun with this key. Bytes that are not a record give a broken one."""
    testimony = Testimony(began=True)
    lines: list[str] = []
    try:
        for line in record.splitlines():
            seal, _, said = line.partition(b" ")
            if not hmac.compare_digest(seal, hmac.new(key, said, "sha256").hexdigest().encode()):
                raise ValueError("the line is not sealed")
            key = hashlib.sha256(key).digest()
            _hear_line(json.loads(said), testimony, lines, tuple(f"/{path}" for path in changed))
    except (KeyError, TypeError, ValueError):  # not sealed, or sealed, but not by the witness
        testimony.broken = True
        return testimony
    testimony.log = "\n".join(lines)
    return testimony


def _hear_line(entry: dict[str, Any], testimony: Testimony, lines: list[str], changed: tuple[str, ...]) -> None:
    if "end" in entry:
        testimony.ended = True
        testimony.altered += map(str, entry["altered"])
    elif "test" in entry:
        status, text = _status(entry, changed)
        if testimony.tests.get(entry["test"]) not in (FAILED, ERROR):
            testimony.tests[entry["test"]] = status
        lines.append(text)


def _status(entry: dict[str, Any], changed: tuple[str, ...]) -> tuple[str, str]:
    """Return a result as a status, and as the line that the runner prints.

    An XFAIL that came through files that the harness changed, or through code that is in no file, counts as a failure:
    only tests decide which failures they expect.
    """
    test, says = entry["test"], entry["says"]
    if "text" in entry:
        return _UNITTEST[says], f"{entry['text']} ... {says}"
    status = _PYTEST[says]
    if status == FAILED and entry["when"] != "call":
        status = ERROR
    if any(not file.startswith("/") or file.endswith(changed) for file in entry.get("through", ())):
        return FAILED, f"FAILED {test}"
    if entry["xfail"] and status in (PASSED, SKIPPED):
        return PASSED, f"{'XPASS' if status == PASSED else 'XFAIL'} {test}"
    return status, f"{status} {test}"
