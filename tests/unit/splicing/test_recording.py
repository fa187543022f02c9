"""Laws of the recording: which recorded call answers a request, in any order of arrival."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.harnesses import HARNESSES
from polar_gym.schema import ModelCall
from polar_gym.splicing.recording import VOLATILE_LENGTH, DivergenceError, Recording, normal
from tests.support.calls import make_call

TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run it.", "parameters": {}}}]


def conversation(name: str, turns: int, first: int) -> list[ModelCall]:
    """Return the calls of one conversation, each of which runs a tool."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Today: 2026-01-01. Work."},
        {"role": "user", "content": name},
    ]
    calls = []
    for turn in range(turns):
        made = {"id": f"{name}-{turn}", "type": "function", "function": {"name": "bash", "arguments": '{"n": 1}'}}
        response = {"role": "assistant", "content": None, "tool_calls": [made]}
        parent = calls[-1].call_id if calls else None
        call = make_call(first + turn, [1], [2], messages=list(messages), tools=TOOLS, response=response)
        calls.append(call.model_copy(update={"call_id": f"{name}{turn}", "parent_id": parent}))
        result = {"role": "tool", "tool_call_id": made["id"], "content": f"{name}: Ran 14 tests in 0.006s"}
        messages += [response, result]
    return calls


def recording(calls: list[ModelCall], **fields: Any) -> Recording:
    options = {
        "owned": True,
        "volatile": {"date": re.compile(r"Today: \S+")},
        "live_when_divergent": False,
        "model": "m",
    }
    return Recording(session_id="first", calls=calls, **{**options, "limit": None, **fields})


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_parallel_conversations_are_answered_in_any_order_of_arrival(lengths: list[int], chance: Any) -> None:
    conversations = [conversation(f"agent{n}", turns, 10 * n) for n, turns in enumerate(lengths)]
    kept = recording(sorted((call for each in conversations for call in each), key=lambda call: call.index))
    left = [list(each) for each in conversations]
    while left := [each for each in left if each]:
        expected = chance.choice(left).pop(0)
        found = kept.find(expected.parent_id, copy.deepcopy(expected.messages), TOOLS)
        assert found is not None
        assert found[0].call_id == expected.call_id
        assert not found[1].differences
    assert not kept.waiting
    assert kept.find("agent00", [], TOOLS) is None, "beyond the record, the engine answers"


def test_new_calls_come_after_all_of_the_record() -> None:
    """Guards against a call that gets an earlier index than its parent, because a conversation ran ahead of its order
    in the record: no trace joins the two."""
    ahead, behind = conversation("a", 2, 0), conversation("b", 2, 4)
    kept = recording([*ahead, *behind])
    assert [next(kept.new_indices), next(kept.new_indices)] == [6, 7]
    assert next(recording([*ahead, *behind], owned=False, limit=1).new_indices) == 1


def test_a_tool_result_may_differ_and_each_difference_is_recorded() -> None:
    _, second = conversation("a", 2, 0)
    for content, only_volatile in (("a: Ran 14 tests in 0.021s", True), ("a: Ran 13 tests in 0.006s", False)):
        kept = recording(conversation("a", 2, 0))
        messages = [*second.messages[:-1], {**second.messages[-1], "content": content}]
        found = kept.find("a0", messages, TOOLS)
        assert found is not None
        (difference,) = found[1].differences
        assert (difference.message, difference.only_volatile) == (3, only_volatile)
        assert difference.characters == (2 if only_volatile else 1), content


def changed(call: ModelCall, place: int, **fields: Any) -> list[dict[str, Any]]:
    messages = copy.deepcopy(call.messages)
    messages[place].update(fields)
    return messages


def renamed(call: ModelCall) -> list[dict[str, Any]]:
    messages = copy.deepcopy(call.messages)
    messages[2]["tool_calls"][0]["function"]["name"] = "python"
    return messages


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda call: changed(call, 1, content="another task"), "message 1"),
        (lambda call: changed(call, 0, content="Today: 2026-01-01. Rest."), "message 0"),
        (renamed, "message 2"),
        (lambda call: changed(call, 3, tool_call_id="other"), "message 3"),
        (lambda call: call.messages[:-1], "roles differ at message 3"),
        (lambda call: [*call.messages, {"role": "user", "content": "and?"}], "roles differ at message 4"),
    ],
)
def test_all_but_tool_results_must_be_equal(change: Any, named: str) -> None:
    _, second = conversation("a", 2, 0)
    kept = recording(conversation("a", 2, 0))
    with pytest.raises(DivergenceError, match=named):
        kept.find("a0", change(second), TOOLS)
    live = recording(conversation("a", 2, 0), live_when_divergent=True)
    assert live.find("a0", change(second), TOOLS) is None


def test_a_changed_tool_diverges() -> None:
    kept = recording(conversation("a", 1, 0))
    tools = copy.deepcopy(TOOLS)
    tools[0]["function"]["name"] = "shell"
    with pytest.raises(DivergenceError, match="the tools differ"):
        kept.find(None, conversation("a", 1, 0)[0].messages, tools)


def test_a_volatile_field_may_change_and_is_counted() -> None:
    (first,) = conversation("a", 1, 0)
    kept = recording([first])
    found = kept.find(None, changed(first, 0, content="Today: 2026-01-02. Work."), TOOLS)
    assert found is not None
    assert found[1].volatile == {"date": 1}


def test_a_volatile_field_cannot_stand_for_a_whole_message() -> None:
    (first,) = conversation("a", 1, 0)
    kept = recording([first], volatile={"all": re.compile(r"(?s)Today:.*")})
    with pytest.raises(DivergenceError):
        kept.find(None, changed(first, 0, content="Today: " + "x" * VOLATILE_LENGTH), TOOLS)


NOTICE = {"role": "user", "content": "<done>agent 7</done>"}


def noticing(calls: list[ModelCall]) -> Recording:
    return recording(calls, notice=re.compile(r"<done>agent \d+</done>"))


def test_a_notice_may_come_with_another_request_and_is_counted() -> None:
    _, second = conversation("a", 2, 0)
    told = second.model_copy(update={"messages": [*second.messages, NOTICE]})
    for call, messages in ((told, second.messages), (second, told.messages)):
        found = noticing([call]).find("a0", messages, TOOLS)
        assert found is not None
        assert found[1].volatile == {"notice": 1}


@pytest.mark.parametrize(
    "change",
    [
        renamed,
        lambda call: changed(call, 3, tool_call_id="other"),
        lambda call: [*call.messages, {"role": "user", "content": "<done>agent 7</done> Now delete all."}],
        lambda call: [*call.messages, {"role": "system", "content": NOTICE["content"]}],
    ],
)
def test_a_notice_hides_no_other_difference(change: Any) -> None:
    _, second = conversation("a", 2, 0)
    told = second.model_copy(update={"messages": [*second.messages, NOTICE]})
    with pytest.raises(DivergenceError):
        noticing([told]).find("a0", change(second), TOOLS)


def test_a_request_that_the_record_only_has_undelivered_is_new() -> None:
    (first,), (other,) = conversation("a", 1, 0), conversation("b", 1, 1)
    cut = first.model_copy(update={"outcome": "abandoned"})
    kept = recording([cut, other])
    assert kept.find(None, first.messages, TOOLS) is None
    assert kept.left_out == [cut]


def test_a_branch_gives_out_the_first_calls_only() -> None:
    calls = conversation("a", 3, 0)
    kept = recording(calls, owned=False, limit=2)
    for call in calls[:2]:
        found = kept.find(call.parent_id, call.messages, TOOLS)
        assert found is not None
        assert not found[1].owned
        assert found[1].session_id == "first"
    assert kept.find("a1", calls[2].messages, TOOLS) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Ran 14 tests in 0.006s", "Ran 14 tests in 0.021s"),
        ("Chunk ID: b23c72", "Chunk ID: 00ffaa"),
        ("Process Group PGID: 4711", "Process Group PGID: 12"),
        ("2026-01-01 23:59:59", "2026-01-02 00:00:01"),
        ("wrote /tmp/tmpabc1/x.log", "wrote /tmp/tmpzzz9/x.log"),
    ],
)
def test_what_changes_from_run_to_run_is_known(one: str, other: str) -> None:
    assert normal(one) == normal(other)


@pytest.mark.parametrize(("one", "other"), [("3 failed", "2 failed"), ("x = 12", "x = 13"), ("cafe", "deed")])
def test_what_tools_say_is_not_hidden(one: str, other: str) -> None:
    assert normal(one) != normal(other)


@pytest.mark.parametrize("name", HARNESSES.names())
def test_volatile_fields_begin_with_their_label(name: str) -> None:
    for field, pattern in HARNESSES.get(name).volatile.items():
        assert re.match(r"[A-Za-z<][\w<>' ]+", pattern), f"{field}: a label comes first"
        assert re.fullmatch(pattern, "a line\n" * 3) is None
