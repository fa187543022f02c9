"""Names that a harness makes up anew in each run."""

from __future__ import annotations

import re

import pytest

from polar_gym.harnesses import HARNESSES
from polar_gym.splicing.handles import Handles

OLD, NEW = "a191e8657ac64d458", "a20417a8b2f0c1d3e"


def handles() -> Handles:
    return Handles({"agent": re.compile(r"agentId: (\w+)")})


def test_each_side_gets_the_name_that_it_knows() -> None:
    known = handles()
    assert known.learn(f"agentId: {NEW} (to go on)", f"agentId: {OLD} (to go on)") == {"agent": 1}
    call = {"function": {"name": "send", "arguments": f'{{"to": "{OLD}", "say": "d\\u00e9j\\u00e0 \\ud83d"}}'}}
    assert known.for_harness(call)["function"]["arguments"] == call["function"]["arguments"].replace(OLD, NEW)
    assert known.from_harness(known.for_harness(call)) == call


@pytest.mark.parametrize(
    ("said", "recorded"),
    [
        (f"agentId: {NEW}", "no agent could be started"),
        (f"agentId: {NEW}", f"agentId: {OLD}\nagentId: {OLD}"),
        (f"agentId: {OLD}", f"agentId: {OLD}"),
        ("agentId: 7", "agentId: 8"),
        (f"at {NEW}", f"at {OLD}"),
    ],
)
def test_what_is_no_pair_of_names_is_left_as_it_is(said: str, recorded: str) -> None:
    known = handles()
    assert not known.learn(said, recorded)
    assert known.from_harness(said) == said


def test_a_name_stands_for_one_other_name_only() -> None:
    known = handles()
    known.learn(f"agentId: {NEW}", f"agentId: {OLD}")
    assert not known.learn(f"agentId: {NEW}", f"agentId: {NEW[::-1]}")
    assert not known.learn(f"agentId: {NEW[::-1]}", f"agentId: {OLD}")
    assert known.recorded == {NEW: OLD}


@pytest.mark.parametrize("name", HARNESSES.names())
def test_handles_have_a_label_and_one_group(name: str) -> None:
    for pattern in HARNESSES.get(name).handles.values():
        label, _, _ = pattern.partition("(")
        assert len(label) >= 8
        assert re.compile(pattern).groups == 1
