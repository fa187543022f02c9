"""Tries many patches in one sandbox, one after the other: quicker than a grading, and less strict."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from polar_gym.curation.bench import Bench
from polar_gym.curation.mutants import is_python
from polar_gym.evaluators.parsers import PARSERS, PASSED
from polar_gym.evaluators.result import full_log
from polar_gym.runtimes import Command, ExecResult, Sandbox, SandboxError
from polar_gym.runtimes.files import read_file, write_files
from polar_gym.tasks import Task

PLACE = "/tmp/polar-gym-audit"
"""The directory of our programs inside the sandbox."""

_IN_SANDBOX = Path(__file__).parent / "in_sandbox"
_PATCHED = f"""
git() {{ command git -c safe.directory='*' -c core.hooksPath=/dev/null "$@"; }}
git reset -q --hard && git clean -qfd || exit 98
for patch; do
    [ ! -s {PLACE}/$patch ] || git apply --whitespace=nowarn {PLACE}/$patch || exit 99
done
"""
_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
"""Without bytecode, because bytecode hides a change that keeps a file's length and falls into the same second."""


class Trial:
    """A sandbox with a task's workspace, which each `run` begins with at the base commit."""

    def __init__(self, sandbox: Sandbox, task: Task, workspace: str) -> None:
        self.task, self.workspace = task, workspace
        self.gold = task.patch.encode()
        self.quick = bool(task.test_command) and task.log_parser in PARSERS
        """Whether `passes` can tell; otherwise only a grading can."""
        self._sandbox = sandbox
        self._seconds = 600.0

    async def run(
        self,
        diff: bytes,
        script: str,
        *,
        tests: bool = True,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        seconds: float | None = None,
    ) -> ExecResult:
        """Run a shell script in the workspace with a patch and the hidden tests. Raises `SandboxError`."""
        await write_files(self._sandbox, {f"{PLACE}/wrong.patch": diff})
        patches = ["tests.patch", "wrong.patch"] if tests else ["wrong.patch"]
        command = Command(
            argv=["sh", "-c", _PATCHED + script, "sh", *patches],
            environment={**_ENVIRONMENT, **(environment or {})},
            stdin=stdin,
            timeout_seconds=seconds or self._seconds,
        )
        return await self._sandbox.exec(command)

    async def passes(self, diff: bytes, environment: Mapping[str, str] | None = None) -> bool:
        """Return whether all listed tests pass with a patch. Raises `SandboxError`."""
        result = await self.run(diff, self.task.test_command, environment=environment)
        statuses = PARSERS[self.task.log_parser](full_log(result))
        return all(statuses.get(test) == PASSED for test in [*self.task.FAIL_TO_PASS, *self.task.PASS_TO_PASS])

    async def sources(self, diff: bytes, files: list[str]) -> dict[str, str]:
        """Return those of the files that are Python sources in the workspace with a patch. Raises `SandboxError`."""
        await self.run(diff, "true", tests=False)
        found: dict[str, str] = {}
        for file in files:
            with suppress(FileNotFoundError, UnicodeDecodeError):
                found[file] = await self.read(f"{self.workspace}/{file}")
        return {file: source for file, source in found.items() if file.endswith(".py") and is_python(source)}

    async def applies(self, diff: bytes) -> bool:
        """Return whether a patch applies to the base commit. Raises `SandboxError`."""
        return (await self.run(diff, "true", tests=False)).exit_code == 0

    async def read(self, file: str) -> str:
        """Return a file of the sandbox. Raises `FileNotFoundError` and `SandboxError`."""
        return (await read_file(self._sandbox, file)).decode()

    async def diff(self, start: bytes, files: Mapping[str, str]) -> bytes:
        """Return the patch of the workspace with the patch `start` and then these files. Raises `SandboxError`."""
        await write_files(self._sandbox, {f"{PLACE}/files/{file}": text for file, text in files.items()})
        script = (
            f"cp -r {PLACE}/files/. . && rm -r {PLACE}/files && git add -A && git diff --cached --binary --no-renames"
        )
        result = await self.run(start, script, tests=False)
        if result.exit_code != 0:
            raise SandboxError(f"a patch could not be made: {result.stderr.decode(errors='replace').strip()}")
        return result.stdout

    async def begin(self) -> None:
        """Put the hidden tests and our programs in place, and see how long the tests take with the solution."""
        programs = {f"{PLACE}/{path.name}": path.read_bytes() for path in _IN_SANDBOX.glob("*.py")}
        await write_files(self._sandbox, {**programs, f"{PLACE}/tests.patch": self.task.test_patch})
        started = time.monotonic()
        self.quick = self.quick and await self.passes(self.gold)
        self._seconds = 10 + 5 * (time.monotonic() - started)


@asynccontextmanager
async def trial(bench: Bench, task: Task) -> AsyncIterator[Trial]:
    """Start a sandbox to try patches of a task in. Raises `SandboxError`."""
    async with bench.sandbox(task) as sandbox:
        made = Trial(sandbox, task, task.workspace_path or bench.spec.workspace.path)
        await made.begin()
        yield made
