"""One command decides: it runs in a fresh sandbox on the files that the harness left.

The exit code always counts. The options add the command's output, the tests that its log or its JUnit report names, or
a reward that the command wrote to a file. Result files are removed before the command starts, so that none of them can
come from the harness. The harness's last message is on the command's standard input, for tasks whose output is an
answer and not a file. The command may run code that the harness wrote, and that code could forge all of these results:
tasks with hidden tests belong to `swe`.
"""

from __future__ import annotations

import asyncio
import math
import re
import shlex
from pathlib import PurePosixPath
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from polar_gym.evaluators import EvaluationContext, EvaluatorError, SuspectError, pattern
from polar_gym.evaluators.grading import carry
from polar_gym.evaluators.junit import parse_junit
from polar_gym.evaluators.parsers import MISSING, PASSED, SKIPPED, get_parser
from polar_gym.evaluators.protected import named_by
from polar_gym.evaluators.result import LOG_LIMIT, full_log, how_it_ended, kept_log
from polar_gym.registry import Names, Options
from polar_gym.runtimes import Command, ExecResult, Sandbox
from polar_gym.runtimes.files import UnreadableFileError, read_file
from polar_gym.schema import EvaluationResult

_PREPARE = 'for each; do rm -rf -- "$each" && mkdir -p -- "$(dirname -- "$each")" || exit; done'


class TestOnOutputOptions(Options):
    command: str = Field(min_length=1)
    """Run by `sh -c`."""
    workdir: str | None = None
    """Default: the workspace."""
    expected_exit_code: int | None = 0
    """null: any."""
    expected_output: str | None = None
    """A regular expression that must be found in standard output (`^` and `$` match at lines)."""
    exact_output: str | None = None
    """The text that standard output must be, apart from white space at its ends."""
    log_parser: Annotated[str | None, Names.CODE] = None
    """Reads the tests' statuses from the log: `unittest`, `pytest`, or `package.module:function`."""
    junit: str | None = None
    """The path of the JUnit XML report that the command writes, relative to `workdir`; instead of `log_parser`."""
    expected_tests: dict[str, str] | list[str] | None = None
    """The tests that must pass, or test -> the status that it must have; null: at least one test passes, and all others
    pass or are skipped."""
    reward_file: str | None = None
    """The path of a file into which the command writes the reward, a number from 0 to 1, relative to `workdir`."""
    protected: list[str] = Field(default_factory=list)
    """Files and directories of the workspace that belong to the task, relative to it: the harness's changes to them do
    not count."""

    @field_validator("protected")
    @classmethod
    def _relative(cls, value: list[str]) -> list[str]:
        for path in map(PurePosixPath, value):
            if path.is_absolute() or ".." in path.parts or "*" in str(path):
                raise ValueError(f"'{path}' protects nothing; name a file or directory relative to the workspace")
        return value

    @field_validator("expected_output")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from error
        return value

    @field_validator("log_parser")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None:
            get_parser(value)
        return value

    @model_validator(mode="after")
    def _one_report(self) -> Self:
        if self.log_parser is not None and self.junit is not None:
            raise ValueError("set log_parser or junit, not both")
        if self.expected_tests is not None and self.log_parser is None and self.junit is None:
            raise ValueError("expected_tests needs log_parser or junit to know what the tests did")
        return self


class TestOnOutput:
    Options = TestOnOutputOptions
    needs_sandbox = True

    def __init__(self, options: TestOnOutputOptions) -> None:
        self._options = options

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        timeout = context.request.evaluator.timeout_seconds
        workdir = PurePosixPath(context.request.runtime.workspace.path, self._options.workdir or ".")
        async with context.fresh_sandbox() as sandbox:
            if problem := await carry(context, sandbox, named_by(self._options.protected)):
                return _result(problem)
            await self._remove_old_results(sandbox, workdir)
            result = await sandbox.exec(
                Command(
                    argv=["sh", "-c", self._options.command],
                    workdir=str(workdir),
                    stdin=context.final_message.encode(errors="replace"),
                    timeout_seconds=timeout,
                    output_limit=LOG_LIMIT,
                    untrusted=True,
                )
            )
            log = kept_log(full_log(result))
            if result.timed_out:
                raise SuspectError(_result(f"the command {how_it_ended(result, timeout)}", log=log))
            tests, problem = await self._tests(sandbox, workdir, result)
            reward, no_reward = await self._reward(sandbox, workdir)
        problem = await self._problem(result, timeout, log) or problem or self._unexpected(tests) or no_reward
        return _result(problem, reward, tests, log)

    async def _remove_old_results(self, sandbox: Sandbox, workdir: PurePosixPath) -> None:
        """Remove result files that exist before the command runs: the command did not write them."""
        paths = [path for path in (self._options.junit, self._options.reward_file) if path]
        if not paths:
            return
        argv = ["sh", "-c", _PREPARE, "sh", *paths]
        done = await sandbox.exec(Command(argv=argv, workdir=str(workdir)))
        if done.exit_code != 0:
            reason = done.stderr.decode(errors="replace").strip()
            raise EvaluatorError(f"{' and '.join(map(shlex.quote, paths))} cannot be cleared: {reason}")

    async def _tests(self, sandbox: Sandbox, workdir: PurePosixPath, result: ExecResult) -> tuple[dict[str, str], str]:
        """Return the tests' statuses, and the reason where expected statuses are missing."""
        if self._options.log_parser is not None:
            tests = await asyncio.to_thread(get_parser(self._options.log_parser), full_log(result))
            return tests, "" if tests else "the command's log names no test"
        if self._options.junit is None:
            return {}, ""
        try:
            report = await read_file(sandbox, str(workdir / self._options.junit))
            tests = await asyncio.to_thread(parse_junit, report)
        except (FileNotFoundError, UnreadableFileError, ValueError) as error:
            return {}, f"junit: {error}"
        return tests, "" if tests else "the JUnit report names no test"

    async def _reward(self, sandbox: Sandbox, workdir: PurePosixPath) -> tuple[float, str]:
        if self._options.reward_file is None:
            return 1.0, ""
        try:
            reward = float(await read_file(sandbox, str(workdir / self._options.reward_file)))
        except (FileNotFoundError, UnreadableFileError, ValueError) as error:
            return 0.0, f"reward_file: {error}"
        if not (math.isfinite(reward) and 0 <= reward <= 1):
            return 0.0, f"reward_file: {reward:g} is not between 0 and 1"
        return reward, ""

    async def _problem(self, result: ExecResult, timeout: float, log: str) -> str:
        options = self._options
        if options.expected_exit_code is not None and result.exit_code != options.expected_exit_code:
            return f"the command {how_it_ended(result, timeout)}, expected exit code {options.expected_exit_code}"
        output = result.stdout.decode(errors="replace")
        if options.expected_output is not None:
            try:
                if not await pattern.found(options.expected_output, output):
                    return f"{options.expected_output!r} is not in the command's output"
            except TimeoutError as error:
                said = f"the search for {options.expected_output!r} took more than {pattern.SEARCH_SECONDS:g} seconds"
                raise SuspectError(_result(said, log=log)) from error
        if options.exact_output is not None and output.strip() != options.exact_output.strip():
            return f"the command's output is not {options.exact_output.strip()[:200]!r}"
        return ""

    def _unexpected(self, tests: dict[str, str]) -> str:
        """Return a message about the tests whose status is not the expected one; "" if there are no such tests."""
        expected = self._options.expected_tests
        if expected is None:
            if tests and {*tests.values()} == {SKIPPED}:
                return f"every test was skipped ({len(tests)})"
            wrong = [test for test, status in tests.items() if status not in (PASSED, SKIPPED)]
        else:
            wanted = expected if isinstance(expected, dict) else dict.fromkeys(expected, PASSED)
            wrong = [test for test, status in wanted.items() if tests.get(test, MISSING) != status]
        said = ", ".join(f"{test} {tests.get(test, MISSING)}" for test in wrong[:3])
        return f"{len(wrong)} tests are not as expected: {said}" if wrong else ""


def _result(problem: str, reward: float = 1.0, tests: dict[str, str] | None = None, log: str = "") -> EvaluationResult:
    reward = 0.0 if problem else reward
    return EvaluationResult(
        evaluator="test_on_output",
        reward=reward,
        resolved=reward == 1.0,
        tests=tests or {},
        detail=problem or f"the command ended as expected{'' if reward == 1.0 else f', reward {reward:g}'}",
        log=log,
    )


EVALUATOR = TestOnOutput
