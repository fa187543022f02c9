"""Logs and words that the evaluators share for the command that they run."""

from __future__ import annotations

from polar_gym.runtimes import ExecResult
from polar_gym.runtimes.output import Output

LOG_BYTES = 1024 * 1024
LOG_LIMIT = 32 * 1024 * 1024
"""Bytes of each output of the tests that are read: runners name their results all along it."""


def kept_log(log: str) -> str:
    """Return the part of a grader's log that a result keeps: the whole log up to `LOG_BYTES`, else its two ends."""
    output = Output(LOG_BYTES)
    output.feed(log.encode(errors="replace"))
    return output.value().decode(errors="ignore")


def full_log(result: ExecResult) -> str:
    """Return stdout, then stderr. They are never interleaved, so that neither breaks a line of the other."""
    stdout, stderr = (part.decode(errors="replace") for part in (result.stdout, result.stderr))
    return f"{stdout}\n{stderr}" if stdout and not stdout.endswith("\n") else stdout + stderr


def how_it_ended(result: ExecResult, timeout_seconds: float) -> str:
    return f"timed out after {timeout_seconds:g} s" if result.timed_out else f"exited with {result.exit_code}"
