"""The summary of a run: counts that a user must see."""

from __future__ import annotations

import io

from rich.console import Console

from polar_gym.report import print_summary
from polar_gym.schema import ModelCall
from tests.unit.calls import make_call
from tests.unit.sample_episodes import make_episode


def summary(*calls: ModelCall) -> str:
    written = io.StringIO()
    print_summary([make_episode("s", 1.0, calls)], Console(file=written, width=200))
    return written.getvalue()


def test_calls_that_wanted_one_tool_call_at_most_are_counted() -> None:
    wanting, other = make_call(0, [1], [2], single_tool_call=True), make_call(1, [3], [4])
    assert "\n1 calls asked for one tool call at most" in summary(wanting, other)
    assert "one tool call" not in summary(other)
