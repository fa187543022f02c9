"""Chat Completions bodies: what is kept, what is changed, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from polar_gym.chat import ids
from polar_gym.providers import BadRequestError
from polar_gym.providers.openai_chat import PROVIDER

TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages) or [{"role": "user", "content": "go"}], **fields}


def test_a_conversation_is_kept_as_it_is():
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "be good"}]},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": ""}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "run", "arguments": '{ "a":1.0}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "name": "run", "content": "ok\n"},
        {"role": "system", "content": "later"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]},
    ]
    request = PROVIDER.parse(body(*messages, tools=[TOOL]))
    assert request.messages == messages
    assert request.tools == [TOOL]


def test_leading_system_messages_become_one():
    request = PROVIDER.parse(
        body(
            {"role": "system", "content": "a"},
            {"role": "developer", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
            {"role": "user", "content": "go"},
            {"role": "developer", "content": "d"},
        )
    )
    assert request.messages == [
        {"role": "system", "content": "a\n\nb\n\nc"},
        {"role": "user", "content": "go"},
        {"role": "system", "content": "d"},
    ]


@pytest.mark.parametrize(
    "said",
    [{"reasoning": "thinking"}, {"reasoning_content": "thinking"}, {"reasoning": "", "reasoning_content": "thinking"}],
)
def test_reasoning_is_found_under_either_name(said: dict[str, str]):
    message = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], **said}
    request = PROVIDER.parse(body({"role": "user", "content": "go"}, message))
    assert request.messages[1] == {"role": "assistant", "content": "x", "reasoning": "thinking"}


def test_the_model_is_told_of_a_file_that_it_cannot_read():
    """Guards against a session that ends when the policy reads a PDF: Qwen Code sends it whole to a model that is named
    like one which reads PDFs, and again with each later call."""
    pdf = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}}
    unnamed = [{"type": "file", "file": {"file_data": data}} for data in ("JVBERi0=", "data:;base64,JVBERi0=")]
    text = {"type": "file", "file": {"file_data": "data:text/plain,all%20of%20it"}}
    shown = {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "read"}, pdf]}
    request = PROVIDER.parse(body({"role": "user", "content": [*unnamed, text]}, shown))
    told = {"type": "text", "text": "[application/pdf left out: it cannot be read here]"}
    assert request.messages[1]["content"] == [{"type": "text", "text": "read"}, told]
    assert [part["text"] for part in request.messages[0]["content"]] == [
        f"[{kind} left out: it cannot be read here]" for kind in ("file", "file", "text/plain")
    ]


def test_the_other_fields():
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
    request = PROVIDER.parse(
        body(
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "run"}},
            parallel_tool_calls=False,
            max_tokens=5,
            max_completion_tokens=6,
            stop="END",
            response_format=schema,
            stream=True,
            temperature=0.1,
            seed=3,
            unheard_of=[1],
            n=1,
            logprobs=False,
        )
    )
    assert request.tool_choice == {"type": "function", "function": {"name": "run"}}
    assert (request.parallel_tool_calls, request.max_tokens, request.stop) == (False, 6, ["END"])
    assert (request.response_format, request.stream) == (schema, True)
    assert PROVIDER.parse(body()).stream is False


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "model: is missing; send a string"),
    ({"model": "m"}, "messages: is missing"),
    ({"model": "m", "messages": []}, "messages: is empty"),
    ({"model": 3, "messages": []}, "model: expected a string, got 3"),
    ({"model": "m", "messages": "go"}, "messages: expected a list, got 'go'"),
    (body("go"), r"messages\[0\]: expected an object, got 'go'"),  # type: ignore[arg-type]
    (body({"content": "x"}), r"messages\[0\]\.role: is missing"),
    (body({"role": "function", "content": "x"}), r"messages\[0\]\.role: 'function' is not a role; use system"),
    (body({"role": "user"}), r"messages\[0\]\.content: expected a string or a list of parts, got None"),
    (body({"role": "user", "content": [{"type": "page"}]}), r"messages\[0\]\.content\[0\]\.type: 'page' is not supp"),
    (
        body({"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}),
        r"messages\[0\]\.content\[0\]\.file\.file_data: is missing; send the file as a data URL",
    ),
    (body({"role": "system", "content": [{"type": "image_url"}]}), r"content\[0\]\.type: 'image_url' is not supported"),
    (body({"role": "tool", "content": "x"}), r"messages\[0\]\.tool_call_id: is missing"),
    (
        body({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]}),
        r"messages\[0\]\.tool_calls\[0\]\.function\.arguments: expected a string, got {}",
    ),
    (
        body({"role": "assistant", "function_call": {}}),
        r"messages\[0\]\.function_call: it was replaced by `tool_calls`",
    ),
    (
        body({"role": "assistant", "audio": {"id": "a"}}),
        r"messages\[0\]\.audio: spoken answers are not stored; send the text in `content`",
    ),
    (body(n=2), "n: 2 is not supported: .*; send 1"),
    (body(logprobs=True), "logprobs: True is not supported"),
    (body(functions=[TOOL]), "functions: .* use that"),
    (body(max_tokens=0), "max_tokens: expected an integer above 0, got 0"),
    (body(max_tokens=True), "max_tokens: expected an integer, got True"),
    (body(stop=[1]), r"stop\[0\]: expected a string"),
    (body(stream=1), "stream: expected true or false, got 1"),
    (body(tool_choice="required"), "tool_choice: 'required' needs `tools`"),
    (body(tool_choice={"type": "function", "function": {"name": "x"}}, tools=[TOOL]), "tool_choice: 'x' is not among"),
    (body(tool_choice="any"), "tool_choice: 'any' is not supported; use 'auto'"),
    (
        body(tools=[{"type": "custom", "custom": {"name": "x"}}]),
        r"tools\[0\]\.type: 'custom' is not supported; use fun",
    ),
    (body(tools=[{"type": "function", "function": {}}]), r"tools\[0\]\.function\.name: is missing"),
    (body(response_format={"type": "xml"}), "response_format.type: 'xml' is not supported; use text"),
    (body(response_format={"type": "json_schema"}), "response_format.json_schema: is missing"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD, ids=[message for _, message in BAD])
def test_a_refusal_names_the_field_the_value_and_the_fix(wrong: dict[str, Any], message: str):
    with pytest.raises(BadRequestError, match=f"^{message}" if not message.startswith("content") else message):
        PROVIDER.parse(wrong)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer a.b"}, "a.b"),
        ({"Authorization": "bearer  k "}, "k"),
        ({"Authorization": "Basic k"}, None),
        ({"Authorization": "Bearer "}, None),
        ({}, None),
    ],
)
def test_the_session_key(headers: dict[str, str], key: str | None):
    assert PROVIDER.session_key(headers) == key


def test_minted_ids_name_their_call():
    call_id = "8f_1-x"
    minted = [f"resp_{call_id}", f"chatcmpl-{call_id}", ids.tool_call(call_id, 0), ids.item("rs", call_id, 12)]
    assert [ids.call_of(id_) for id_ in minted] == [call_id] * 4
    assert [ids.call_of(id_) for id_ in ("", "call_1", "toolu_abc", "functions.shell:0", "msg_0-1-2")] == [None] * 5
    assert ids.carried(ids.carrier(call_id, 0, "é\n")) == (call_id, "é\n")
    assert [ids.carried(text) for text in ("gAAAA", "carrier_a_0.!", "carrier_a_0._w==")] == [None] * 3


@pytest.mark.parametrize(
    ("path", "matches"),
    [("/v1/chat/completions", "chat"), ("/s/k/v1/chat/completions/", "chat"), ("/v1/completions", None)],
)
def test_routes_match_after_any_prefix(path: str, matches: str | None):
    found = [route.operation for route in PROVIDER.routes if route.method == "POST" and route.path.search(path)]
    assert found == ([matches] if matches else [])
