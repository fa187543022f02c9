"""generateContent bodies as chat, and answers back: a turn is one message, whatever became of its parts."""

from __future__ import annotations

import base64
import contextlib
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.chat import ChatRequest, Completion, Delta, ids
from polar_gym.chat.messages import canonical_json
from polar_gym.providers import BadRequestError, whole_answer
from polar_gym.providers.google import PROVIDER
from polar_gym.providers.google.contents import signature
from polar_gym.schema import Message
from tests.support.anything import answers
from tests.wire.stand_in import assistant, completion, tool_call

GO = {"role": "user", "parts": [{"text": "go"}]}
RUN = {"functionDeclarations": [{"name": "run"}, {"name": "look"}]}


def parse(*contents: Any, **fields: Any) -> ChatRequest:
    return PROVIDER.parse({"model": "m", "contents": list(contents), **fields})


def model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def call(name: str = "run", id_: str | None = None, **part: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {"a": 1.0}, **({"id": id_} if id_ else {})}, **part}


def result(name: str = "run", id_: str | None = None, response: Any = None) -> dict[str, Any]:
    given = {"name": name, "response": {"output": "ok"} if response is None else response}
    return {"functionResponse": given | ({"id": id_} if id_ else {})}


def shape(request: ChatRequest) -> list[str]:
    """Each message in short: role, text, and the ids of calls."""
    return [
        " ".join(
            [
                message["role"],
                str(message["content"] or "-"),
                *([message["tool_call_id"]] if "tool_call_id" in message else []),
                *(one["id"] for one in message.get("tool_calls", [])),
            ]
        )
        for message in request.messages
    ]


# The turns of a conversation ------------------------------------------------------------------------------------------


def test_a_conversation():
    request = parse(
        GO,
        model({"text": "hm", "thought": True}, {"text": "I "}, {"text": "shall"}, call(id_="a"), call(id_="b")),
        {"role": "user", "parts": [{"text": "and?"}, result(id_="a"), result(id_="b", response={"error": "é"})]},
        model({"text": "done"}),
        systemInstruction={"parts": [{"text": "be good"}]},
    )
    assert shape(request) == [
        "system be good",
        "user go",
        "assistant I shall a b",
        "tool ok a",
        'tool {"error": "é"} b',
        "user and?",
        "assistant done",
    ]
    assert request.messages[2]["reasoning"] == "hm"
    assert request.messages[2]["tool_calls"][0]["function"] == {"name": "run", "arguments": '{"a": 1.0}'}


@pytest.mark.parametrize(
    "instruction", ["be good", {"text": "be good"}, {"role": "user", "parts": {"text": "be good"}}]
)
def test_forms_of_the_system_instruction(instruction: Any):
    assert shape(parse(GO, systemInstruction=instruction)) == ["system be good", "user go"]
    asked = PROVIDER.parse({"model": "m", "contents": "go", "systemInstruction": instruction})
    assert shape(asked) == ["system be good", "user go"]


def test_both_spellings_of_a_field_and_what_is_somebody_elses_data():
    request = PROVIDER.parse(
        {
            "model": "m",
            "contents": [
                GO,
                {"role": "model", "parts": [{"function_call": {"name": "run", "args": {"file_path": 1}}}]},
                {"parts": [{"function_response": {"name": "run", "response": {"exit_code": 0}}}]},
            ],
            "system_instruction": {"parts": [{"text": "s"}]},
            "generation_config": {"max_output_tokens": 5, "stop_sequences": ["END"]},
            "tools": [{"function_declarations": [{"name": "run", "parameters_json_schema": {"x_y": 1}}]}],
            "tool_config": {"function_calling_config": {"mode": "NONE"}},
        }
    )
    assert request.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"file_path": 1}'
    assert request.messages[3]["content"] == '{"exit_code": 0}'
    assert (request.max_tokens, request.stop, request.tool_choice) == (5, ["END"], "none")
    assert request.tools[0]["function"]["parameters"] == {"x_y": 1}


def test_the_chunks_of_a_turn_are_one_message():
    chunks = [model({"text": "I "}), model({"text": "shall"}), model(call(id_="call_x_0")), model({"text": ""})]
    assert shape(parse(GO, *chunks)) == ["user go", "assistant I shall call_x_0"]


def test_turns_of_two_calls_are_two_messages_with_nothing_between():
    request = parse(GO, model(call(id_="call_x_0")), model(call(id_="call_y_0")), {"parts": [result(id_="call_x_0")]})
    assert shape(request) == ["user go", "assistant - call_x_0", "assistant - call_y_0", "tool ok call_x_0"]


def test_an_empty_turn_is_a_turn():
    assert shape(parse(GO, model(), GO)) == ["user go", "assistant -", "user go"]


def test_media_stay_parts():
    picture = {"inlineData": {"mimeType": "image/png", "data": "-_A="}}
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,+/A="}}
    request = parse(
        {"parts": [{"text": "a"}, picture]},
        model(call(id_="a")),
        {"parts": [{"functionResponse": {"name": "run", "id": "a", "response": {"output": "x"}, "parts": [picture]}}]},
    )
    assert request.messages[0]["content"] == [{"type": "text", "text": "a"}, url]
    assert request.messages[2]["content"] == [{"type": "text", "text": "x"}, url]


def test_the_model_is_told_of_a_file_that_it_cannot_read():
    """Guards against a session that ends when the policy reads a PDF: Gemini CLI sends it whole."""
    pdf = {"inlineData": {"mimeType": "application/pdf", "data": "JVBERi0="}}
    answered = result(id_="a")
    answered["functionResponse"]["parts"] = [pdf]
    request = parse(GO, model(call(id_="a")), {"parts": [answered, pdf]})
    told = {"type": "text", "text": "[application/pdf left out: it cannot be read here]"}
    assert request.messages[2]["content"][1] == told
    assert request.messages[3] == {"role": "user", "content": told["text"]}


# Ids ------------------------------------------------------------------------------------------------------------------


def test_a_call_without_an_id_is_known_by_its_signature():
    turn = model(call(thoughtSignature=signature("x", "hm")), call("look"))
    request = parse(GO, turn, {"parts": [result("look", "own#0-1"), result("run", "own#0-0")]})
    assert shape(request) == ["user go", "assistant - call_x_0 call_x_1", "tool ok call_x_0", "tool ok call_x_1"]
    assert request.messages[1]["reasoning"] == "hm"


def test_ids_given_here_stay_the_same_as_the_conversation_grows():
    history = [GO, model(call(), call("look"), call()), {"parts": [result(), result("look"), result()]}]
    given = ["unnamed-1", "unnamed-2", "unnamed-3"]
    short = ["user go", f"assistant - {' '.join(given)}"]
    assert shape(parse(*history)) == short + [f"tool ok {id_}" for id_ in (given[0], given[1], given[2])]
    assert shape(parse(*history, model(call())))[: len(short) + 3] == shape(parse(*history))
    assert [ids.call_of(id_) for id_ in given] == [None] * 3, "an id given here names no call"


def test_a_result_never_belongs_to_an_earlier_turn_or_to_a_call_that_has_one():
    request = parse(GO, model(call(id_="a")), GO, model(call(id_="b")), {"parts": [result(), result(id_="a")]})
    assert shape(request)[-2:] == ["tool ok b", "tool ok a"]
    assert shape(parse(GO, {"parts": [result(id_="lost")]})) == ["user go", "tool ok lost"]


def test_a_signature_is_read_in_either_alphabet_and_a_foreign_one_is_left_alone():
    minted = base64.b64decode(signature("x", "ÿ?>" * 5))
    for text in (base64.b64encode(minted), base64.urlsafe_b64encode(minted)):
        assert parse(GO, model(call(thoughtSignature=text.decode()))).messages[1]["reasoning"] == "ÿ?>" * 5
    for foreign in ("skip_thought_signature_validator", "AAAA", "!", "/w==", "é"):
        assert "reasoning" not in parse(GO, model(call(thoughtSignature=foreign))).messages[1]


def test_what_was_carried_wins_over_what_was_shown():
    shown = {"text": "trimmed", "thought": True}
    turn = model(shown, {"text": "a", "thoughtSignature": signature("x", " exactly\n")}, shown)
    assert parse(GO, turn).messages[1] == {"role": "assistant", "content": "a", "reasoning": " exactly\n"}


# Tools and settings ---------------------------------------------------------------------------------------------------


def test_a_turn_names_the_call_that_it_came_from():
    """Guards against a fork after two answers of one text: where a turn has no calls, only its signature names it."""
    signed = {"text": "a", "thoughtSignature": signature("x", "t")}
    request = parse(GO, model(signed), GO, model({"text": "a"}), GO, systemInstruction="s")
    assert request.origins == {2: "x"}
    assert [message["role"] for message in request.messages][:3] == ["system", "user", "assistant"]


def test_a_signature_that_came_back_without_its_empty_text_still_names_the_call():
    """Guards against an answer whose reasoning is lost, because Gemini CLI keeps of an empty text its signature."""
    request = parse(GO, model({"text": "a"}, {"thoughtSignature": signature("x", "hm")}))
    assert request.origins == {1: "x"}
    assert request.messages[1] == {"role": "assistant", "content": "a", "reasoning": "hm"}


def test_an_openapi_schema_becomes_json_schema():
    parameters = {
        "type": "OBJECT",
        "properties": {
            "any_of": {"type": "STRING", "nullable": True, "max_length": "5", "enum": ["A", "B"]},
            "either": {"nullable": True, "anyOf": [{"type": "STRING"}, {"type": "NUMBER"}]},
            "list": {"type": "ARRAY", "items": {"anyOf": [{"type": "INTEGER"}, {"type": "TYPE_UNSPECIFIED"}]}},
            "open": {"type": "OBJECT", "additional_properties": {"type": "STRING"}},
            "closed": {"ref": "#/defs/closed_one"},
        },
        "defs": {"closed_one": {"type": "OBJECT", "additionalProperties": False}},
        "required": ["any_of"],
        "propertyOrdering": ["list", "any_of"],
    }
    declaration = {"name": "run", "description": "runs", "parameters": parameters}
    request = parse(GO, tools=[{"functionDeclarations": [declaration]}, {"googleSearch": {}}, {"url_context": {}}])
    (tool,) = request.tools
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "any_of": {"type": ["string", "null"], "maxLength": 5, "enum": ["A", "B", None]},
            "either": {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "null"}]},
            "list": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {}]}},
            "open": {"type": "object", "additionalProperties": {"type": "string"}},
            "closed": {"$ref": "#/$defs/closed_one"},
        },
        "$defs": {"closed_one": {"type": "object", "additionalProperties": False}},
        "required": ["any_of"],
    }
    assert request.withheld_tools == ["googleSearch", "urlContext"]


@pytest.mark.parametrize(
    ("config", "choice", "offered"),
    [
        ({}, None, ["run", "look"]),
        ({"mode": "AUTO"}, "auto", ["run", "look"]),
        ({"mode": "ANY"}, "required", ["run", "look"]),
        ({"mode": "ANY", "allowedFunctionNames": ["look", "run"]}, "required", ["run", "look"]),
        (
            {"mode": "ANY", "allowedFunctionNames": ["look"]},
            {"type": "function", "function": {"name": "look"}},
            ["run", "look"],
        ),
        ({"mode": "VALIDATED"}, "auto", ["run", "look"]),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["look"]}, "auto", ["look"]),
        ({"mode": "NONE"}, "none", ["run", "look"]),
    ],
)
def test_tool_choice(config: dict[str, Any], choice: Any, offered: list[str]):
    request = parse(GO, tools=[RUN], toolConfig={"functionCallingConfig": config})
    assert request.tool_choice == choice
    assert [tool["function"]["name"] for tool in request.tools] == offered


def test_a_response_format():
    config: dict[str, Any] = {"responseMimeType": "application/json"}
    assert parse(GO, generationConfig=config).response_format == {"type": "json_object"}
    wanted = {"type": "json_schema", "json_schema": {"name": "response", "schema": {"type": "array"}}}
    for given_schema in ({"responseSchema": {"type": "ARRAY"}}, {"responseJsonSchema": {"type": "array"}}):
        assert parse(GO, generationConfig=config | given_schema).response_format == wanted


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": "m"}, "contents: is empty"),
    ({"model": "m", "contents": []}, "contents: is empty"),
    ({"contents": [GO]}, "model: is missing"),
    ({"contents": [{"role": "system", "parts": []}]}, r"contents\[0\]\.role: 'system' is not a role; use user or mod"),
    ({"contents": [{"parts": [{"text": 3}]}]}, r"contents\[0\]\.parts\[0\]\.text: expected a string, got 3"),
    (
        {"contents": [{"parts": [call()]}]},
        r"contents\[0\]\.parts\[0\]\.functionCall: does not belong here; send text or",
    ),
    ({"contents": [model(result())]}, r"contents\[0\]\.parts\[0\]\.functionResponse: does not belong here; send text"),
    ({"contents": [{"parts": [{"fileData": {}}]}]}, r".*fileData: is not supported: files are not stored here; send"),
    ({"contents": [model({"executableCode": {}})]}, r".*executableCode: is not supported: code is not executed here"),
    ({"contents": [GO, model({"toolCall": {"id": "s"}})]}, r".*toolCall: is not supported: Google's own tools .* out"),
    (
        {"contents": [{"parts": [{"tool_response": {"id": "s"}}]}]},
        r".*toolResponse: is not supported: Google's own too",
    ),
    ({"contents": [{"parts": [{"text": "a", "inlineData": {}}]}]}, r".*parts\[0\]: has text and inlineData; send one"),
    ({"contents": [model({"functionCall": {"name": "f", "args": []}})]}, r".*functionCall\.args: expected an object"),
    ({"contents": [GO], "cachedContent": "c"}, r"cachedContent: CachedContent not found .*'c'; send the whole conver"),
    ({"contents": [GO], "generationConfig": {"candidateCount": 2}}, "candidateCount: 2 is not supported: .*; send 1"),
    ({"contents": [GO], "generationConfig": {"responseMimeType": "text/x.enum"}}, r".*'text/x.enum' is not supported"),
    ({"contents": [GO], "generationConfig": {"maxOutputTokens": 0}}, "maxOutputTokens: expected an integer above 0"),
    ({"contents": [GO], "stream": "stream"}, r"alt: None is not supported for streams; send `\?alt=sse`"),
    ({"contents": [GO], "tools": [RUN, RUN]}, r"tools\[1\].*name: another tool is already called 'run'; rename"),
    ({"contents": [GO], "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, r".*mode: 'ANY' needs `tools`"),
    (
        {"contents": [GO], "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["x"]}}},
        r".*allowedFunctionNames: 'x' is not among `tools`",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), BAD, ids=[message for _, message in BAD])
def test_a_refusal_names_the_field_the_value_and_the_fix(wrong: dict[str, Any], message: str):
    with pytest.raises(BadRequestError, match=f"^{message}"):
        PROVIDER.parse(wrong if message.startswith("model") else {"model": "m"} | wrong)


_WORDS = [
    *("contents", "parts", "role", "text", "thought", "thoughtSignature", "functionCall", "functionResponse", "name"),
    *("args", "id", "response", "inlineData", "mimeType", "data", "systemInstruction", "tools", "functionDeclarations"),
    *("parameters", "type", "properties", "items", "toolConfig", "functionCallingConfig", "mode", "generationConfig"),
    *("model", "user", "ANY", "image/png", "AAAA", "maxOutputTokens", "responseMimeType", "application/json"),
    *("responseSchema", "stopSequences", "allowedFunctionNames", "generateContentRequest", "output"),
]
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(_WORDS)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_WORDS), inner, max_size=4),
    max_leaves=25,
)


@given(
    body=st.fixed_dictionaries(
        {"contents": st.lists(st.fixed_dictionaries({"parts": _json}, optional={"role": _json}), max_size=3) | _json},
        optional={name: _json for name in _WORDS if name != "contents"},
    )
)
def test_any_body_is_read_or_refused(body: dict[str, Any]):
    for parse_any in (PROVIDER.parse, PROVIDER.parse_countable):
        assert parse_any is not None
        with contextlib.suppress(BadRequestError):
            assert parse_any({**body, "model": "m"}).messages


@pytest.mark.parametrize("where", ["args", "parameters"])
def test_a_body_nested_without_end_is_refused(where: str):
    """Guards against a recursion error, which would be a 500."""
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    tools = [{"functionDeclarations": [{"name": "f", "parameters": deep if where == "parameters" else {}}]}]
    with pytest.raises(BadRequestError, match="nested too deeply"):
        parse(GO, model({"functionCall": {"name": "f", "args": deep if where == "args" else {}}}), tools=tools)


# There and back -------------------------------------------------------------------------------------------------------

_any_text = st.text(max_size=40) | st.text(' \n\r\t"\\\u2028é🦊', max_size=8)
_texts = _any_text.filter(bool)
_calls = st.builds(
    lambda name, arguments: tool_call(name, canonical_json(arguments)),
    st.sampled_from(["run", "look", "unknown"]),
    st.dictionaries(_any_text, st.integers(-5, 5) | st.floats(-9, 9) | _any_text | st.none(), max_size=3),
)
_messages = answers(st.none() | _texts, _calls)


def _pieces(text: str | None) -> list[str]:
    return [text[at : at + 3] for at in range(0, len(text or ""), 3)] if text else []


def _streamed(request: ChatRequest, answer: Completion) -> bytes:
    """As an engine that streams would have it: in small pieces."""
    stream = PROVIDER.stream(request, "x1") if PROVIDER.stream else None
    assert stream is not None
    sent = stream.begin(len(answer.prompt_ids))
    sent += b"".join(stream.feed(Delta(reasoning=piece)) for piece in _pieces(answer.message.get("reasoning")))
    sent += b"".join(stream.feed(Delta(content=piece)) for piece in _pieces(answer.message.get("content")))
    return sent + stream.end(answer)


def _chunks(sent: bytes) -> list[dict[str, Any]]:
    assert sent.endswith(b"\n\n")
    return [orjson.loads(event.removeprefix(b"data: ")) for event in sent[:-2].split(b"\n\n")]


@given(message=_messages, shows_thoughts=st.booleans())
def test_an_answer_comes_back_as_it_was_given(message: Message, shows_thoughts: bool):
    request, answer = parse(GO), completion(message)
    calls = [{**one, "id": f"call_x1_{n}"} for n, one in enumerate(message.get("tool_calls", []))]
    expected = {**message, **({"tool_calls": calls} if calls else {})}
    assert PROVIDER.stream is not None
    whole = PROVIDER.render(request, answer, "x1")
    for chunks in (
        [whole],
        _chunks(whole_answer(PROVIDER.stream(request, "x1"), answer)),
        _chunks(_streamed(request, answer)),
    ):
        contents = [chunk["candidates"][0]["content"] for chunk in chunks]
        assert all(content["parts"] for content in contents), "clients throw a turn with an empty content away"
        for content in contents:
            content["parts"] = [part for part in content["parts"] if shows_thoughts or not part.get("thought")]
        assert parse(GO, *orjson.loads(orjson.dumps(contents))).messages[1:] == [expected]
        last = chunks[-1]
        assert (last["candidates"][0]["finishReason"], last["responseId"]) == ("STOP", "resp_x1")
        assert last["usageMetadata"] == {"promptTokenCount": 7, "candidatesTokenCount": 3, "totalTokenCount": 10}
        assert ["finishReason" in chunk["candidates"][0] for chunk in chunks[:-1]] == [False] * (len(chunks) - 1)


@pytest.mark.parametrize(
    ("arguments", "finish_reason", "ending"),
    [
        ('{"a": ', "tool_calls", "MALFORMED_FUNCTION_CALL"),
        ("[1]", "tool_calls", "MALFORMED_FUNCTION_CALL"),
        ('{"a":' * 400 + "1" + "}" * 400, "tool_calls", "MALFORMED_FUNCTION_CALL"),
        ('{"a": ', "length", "MAX_TOKENS"),
    ],
)
def test_no_call_is_made_up_of_broken_arguments(arguments: str, finish_reason: str, ending: str):
    message = assistant("so", None, tool_call("run", "{}"), tool_call("run", arguments))
    answer = PROVIDER.render(parse(GO), completion(message, finish_reason), "x")["candidates"][0]
    assert (answer["finishReason"], answer["content"]["parts"]) == (ending, [{"text": "so"}])


@pytest.mark.parametrize(
    ("arguments", "args"),
    [("", {}), (" null", {}), (r'{"text": "half \ud83d"}', {"text": "half \N{REPLACEMENT CHARACTER}"})],
)
def test_arguments_that_can_be_said_are_a_call(arguments: str, args: dict[str, str]):
    """Guards against whole turns that clients throw away."""
    answer = PROVIDER.render(parse(GO), completion(assistant(None, None, tool_call("run", arguments))), "x")
    assert answer["candidates"][0]["content"]["parts"][0]["functionCall"]["args"] == args
