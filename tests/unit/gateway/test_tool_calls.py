"""A node learns the markers of its engine's tool calls, and warns where none of the first calls works."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from polar_gym.builders.tool_attempts import tool_attempts
from polar_gym.gateway.node.tool_calls import FIRST_EPISODES, ToolCalls
from polar_gym.schema import Fidelity, ModelCall, Replayed, Trajectory
from tests.support.calls import make_call
from tests.support.tools import BASH
from tests.unit.splicing.template_families import FAMILIES, Family, FamilyEngine, Said

CALLS = [{"id": "x", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}]
BROKEN = make_call(0, [1], [2], tools=[BASH], response={"content": "<tool_call>bash"})
SILENT = make_call(0, [1], [2], tools=[BASH], response={"content": "Done."})
CALLING = make_call(0, [1], [2], tools=[BASH], response={"content": None, "tool_calls": CALLS})
WITHOUT_TOOLS = make_call(0, [1], [2], response={"content": "Done."})
UNANSWERED = make_call(0, [1], [2], tools=[BASH], response={"content": ""}, outcome="abandoned")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_spans_begin_and_end_with_the_markers_of_the_models_template(family: Family) -> None:
    engine, tool_calls = FamilyEngine(family), ToolCalls()
    await tool_calls.learn(engine)
    ids = engine.drifting(family.sampled(Said(text="I look.", commands=("ls",)), [family.call_id(0)])).tolist()
    call = make_call(0, [1], ids, tools=[BASH], response={"content": "I look.", "tool_calls": CALLS})
    await tool_calls.judge(trajectory := Trajectory(builder="", traces=[], fidelity=Fidelity()), [call])
    (attempt,) = trajectory.tool_attempts
    assert attempt.status == "ok"
    if family.name == "harmony":  # its calls have no marker of their own
        assert attempt.span is None
        return
    assert attempt.span is not None
    said = await engine.decode(ids[slice(*attempt.span)])
    opening, closing = {
        "kimi": ("<|tool_call_begin|>", "<|tool_call_end|>"),
        "mistral": ("[TOOL_CALLS]", family.end),
        "minimax": ("<minimax:tool_call>", "</minimax:tool_call>"),
        "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
        "command": ("<|START_ACTION|>", "<|END_ACTION|>"),
    }.get(family.name, ("<tool_call>", "</tool_call>"))
    assert said.startswith(opening)
    assert said.endswith(closing)
    assert (said.count(opening), "ls" in said, "I look." in said) == (1, True, False)
    assert [each.status for each in tool_attempts(call, {})] == ["ok"]


async def test_attempts_are_those_of_the_sessions_own_policy() -> None:
    """Guards against calls of a frozen model, or of the session that a branch began with, in the policy's figures."""
    others = [
        CALLING.model_copy(update={"frozen": "helper"}),
        CALLING.model_copy(update={"replayed": Replayed(session_id="first", owned=False)}),
    ]
    trajectory = Trajectory(builder="", traces=[], fidelity=Fidelity())
    await ToolCalls().judge(trajectory, [*others, BROKEN])
    assert [attempt.status for attempt in trajectory.tool_attempts] == ["malformed"]


async def warnings(caplog: pytest.LogCaptureFixture, *episodes: ModelCall) -> list[str]:
    tool_calls = ToolCalls()
    with caplog.at_level(logging.WARNING):
        for call in episodes:
            await tool_calls.judge(Trajectory(builder="", traces=[], fidelity=Fidelity()), [call])
    return caplog.messages


async def test_a_run_without_a_tool_call_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = await warnings(caplog, *[BROKEN] * 3, *[SILENT] * 20)
    assert f"{FIRST_EPISODES} answers to requests with tools hold 3 malformed calls, 0 of unknown tools" in said
    assert "--tool-call-parser" in said


@pytest.mark.parametrize(
    "episodes",
    [
        [BROKEN] * (FIRST_EPISODES - 1),
        [*[BROKEN] * (FIRST_EPISODES - 1), CALLING, *[BROKEN] * 20],
        [WITHOUT_TOOLS] * 20,
        [UNANSWERED] * 20,
    ],
    ids=["too few", "one call works", "no tools", "no answers"],
)
async def test_other_runs_are_not(caplog: pytest.LogCaptureFixture, episodes: list[Any]) -> None:
    assert await warnings(caplog, *episodes) == []
