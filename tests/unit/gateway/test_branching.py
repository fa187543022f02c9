"""Where sessions are branched."""

from __future__ import annotations

from typing import Any

import pytest

from polar_gym.errors import ConfigError
from polar_gym.gateway.session.branching import branching_points
from polar_gym.schema import ModelCall
from tests.support.calls import make_call


def running(index: int, name: str, arguments: str, **fields: Any) -> ModelCall:
    function = {"name": name, "arguments": arguments}
    made = {"id": "x", "type": "function", "function": function}
    return make_call(index, [1], [2], response={"role": "assistant", "content": None, "tool_calls": [made]}, **fields)


CALLS = [
    running(0, "bash", '{"command": "ls 2>/dev/null"}'),
    running(1, "edit", "{}", outcome="abandoned"),
    running(2, "bash", '{"command": "git apply <<EOF"}'),
    running(3, "bash", '{"command": "ls -> x"}'),
]


@pytest.mark.parametrize(
    ("at", "points"), [("call=0", [0]), ("call=3", [3]), ("each-turn", [1, 2]), ("before-last-edit", [1])]
)
def test_points(at: str, points: list[int]) -> None:
    assert branching_points(CALLS, at) == points


@pytest.mark.parametrize(
    ("at", "said"), [("call=4", "has 3 delivered calls"), ("call=x", "known: call=N"), ("turn", "known: call=N")]
)
def test_a_wrong_place_is_refused(at: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        branching_points(CALLS, at)


def test_a_session_without_edits_has_no_last_one() -> None:
    with pytest.raises(ConfigError, match="no call of the session changes a file"):
        branching_points(CALLS[:1], "before-last-edit")
