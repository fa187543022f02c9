"""Tries many patches in one sandbox, one after the other: quicker than a grading, and less strict."""

from __future__ import annotations

import shlex
from contextlib import suppress

from polar_gym.evaluators.parsers import PARSERS, PASSED
from polar_gym.evaluators.patch import file_changes
from polar_gym.evaluators.result import full_log
from polar_gym.runtimes import Command, ExecResult, Sandbox
from polar_gym.runtimes.files import write_files
from polar_gym.tasks import Task

_SECONDS = 600.0
_PLACE = "/tmp/polar-gym-audit"
_PATCHED = f"""
git() {{ command git -c safe.directory='*' -c core.hooksPath=/dev/null "$@"; }}
git reset -q --hard && git clean -qfd || exit 98
for patch in {_PLACE}/tests.patch {_PLACE}/wrong.patch; do
    [ ! -s $patch ] || git apply --index --whitespace=nowarn $patch 2> /dev/null ||
        git apply --whitespace=nowarn $patch || exit 99
done
export PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1
"""
"""New files are in the index, from which `git reset` removes also those that .gitignore names; git refuses that where
line ends in the index are not those of the attributes. Bytecode would hide a change that keeps a file's length and
falls into the same second."""


async def run(sandbox: Sandbox, task: Task, diff: bytes, script: str, seconds: float = _SECONDS) -> ExecResult:
    """Run a shell script on the base commit with a patch and the hidden tests. Raises `SandboxError`."""
    await write_files(sandbox, {f"{_PLACE}/tests.patch": task.test_patch, f"{_PLACE}/wrong.patch": diff})
    return await sandbox.exec(Command(argv=["sh", "-c", _PATCHED + script], timeout_seconds=seconds))


async def passes(sandbox: Sandbox, task: Task, diff: bytes, seconds: float = _SECONDS) -> bool:
    """Return whether all listed tests pass with a patch; False where only a grading can tell. Raises `SandboxError`."""
    if not task.test_command or task.log_parser not in PARSERS:
        return False
    statuses = PARSERS[task.log_parser](full_log(await run(sandbox, task, diff, task.test_command, seconds)))
    return all(statuses.get(test) == PASSED for test in [*task.FAIL_TO_PASS, *task.PASS_TO_PASS])


async def sources(sandbox: Sandbox, task: Task, diff: bytes) -> dict[str, str]:
    """Return the texts of the files that the solution changes, as they are with a patch. Raises `SandboxError`."""
    found: dict[str, str] = {}
    for file in (change.path.decode(errors="replace") for change in file_changes(task.patch.encode())):
        read = await run(sandbox, task, diff, f"cat -- {shlex.quote(file)}")
        with suppress(UnicodeDecodeError):
            if read.exit_code == 0:
                found[file] = read.stdout.decode()
    return found
