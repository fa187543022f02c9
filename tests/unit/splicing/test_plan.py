"""What goes to the engine is in its own terms: its tool-call ids, and roles that its template takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from polar_gym.chat import ChatRequest, ids
from polar_gym.engines import EngineError
from polar_gym.engines.embedded.chatml import ChatML
from polar_gym.schema import Message, ToolDefinition
from polar_gym.splicing.plan import Plan, SessionMemory, Splicer
from polar_gym.splicing.terms import Terms
from tests.support.calls import make_call

CHATML = ChatML()
LATE: Message = {"role": "system", "content": "Be kind."}
USER: Message = {"role": "user", "content": "Hello."}
OTHERS = ("refused", "dropped", "first")


class Engine:
    takes_prefix_only = False

    def __init__(self, *, late: str = "kept") -> None:
        """`late`: what the template does with later system messages: `kept`, `refused`, `dropped`, or `first`."""
        self._late = late

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        late = [message for message in messages[1:] if message["role"] == "system"]
        others = [message for message in messages if message not in late]
        if late and self._late == "refused":
            raise EngineError(400, "System message must be at the beginning.")
        messages = {"dropped": others, "first": [*late, *others]}.get(self._late, messages)
        return np.asarray(CHATML.prompt_ids(list(messages), list(tools)), np.int32)

    async def decode(self, token_ids: Sequence[int]) -> str:
        return CHATML.decode(token_ids)


async def prepared(engine: Engine, memory: SessionMemory, messages: list[Message]) -> tuple[list[Message], str]:
    splicer = Splicer(engine, enabled=True)  # pyright: ignore[reportArgumentType]
    terms = Terms(engine)  # pyright: ignore[reportArgumentType]
    await terms.probe()
    plan = await planned(splicer, memory, messages, terms)
    return plan.request.messages, plan.continuation


async def planned(splicer: Splicer, memory: SessionMemory, messages: list[Message], terms: Terms | None = None) -> Plan:
    request = ChatRequest(model="policy", messages=messages)
    asked = terms.of(memory.engine_ids, request) if terms else request
    return await splicer.prepare(memory, request, asked)


@pytest.mark.parametrize(("late", "role"), [("kept", "system"), *((each, "user") for each in OTHERS)])
async def test_a_late_system_message_stays_in_place_as_what_the_template_takes(late: str, role: str) -> None:
    """Guards against templates that refuse a second system message, that leave it out in silence (MiniMax M2), or that
    put it before all turns (DeepSeek V3.1): Codex and Claude Code send them."""
    asked = [{"role": "system", "content": "Be brief."}, USER, LATE]
    sent, _ = await prepared(Engine(late=late), SessionMemory(), asked)
    assert sent == [asked[0], USER, {"role": role, "content": "Be kind."}]


def answered(memory: SessionMemory) -> Plan:
    """The plan of a first request, which was answered."""
    history = memory.conversations.continuation([USER], [], {}).history
    return Plan(request=ChatRequest(model="policy", messages=[USER]), history=history)


class Seeing(Engine):
    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        if any(isinstance(message["content"], list) for message in messages):
            return np.asarray([1, 2], np.int32)
        return await super().template(messages, tools)


class Deaf(Seeing):
    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        if any(part["type"].endswith(("audio", "audio_url")) for part in parts):
            raise EngineError(400, "At most 0 audio(s) may be provided in one prompt.", kind="invalid_request")
        return await super().template(messages, tools)


class Broken(Engine):
    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        if any(isinstance(message["content"], list) for message in messages):
            raise EngineError(502, "the image processor broke", kind="server")
        return await super().template(messages, tools)


async def test_only_a_model_that_reads_nothing_but_text_gets_words_for_an_image() -> None:
    asked: list[Message] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look."},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
                {"type": "input_audio", "input_audio": {"data": "AA"}},
            ],
        }
    ]
    for engine in (Seeing(), Broken()):
        seen, _ = await prepared(engine, SessionMemory(), asked)
        assert seen == asked
    seen, _ = await prepared(Deaf(), SessionMemory(), asked)
    assert seen[0]["content"][:2] == asked[0]["content"][:2]
    assert seen[0]["content"][2]["text"] == "[audio left out: this model reads text and image only]"
    told, _ = await prepared(Engine(), SessionMemory(), asked)
    assert [part["text"] for part in told[0]["content"]] == [
        "Look.",
        "[image left out: this model reads text only]",
        "[audio left out: this model reads text only]",
    ]
    assert asked[0]["content"][1]["type"] == "image_url", "the harness's own form is left alone"


async def test_a_continuation_with_a_late_system_message_is_spliced_all_the_same() -> None:
    memory = SessionMemory()
    answer: Message = {"role": "assistant", "content": "Hi."}
    parent = make_call(0, CHATML.prompt_ids([USER], []), CHATML.answer_ids(answer), messages=[USER], response=answer)
    parent.finish_reason = "stop"
    memory.remember(parent, answered(memory))
    _, continuation = await prepared(Engine(late="refused"), memory, [USER, answer, LATE])
    assert continuation == "spliced"


async def test_the_engine_sees_its_own_tool_call_ids() -> None:
    """Guards against templates that print ids: a minted one would not be what the model saw."""
    memory = SessionMemory()
    call = {"id": "functions.bash:0", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    response: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
    memory.remember(make_call(0, [1], [2], messages=[USER], response=response), answered(memory))
    minted = ids.tool_call("call0", 0)
    asked: list[Message] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{**call, "id": minted}]},
        {"role": "tool", "tool_call_id": minted, "content": "README.md"},
    ]
    seen, _ = await prepared(Engine(), memory, asked)
    assert seen[1]["tool_calls"][0]["id"] == seen[2]["tool_call_id"] == "functions.bash:0"
    assert asked[2]["tool_call_id"] == minted, "the harness's own form is left alone"


async def test_where_reasoning_is_not_to_be_kept_the_template_decides() -> None:
    engine, memory = Engine(), SessionMemory()
    answer: Message = {"role": "assistant", "content": "Hi.", "reasoning": "They greet."}
    parent = make_call(0, CHATML.prompt_ids([USER], []), CHATML.answer_ids(answer), messages=[USER], response=answer)
    parent.finish_reason = "stop"
    memory.remember(parent, answered(memory))
    for keep, expected in ((True, ("spliced", None)), (False, ("canonical", "template"))):
        splicer = Splicer(engine, enabled=True, keep_reasoning=keep)  # pyright: ignore[reportArgumentType]
        plan = await planned(splicer, memory, [USER, answer, USER])
        assert (plan.continuation, plan.cause) == expected
