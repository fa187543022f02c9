"""One command decides: it runs in a fresh sandbox on the files that the agent left, and its exit code is the reward.

The agent's last message is on the command's standard input, for tasks whose output is an answer and not a file.
"""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from polar_gym.evaluators import EvaluationContext
from polar_gym.evaluators.result import how_it_ended, log_tail
from polar_gym.registry import Options
from polar_gym.runtimes import Command, ExecResult
from polar_gym.runtimes.diff import apply_diff
from polar_gym.schema import EvaluationResult


class TestOnOutputOptions(Options):
    command: str = Field(min_length=1)
    """Run by `sh -c`."""
    workdir: str | None = None
    """Default: the workspace."""
    expected_exit_code: int = 0
    """What the command must exit with."""
    expected_output: str | None = None
    """A regular expression that must be found in standard output (`^` and `$` match at lines)."""

    @field_validator("expected_output")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from error
        return value


class TestOnOutput:
    Options = TestOnOutputOptions

    def __init__(self, options: TestOnOutputOptions) -> None:
        self._options = options

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        timeout = context.request.evaluator.timeout_seconds
        async with context.fresh_sandbox() as sandbox:
            try:
                await apply_diff(sandbox, context.request.runtime.workspace.path, context.diff)
            except ValueError as error:
                return _result(f"the agent's diff does not apply: {error}")
            result = await sandbox.exec(
                Command(
                    argv=["sh", "-c", self._options.command],
                    workdir=self._options.workdir,
                    stdin=context.final_message.encode(errors="replace"),
                    timeout_seconds=timeout,
                )
            )
        return _result(self._problem(result, timeout), log=log_tail(result))

    def _problem(self, result: ExecResult, timeout: float) -> str:
        if result.timed_out or result.exit_code != self._options.expected_exit_code:
            ended = how_it_ended(result, timeout)
            return f"the command {ended}, expected exit code {self._options.expected_exit_code}"
        expected = self._options.expected_output
        if expected is not None and not re.search(expected, result.stdout.decode(errors="replace"), re.MULTILINE):
            return f"{expected!r} is not in the command's output"
        return ""


def _result(problem: str, log: str = "") -> EvaluationResult:
    return EvaluationResult(
        evaluator="test_on_output",
        reward=0.0 if problem else 1.0,
        resolved=not problem,
        detail=problem or "the command ended as expected",
        log=log,
    )


EVALUATOR = TestOnOutput
