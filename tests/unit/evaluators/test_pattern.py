"""The search for a request's regular expression: it has a deadline, and holds up nothing else."""

from __future__ import annotations

import pytest

from polar_gym.evaluators import EvaluatorError, pattern
from polar_gym.evaluators.test_on_output import TestOnOutputOptions as Options


@pytest.mark.parametrize(
    ("searched", "text", "found"),
    [("^b$", "a\nb\n", True), ("c", "a\nb\n", False), ("ü\0.", "ü\0\ufffd", True), ("", "", True)],
)
async def test_a_pattern_is_found_at_lines(searched: str, text: str, found: bool) -> None:
    assert await pattern.found(searched, text) is found


async def test_a_search_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a pattern that stops the whole gateway for hours."""
    monkeypatch.setattr(pattern, "SEARCH_SECONDS", 0.5)
    with pytest.raises(TimeoutError):
        await pattern.found("(a+)+$", "a" * 60 + "!")


async def test_a_search_that_fails_is_the_graders_fault() -> None:
    with pytest.raises(EvaluatorError, match="unterminated"):
        await pattern.found("(", "")


@pytest.mark.parametrize("bad", ["(", "a{99999999999}", "(" * 20_000 + ")" * 20_000])
def test_what_does_not_compile_is_named(bad: str) -> None:
    with pytest.raises(ValueError, match="is not a regular expression"):
        Options(command="true", expected_output=bad)
