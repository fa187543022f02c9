"""Responses bodies as chat, and answers back: one assistant turn is one message, whatever became of its items."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.chat import ChatRequest, Completion, ids
from polar_gym.chat.messages import canonical_json
from polar_gym.providers import BadRequestError, whole_answer
from polar_gym.providers.openai_responses import PROVIDER
from polar_gym.schema import Message
from tests.support.anything import answers
from tests.wire.stand_in import assistant, completion, tool_call

GO = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]}
RUN = {"type": "function", "name": "run", "parameters": {"type": "object"}}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
}
TEAM = {"type": "namespace", "name": "team", "description": "", "tools": [{"type": "function", "name": "spawn"}, PATCH]}


def parse(*items: dict[str, Any], **fields: Any) -> ChatRequest:
    return PROVIDER.parse({"model": "m", "input": list(items), **fields})


def said(text: str, id_: str | None = None) -> dict[str, Any]:
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return item if id_ is None else item | {"id": id_}


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "run", "arguments": arguments}


def output(call_id: str, text: Any = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def reasoning(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], **fields}


def shape(request: ChatRequest) -> list[str]:
    """Each message in short: role, then for an assistant its text and its calls."""
    return [
        " ".join([message["role"], message["content"] or "-", *(one["id"] for one in message.get("tool_calls", []))])
        for message in request.messages
    ]


# The turns of a conversation ------------------------------------------------------------------------------------------


def test_the_items_of_a_turn_are_one_message():
    request = parse(GO, reasoning("hm"), said("I shall"), call("a"), call("b"), output("a"), output("b"), said("done"))
    assert shape(request) == ["user go", "assistant I shall a b", "tool ok", "tool ok", "assistant done"]
    assert request.messages[1]["reasoning"] == "hm"


def test_items_of_one_call_are_one_message_even_between_its_results():
    request = parse(GO, call("call_x_0"), output("call_x_0"), call("call_x_1"), output("call_x_1"))
    assert shape(request) == ["user go", "assistant - call_x_0 call_x_1", "tool ok", "tool ok"]


def test_items_of_two_calls_are_two_messages_with_nothing_between():
    """Codex keeps the items of a stream that was cut off, and appends those of the answer to its second try."""
    request = parse(GO, said("half", "msg_x_0"), said("whole", "msg_y_0"), call("call_y_0"))
    assert shape(request) == ["user go", "assistant half", "assistant whole call_y_0"]


def test_two_messages_of_one_turn_are_two_lines_unless_one_answer_had_both():
    """Guards against a line break that was never sampled between the parts of an answer that was read along."""
    for text, parts in (("ab", ("msg_x_0", "msg_x_1")), ("a\nb", (None, "msg_x_1")), ("a\nb", (None, None))):
        turn = [said(said_text, id_) for said_text, id_ in zip("ab", parts, strict=True)]
        assert shape(parse(GO, *turn, call("call_x_0"))) == ["user go", f"assistant {text} call_x_0"]


def test_instructions_and_leading_developer_messages_become_one_system_message():
    first = {"role": "developer", "content": "b"}
    request = parse(first, GO, first, instructions="a")
    assert shape(request) == ["system a\n\nb", "user go", "system b"]


def test_a_string_is_a_user_message():
    assert PROVIDER.parse({"model": "m", "input": "go"}).messages == [{"role": "user", "content": "go"}]


def test_images_and_several_texts_stay_parts():
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "high"}
    parts = [{"type": "input_text", "text": "a"}, image]
    request = parse({"role": "user", "content": parts}, call("a"), output("a", [image]))
    chat_image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "high"}}
    assert request.messages[0]["content"] == [{"type": "text", "text": "a"}, chat_image]
    assert request.messages[2]["content"] == [chat_image]


def test_the_model_is_told_of_a_file_that_it_cannot_read():
    """Guards against a session that ends when the policy reads a PDF: the client sends it whole, and again with each
    later call."""
    pdf = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}
    request = parse(
        {"role": "user", "content": [pdf]}, call("a"), output("a", [{"type": "input_text", "text": "x"}, pdf])
    )
    told = "[application/pdf left out: it cannot be read here]"
    assert request.messages[0]["content"] == told
    assert request.messages[2]["content"] == [{"type": "text", "text": "x"}, {"type": "text", "text": told}]


def test_audio_stays_a_part():
    """Guards against a session that ends when a tool returns a sound: Codex and OpenAI have different forms of it."""
    openais = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
    codexs = {"type": "input_audio", "audio_url": "data:audio/wav;base64,AA"}
    request = parse({"role": "user", "content": [openais]}, call("a"), output("a", [codexs]))
    assert request.messages[0]["content"] == [openais]
    assert request.messages[2]["content"] == [{"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AA"}}]


def test_a_message_between_agents_is_a_users_message():
    """Guards against a sub-agent of Codex's second generation whose first request is refused, so that the session ends.
    The forms are those of Codex 0.169: the words of its policy are in `encrypted_content`."""

    def agent_message(*content: dict[str, str]) -> dict[str, Any]:
        return {"type": "agent_message", "author": "/root", "recipient": "/root/w", "content": list(content)}

    heading = {"type": "input_text", "text": "Message Type: NEW_TASK\nSender: /root\nPayload:\n"}
    task = agent_message(heading, {"type": "encrypted_content", "encrypted_content": "Say hi."})
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    request = parse(task, said("hi"), agent_message({"type": "input_text", "text": "done"}))
    assert shape(request) == [f"user {heading['text']}Say hi.", "assistant hi", "user done"]
    shown = parse(agent_message(heading, image)).messages[0]["content"]
    assert [part["type"] for part in shown] == ["text", "image_url"]


def test_what_was_carried_wins_over_what_was_shown():
    carrier = ids.carrier("x", 0, " exactly this\n")
    request = parse(GO, reasoning("trimmed", encrypted_content=carrier), reasoning("more", id="rs_x_1"))
    assert request.messages[1]["reasoning"] == " exactly this\nmore", "nothing that was not sampled stands between them"
    foreign = reasoning("", encrypted_content="gAAAA", content=[{"type": "reasoning_text", "text": "shown"}])
    assert parse(GO, foreign).messages[1]["reasoning"] == "shown"
    assert shape(parse(GO, {"type": "reasoning", "summary": []})) == ["user go"]


# Tools ----------------------------------------------------------------------------------------------------------------


def test_a_turn_names_the_call_that_it_came_from():
    """Guards against a fork after two answers of one text: where a turn has no tool calls, other ids name its call.
    Leading system messages that become one move the others up."""
    carried = reasoning("t", encrypted_content=ids.carrier("x", 0, "t"))
    system = {"role": "developer", "content": "s"}
    request = parse(system, GO, carried, said("a"), GO, said("a", "msg_y_0"), GO, said("a"), GO, instructions="s")
    assert request.origins == {2: "x", 4: "y"}
    assert [message["role"] for message in request.messages][:3] == ["system", "user", "assistant"]


def test_tools_become_functions_or_are_withheld():
    request = parse(GO, tools=[RUN, TEAM, PATCH, {"type": "web_search_preview_2025_03_11"}, {"type": "mcp"}])
    names = [tool["function"]["name"] for tool in request.tools]
    assert names == ["run", "team__spawn", "team__apply_patch", "apply_patch"]
    assert request.withheld_tools == ["web_search_preview_2025_03_11", "mcp"]
    wanted = request.tools[3]["function"]["parameters"]["properties"]["input"]["description"]
    assert "lark" in wanted
    assert "start: X" in wanted


def test_a_freeform_call_with_other_arguments_is_handed_over_as_it_is():
    request = parse(GO, tools=[PATCH])
    for arguments in ('{"patch": 1}', "not JSON", '{"input": 3}', "[]"):
        answer = completion(assistant(None, None, tool_call("apply_patch", arguments)))
        assert PROVIDER.render(request, answer, "x")["output"][0]["input"] == arguments


@pytest.mark.parametrize(
    ("about", "own", "shown"),
    [
        ("Call begin first.", "Begins.", "Call begin first.\n\nBegins."),
        ("Call begin first.", None, "Call begin first."),
        ("Tools in the team namespace.", "Begins.", "Begins."),
        ("", None, None),
    ],
)
def test_the_model_reads_the_description_of_a_namespace(about: str, own: str | None, shown: str | None):
    begin = {"type": "function", "name": "begin", **({"description": own} if own else {})}
    tools = [{**TEAM, "description": about, "tools": [begin, PATCH]}]
    first, second = (tool["function"] for tool in parse(GO, tools=tools).tools)
    assert (first.get("description"), "first" in second.get("description", "")) == (shown, False)


def test_a_named_tool_can_be_forced():
    request = parse(GO, tools=[TEAM], tool_choice={"type": "function", "name": "spawn", "namespace": "team"})
    assert request.tool_choice == {"type": "function", "function": {"name": "team__spawn"}}


def test_the_other_fields():
    layout = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    request = parse(GO, text={"format": layout, "verbosity": "low"}, max_output_tokens=9, stream=True, temperature=0)
    assert request.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }
    assert (request.max_tokens, request.stream) == (9, True)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": "x"}, "model: is missing"),
    ({"model": "m"}, "input: is missing; send a list"),
    ({"model": "m", "input": []}, "input: is empty"),
    ({"model": "m", "input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]\.type: 'item_reference' is not"),
    ({"model": "m", "input": [{"type": "additional_tools"}]}, r"input\[0\]\.type: 'additional_tools' .* `tools`"),
    ({"model": "m", "input": [GO, {"type": "web_search_call"}]}, r"input\[1\]\.type: 'web_search_call' is not .* use"),
    ({"model": "m", "input": [{"type": "agent_message"}]}, r"input\[0\]\.content: is empty; send at least one part"),
    (
        {"model": "m", "input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        r"input\[0\]\.content\[0\]\.input_audio: is missing; send an object",
    ),
    ({"model": "m", "input": [{"role": "critic", "content": ""}]}, r"input\[0\]\.role: 'critic' is not a role"),
    ({"model": "m", "input": [call("a") | {"arguments": {}}]}, r"input\[0\]\.arguments: expected a string, got {}"),
    ({"model": "m", "input": [{"type": "reasoning", "summary": [], "encrypted_content": "g"}]}, r".*was not made here"),
    (
        {"model": "m", "input": [{"role": "user", "content": [{"type": "input_page"}]}]},
        r"input\[0\]\.content\[0\]\.type: 'input_page' is not supported here; use input_text",
    ),
    (
        {"model": "m", "input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        r"input\[0\]\.content\[0\]\.file_data: is missing; send the file as a data URL",
    ),
    (
        {"model": "m", "input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        r"input\[0\]\.content\[0\]\.image_url: is missing; send the image as a data URL",
    ),
    ({"model": "m", "input": "x", "tools": [{"type": "oracle"}]}, r"tools\[0\]\.type: 'oracle' is not supported; use"),
    ({"model": "m", "input": "x", "tools": [RUN, RUN]}, r"tools\[1\]\.name: another tool is already called 'run'"),
    ({"model": "m", "input": "x", "background": True}, "background: True is not supported"),
    ({"model": "m", "input": "x", "text": {"format": {"type": "xml"}}}, r"text\.format\.type: 'xml' is not supported"),
    ({"model": "m", "input": "x", "tool_choice": {"type": "file_search"}}, "tool_choice: .* is not supported"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD, ids=[message for _, message in BAD])
def test_a_refusal_names_the_item_the_value_and_the_fix(wrong: dict[str, Any], message: str):
    with pytest.raises(BadRequestError, match=f"^{message}"):
        PROVIDER.parse(wrong)


# There and back -------------------------------------------------------------------------------------------------------

_any_text = st.text(max_size=40) | st.text(' \n\r\t"\\\u2028é🦊', max_size=8)
"""Blanks at the ends, quotes and line breaks are where translations go wrong, and rare in random text."""
_texts = _any_text.filter(bool)
_calls = st.one_of(
    st.builds(tool_call, st.sampled_from(["run", "team__spawn", "unknown", "un__known"]), _any_text),
    st.builds(
        lambda name, text: tool_call(name, canonical_json({"input": text})),
        st.sampled_from(["apply_patch", "team__apply_patch"]),
        _any_text,
    ),
    st.builds(
        lambda words: tool_call("local_shell", canonical_json({"command": words})),
        st.lists(st.text(max_size=5), min_size=1, max_size=3),
    ),
)
_messages = answers(st.none() | _texts, _calls).filter(lambda message: len(message) > 2 or message["content"])


def _from_events(events: bytes) -> list[dict[str, Any]]:
    """The items as a client that knows nothing but `response.output_item.done` has them."""
    parsed = [orjson.loads(event.split(b"data: ", 1)[1]) for event in events.split(b"\n\n")[:-1]]
    return [event["item"] for event in parsed if event["type"] == "response.output_item.done"]


@given(message=_messages)
def test_an_answer_comes_back_as_it_was_given(message: Message):
    tools = [RUN, PATCH, TEAM, {"type": "local_shell"}]
    request = parse(GO, tools=tools)
    answer: Completion = completion(message)
    whole = PROVIDER.render(request, answer, "x1")["output"]
    streamed = _from_events(whole_answer(PROVIDER.stream(request, "x1"), answer))
    assert streamed == whole
    calls = [{**one, "id": f"call_x1_{n}"} for n, one in enumerate(message.get("tool_calls", []))]
    expected = {**message, **({"tool_calls": calls} if calls else {})}
    # A sequel by another call, with nothing between, must not be drawn into the turn.
    back = parse(GO, *orjson.loads(orjson.dumps(whole)), said("next", "msg_y_0"), tools=tools)
    assert back.messages[1:] == [expected, assistant("next")]
