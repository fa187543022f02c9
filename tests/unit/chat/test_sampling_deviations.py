"""Which requests bend the policy's distribution: their answers are not trained on."""

from __future__ import annotations

from typing import Any

import pytest

from polar_gym.chat import ChatRequest, sampling_deviations
from polar_gym.schema import OwnGrammar


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}, **fields}}


@pytest.mark.parametrize(
    ("fields", "deviations"),
    [
        ({}, []),
        ({"tools": [tool()], "tool_choice": "auto"}, []),
        ({"tools": [tool(strict=False)]}, []),
        ({"tools": [tool()], "tool_choice": "required"}, ["tool_choice"]),
        ({"tools": [tool(), tool(strict=True)]}, ["tools.strict"]),  # vLLM holds its arguments to the schema
        ({"tools": [tool(strict=True)], "tool_choice": "none"}, []),
        ({"response_format": {"type": "text"}}, []),
        ({"response_format": {"type": "json_object"}}, ["response_format"]),
    ],
)
def test_a_grammar_is_a_deviation(fields: dict[str, Any], deviations: list[str]) -> None:
    assert sampling_deviations(ChatRequest(model="m", messages=[], **fields)) == deviations


@pytest.mark.parametrize(
    ("own_grammar", "without_tools", "with_tools"),
    [
        (None, [], []),
        ("none", [], []),
        ("tools", [], ["own_grammar"]),
        ("all", ["own_grammar"], ["own_grammar"]),
    ],
)
def test_a_grammar_of_the_engines_own_is_a_deviation(
    own_grammar: OwnGrammar | None, without_tools: list[str], with_tools: list[str]
) -> None:
    made = [
        sampling_deviations(ChatRequest(model="m", messages=[], tools=tools), own_grammar) for tools in ([], [tool()])
    ]
    assert made == [without_tools, with_tools]


def test_calls_that_may_use_no_tool_are_under_no_tool_grammar() -> None:
    """vLLM applies none with `tool_choice: none`."""
    request = ChatRequest(model="m", messages=[], tools=[tool()], tool_choice="none")
    assert sampling_deviations(request, "tools") == []
    assert sampling_deviations(request, "all") == ["own_grammar"]
