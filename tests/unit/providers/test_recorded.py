"""Recorded calls as items: each tool call has the result that its own conversation gave it."""

from __future__ import annotations

from typing import Any

import pytest

from polar_gym.providers.openai_responses.recorded import exchanges
from polar_gym.schema import ModelCall
from tests.support.calls import make_call

ID = "functions.bash:0"


def _asks(index: int, parent: str | None, result: str | None) -> ModelCall:
    """Return a call that states a result of `ID`, and calls a tool under `ID` where it states none."""
    function = {"name": "bash", "arguments": "{}"}
    calls = [{"type": "function", "id": ID, "function": function}] if result is None else []
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"message {index}"}]
    messages += [] if result is None else [{"role": "tool", "tool_call_id": ID, "content": result}]
    response = {"role": "assistant", "content": "" if calls else "Done.", "tool_calls": calls}
    return make_call(index, [1], [2], messages=messages, response=response, parent_id=parent)


@pytest.mark.parametrize("linked", [True, False], ids=["spliced", "not spliced"])
def test_ids_that_two_conversations_share_have_each_its_own_result(linked: bool) -> None:
    """Guards against a verifier that reads the first result in the second conversation: vLLM counts the ids of Kimi K2
    from 0 in each conversation, so also after a compaction."""
    first, second = _asks(0, None, None), _asks(2, None, None)
    parents = (first.call_id, second.call_id) if linked else (None, None)
    calls = [first, _asks(1, parents[0], "1 failed"), second, _asks(3, parents[1], "all passed")]
    found = [(answer, results) for _, answer, results in exchanges(calls)]
    assert [[each["output"] for each in results] for _, results in found] == [["1 failed"], [], ["all passed"], []]
    asked = [item["call_id"] for answer, _ in found for item in answer if item["type"] == "function_call"]
    assert asked == [each["call_id"] for _, results in found for each in results]
    assert len(set(asked)) == 2
