"""Attempts to call a tool: the status and the tokens of each."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.builders.tool_attempts import MARKERS, tool_attempts
from polar_gym.schema import ModelCall
from tests.support.calls import make_call
from tests.support.tools import BASH

OPEN, CLOSE, PYTHON_TAG = 90, 91, 92
TOKENS = {OPEN: "<tool_call>", CLOSE: "</tool_call>", PYTHON_TAG: "<|python_tag|>"}


def made(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}


LS = made("bash", '{"command": "ls"}')


def answer(ids: list[int], *calls: dict[str, Any], text: str = "", **fields: Any) -> ModelCall:
    message = {"role": "assistant", "content": text, "tool_calls": list(calls)}
    return make_call(0, [1], ids, **{"tools": [BASH], "response": message, **fields})


def judged(call: ModelCall, tokens: dict[int, str] = TOKENS) -> list[tuple[str, Any]]:
    return [(attempt.status, attempt.span) for attempt in tool_attempts(call, tokens)]


@pytest.mark.parametrize(
    ("function", "status"),
    [
        (LS, "ok"),
        (made("shell", '{"command": "ls"}'), "unknown_tool"),
        (made("bash", "{}"), "schema_violation"),
        (made("bash", ""), "schema_violation"),
        (made("bash", '{"command": 1}'), "schema_violation"),
        (made("bash", '{"command": "ls"'), "malformed"),
        (made("bash", '["ls"]'), "malformed"),
        (made("bash", "[" * 100_000), "malformed"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_parsed_call_is_judged_by_the_requests_tools(function: dict[str, Any], status: str) -> None:
    assert judged(answer([5, OPEN, 6, CLOSE, 7], function)) == [(status, (1, 4))]


@pytest.mark.parametrize(
    ("ids", "calls", "found"),
    [
        ([5, 6], [], []),
        ([OPEN, 5, CLOSE], [], [("malformed", (0, 3))]),
        ([5, OPEN, 6], [], [("malformed", (1, 3))]),
        ([OPEN, 5, OPEN, 6, CLOSE], [], [("malformed", (0, 2)), ("malformed", (2, 5))]),
        ([OPEN, 5, CLOSE, OPEN, 6, CLOSE, 9], [LS, LS], [("ok", (0, 3)), ("ok", (3, 6))]),
        ([PYTHON_TAG, 5, 6, 9], [LS], [("ok", (0, 4))]),
        ([CLOSE, 5], [], []),
        ([5, 6], [LS], [("ok", None)]),
        ([OPEN, 5, CLOSE], [LS, LS], [("ok", None), ("ok", None)]),
        ([OPEN, 5, CLOSE, OPEN, 6], [LS], [("ok", None), ("malformed", None)]),
    ],
    ids=[
        *("no attempt", "broken", "cut off", "two broken", "two parsed", "no closing marker", "closing marker alone"),
        *("no marker", "several calls behind one marker", "one of two is broken"),
    ],
)
def test_each_marker_and_each_parsed_call_is_an_attempt(ids: list[int], calls: list[Any], found: list[Any]) -> None:
    assert judged(answer(ids, *calls)) == found


@pytest.mark.parametrize("opening", MARKERS)
def test_markers_in_the_text_are_attempts_where_the_ids_show_none(opening: str) -> None:
    """Guards against a run with the wrong parser, or with none, that seems to attempt no call."""
    assert judged(answer([5], text=f"So. {opening}bash")) == [("malformed", None)]
    assert judged(answer([5], LS, text=f"So. {opening}bash")) == [("ok", None), ("malformed", None)]
    assert judged(answer([OPEN, 5, CLOSE], text=f"So. {opening}bash")) == [("malformed", (0, 3))]


@pytest.mark.parametrize(
    ("text", "attempts"),
    [
        ("[bash(command='ls')]", 1),
        ('\n{"name": "bash", "parameters": {"command": "ls"}}', 1),
        ("[other(command='ls')]", 0),
        ("I run [bash(command='ls')].", 0),
        ('{"name": "Ada"}', 0),
    ],
)
def test_a_bare_call_of_an_offered_tool_is_an_attempt(text: str, attempts: int) -> None:
    assert judged(answer([5], text=text)) == [("malformed", None)] * attempts


@pytest.mark.parametrize(
    ("schema", "arguments", "status"),
    [
        ({"additionalProperties": False, "properties": {"a": {}}}, {"b": 1}, "schema_violation"),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}, {"a": 1}, "schema_violation"),
        ({"properties": {"a": {"items": {"enum": ["x"]}}}}, {"a": ["x", "y"]}, "schema_violation"),
        ({"properties": {"pattern": {"type": "string", "pattern": "(a+)+$"}}}, {"pattern": 1}, "schema_violation"),
        ({"properties": {"a": {"pattern": "(a+)+$"}}}, {"a": "a" * 60 + "!"}, "ok"),
        ({"patternProperties": {"(a+)+$": {}}, "additionalProperties": False}, {"a" * 60 + "!": 1}, "ok"),
        ({"$ref": "http://127.0.0.1:9/schema"}, {}, "ok"),
        ({"properties": {"a": {"$ref": "#"}}}, {"a": {}}, "ok"),
        ({"type": "OBJECT"}, {}, "ok"),
        ({"properties": 3}, {}, "ok"),
        (["not a schema"], {}, "ok"),
        (None, {}, "ok"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_schema_is_checked_in_bounded_time(schema: Any, arguments: Any, status: str) -> None:
    """Guards against a schema of the agent's own that holds the node, fails the session, or calls a server."""
    tool = {"type": "function", "function": {"name": "t", "parameters": schema}}
    started = time.process_time()
    assert judged(answer([5], made("t", json.dumps(arguments)), tools=[tool])) == [(status, None)]
    assert time.process_time() - started < 60


@given(
    ids=st.lists(st.sampled_from([5, 6, *TOKENS]), max_size=12),
    calls=st.lists(st.sampled_from([LS, made("bash", "{"), made("shell", "{}"), made("bash", "{}")]), max_size=4),
)
def test_spans_are_disjoint_and_every_call_and_marker_is_counted(ids: list[int], calls: list[Any]) -> None:
    attempts = tool_attempts(answer(ids, *calls), TOKENS)
    assert [attempt.name for attempt in attempts if attempt.name] == [call["function"]["name"] for call in calls]
    openings = int(np.isin(ids, [OPEN, PYTHON_TAG]).sum())
    assert len(attempts) == max(openings, len(calls))
    ends = [0, *(place for attempt in attempts if attempt.span for place in attempt.span)]
    assert ends == sorted(ends)
    assert ends[-1] <= len(ids)
    for attempt in attempts:
        assert attempt.span is None or (attempt.span[0] < attempt.span[1] and TOKENS[ids[attempt.span[0]]] in MARKERS)
