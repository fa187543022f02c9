"""New messages that spell special tokens are spliced like any others: the new ids are those of the canonical prompt.

The canonical ids come from the whole conversation, rendered once with a marker for the policy's words. The text after
the marker begins with a special token, so its ids do not depend on the text before it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from polar_gym.engines import EngineError
from polar_gym.engines.embedded.answers import TAGS
from polar_gym.engines.embedded.chatml import TURN_TOKENS
from polar_gym.schema import Message, ModelCall, ToolDefinition
from polar_gym.splicing.prompt import Learned, NoSplice, spliced_prompt
from tests.support.calls import make_call
from tests.unit.splicing.template_families import FAMILIES, Family, FamilyEngine, Said

ASKED: list[Message] = [{"role": "user", "content": "What is in this folder?"}]
MARK = "README.md"
ENGINES = {family.name: (FamilyEngine(family), Learned()) for family in FAMILIES}
WORDS = ("a", " ", "\n", "see ", '"', "\\", "é", "</", "<|", "|>", "Carrot 3", "<tool_response>")


def texts(family: Family) -> st.SearchStrategy[str]:
    pieces = st.sampled_from([*WORDS, *family.special, *TAGS, *TURN_TOKENS])
    return st.lists(pieces, max_size=6).map("".join)


def answered(family: Family, engine: FamilyEngine, said: Said) -> ModelCall:
    calls = [
        {"id": family.call_id(i), "type": "function", "function": {"name": "bash", "arguments": arguments(command)}}
        for i, command in enumerate(said.commands)
    ]
    sampled = engine.drifting(family.sampled(said, [call["id"] for call in calls])).tolist()
    response: Message = {"role": "assistant", "content": said.text} | ({"tool_calls": calls} if calls else {})
    return make_call(0, [1, 2, 3], sampled, response=response, finish_reason="stop")


def arguments(command: str) -> str:
    return json.dumps({"command": command})


def new_messages(family: Family, parent: ModelCall, results: list[str], question: str | None) -> list[Message]:
    calls = (parent.response or {}).get("tool_calls") or []
    new: list[Message] = [
        {"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in zip(calls, results, strict=True)
    ]
    return [*new, {"role": "user", "content": question}] if question is not None else new


async def canonical(family: Family, engine: FamilyEngine, parent: ModelCall, new: list[Message]) -> list[int]:
    """The ids that the engine's template puts after the answer, from the policy's end on where the template has it."""
    assert parent.response is not None
    text = await engine.decode((await engine.template([*ASKED, parent.response, *new], [])).tolist())
    after = text.split(MARK, 1)[1]
    calls = bool(parent.response.get("tool_calls"))
    end = family.end_of_calls or family.end if calls else family.end
    begin = after.index(end) - len(family.before_end) if calls else 0
    has_end = parent.response_ids[-1] == engine.whole(end)[0]
    return engine.whole(after[begin + len(family.before_end) * has_end :])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("calls", [True, False], ids=["calls", "words"])
@settings(max_examples=25)
@given(data=st.data())
def test_new_ids_are_the_canonical_ones(family: Family, calls: bool, data: st.DataObject) -> None:
    result, question = data.draw(texts(family), "result"), data.draw(texts(family), "question")
    asks = not calls or (family.name != "mistral" and data.draw(st.booleans(), "asks"))  # its template wants an answer
    parent = answered(family, ENGINES[family.name][0], Said(commands=(MARK,)) if calls else Said(text=MARK))
    new = new_messages(family, parent, [result] if calls else [], question if asks else None)
    asyncio.run(compare(family, parent, new))


async def compare(family: Family, parent: ModelCall, new: list[Message]) -> None:
    engine, learned = ENGINES[family.name]
    seen = [*parent.prompt_ids.tolist(), *parent.response_ids.tolist()]
    spliced = (await spliced_prompt(engine, parent, [*ASKED, parent.response or {}, *new], new, learned)).tolist()
    expected = await canonical(family, engine, parent, new)
    assert spliced == seen + (expected[1:] if expected[0] == seen[-1] else expected)


@pytest.mark.parametrize("family", [each for each in FAMILIES if each.another_end and each.name != "harmony"])
@pytest.mark.parametrize("result", ["{end} ends a document", "see {end}", "", "no such token"])
async def test_the_end_of_a_turn_is_not_looked_for_in_new_words(family: Family, result: str) -> None:
    """The policy ended its call with a token that the template does not use, and the new words spell this token."""
    parent = answered(family, ENGINES[family.name][0], Said(commands=(MARK,), end="another"))
    await compare(family, parent, new_messages(family, parent, [result.format(end=family.another_end)], None))
    await compare(family, parent, new_messages(family, parent, [""], f"{family.another_end}?"))


async def test_a_result_without_words_is_not_left_out() -> None:
    """The policy ended its call with the token that opens the user's turn, and such a turn follows the result."""
    (glm,) = [family for family in FAMILIES if family.name == "glm"]
    parent = answered(replace(glm, end_of_calls="<|user|>"), ENGINES["glm"][0], Said(commands=(MARK,)))
    await compare(glm, parent, new_messages(glm, parent, [""], "Go on."))


class Failing(FamilyEngine):
    """An engine whose first requests to template fail, and not because of the template."""

    def __init__(self, family: Family, failures: int) -> None:
        super().__init__(family)
        self._left = failures

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        self._left -= 1
        if self._left >= 0:
            raise EngineError(500, "Already borrowed", kind="server")
        return await super().template(messages, tools)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_an_engine_that_fails_says_nothing_of_its_template(family: Family) -> None:
    """Guards against the prompt of a turn without tool calls after one with: where the template ends the two with
    different tokens, the policy went on after a prompt that no template makes."""
    parent = answered(family, ENGINES[family.name][0], Said(commands=(MARK,)))
    new = new_messages(family, parent, ["a result"], None)
    asked = [*ASKED, parent.response or {}, *new]
    wanted = await spliced_prompt(ENGINES[family.name][0], parent, asked, new)
    assert (await spliced_prompt(Failing(family, 1), parent, asked, new)).tolist() == wanted.tolist()
    with pytest.raises(NoSplice, match="engine"):
        await spliced_prompt(Failing(family, 99), parent, asked, new)
