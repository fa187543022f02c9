"""Laws of both OpenAI formats: an answer is the same whole, streamed and handed back; any body is read or refused."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.chat import Delta
from polar_gym.providers import BadRequestError, Provider, openai_chat, openai_responses, whole_answer
from polar_gym.providers.json_text import request_body
from polar_gym.schema import Message
from tests.support.anything import answers, any_json, paths, replaced
from tests.wire.stand_in import completion, tool_call

CHAT, RESPONSES = openai_chat.PROVIDER, openai_responses.PROVIDER
GO: Message = {"role": "user", "content": "go"}
RUN = {"name": "run", "parameters": {"type": "object"}}

_any_text = st.text(max_size=40) | st.text(' \n\r\t"\\\u2028é🦊', max_size=8)
_texts = _any_text.filter(bool)
_calls = st.builds(tool_call, st.sampled_from(["run", "unknown"]), _any_text)
_answers = answers(st.none() | _texts, _calls).filter(lambda message: len(message) > 2 or message["content"])


def _pieces(draw: st.DataObject, text: str | None) -> list[str]:
    cut = draw.draw(st.integers(0, len(text or "")))
    return [piece for piece in ((text or "")[:cut], (text or "")[cut:]) if piece]


def _deltas(draw: st.DataObject, message: Message) -> list[Delta]:
    """The answer as an engine may stream it."""
    deltas = [Delta(reasoning=piece) for piece in _pieces(draw, message.get("reasoning"))]
    deltas += [Delta(content=piece) for piece in _pieces(draw, message["content"])]
    for index, call in enumerate(message.get("tool_calls", [])):
        named = {"index": index, "id": "engine-own", "function": {"name": call["function"]["name"]}}
        deltas.append(Delta(tool_calls=[named]))
        for piece in _pieces(draw, call["function"]["arguments"]):
            deltas.append(Delta(tool_calls=[{"index": index, "function": {"arguments": piece}}]))
    return deltas


def _events(stream: bytes) -> list[dict[str, Any]]:
    data = [event.split(b"data: ", 1)[1] for event in stream.split(b"\n\n")[:-1]]
    return [orjson.loads(each) for each in data if each != b"[DONE]"]


def _from_chunks(stream: bytes) -> dict[str, Any]:
    """The message as a client puts it together."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in _events(stream):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key) or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    message["tool_calls"].append(call)
                else:
                    function = message["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
    for index, call in enumerate(message["tool_calls"]):
        assert call.pop("index") == index
    return message


@given(message=_answers, data=st.data())
def test_a_chat_answer_is_the_same_whole_streamed_and_handed_back(message: Message, data: st.DataObject):
    body = {"model": "m", "messages": [GO], "tools": [{"type": "function", "function": RUN}]}
    request, answer = CHAT.parse(body), completion(message)
    whole = CHAT.render(request, answer, "x1")["choices"][0]
    stream = CHAT.stream(request, "x1")
    streamed = stream.begin(7) + b"".join(map(stream.feed, _deltas(data, message))) + stream.end(answer)
    for sent in (whole_answer(CHAT.stream(request, "x1"), answer), streamed):
        assert _events(sent)[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
        put_together = {key: value for key, value in _from_chunks(sent).items() if value}
        assert put_together == {key: value for key, value in whole["message"].items() if value}
    calls = [{**call, "id": f"call_x1_{index}"} for index, call in enumerate(message.get("tool_calls", []))]
    expected = {**message, **({"tool_calls": calls} if calls else {})}
    assert CHAT.parse({"model": "m", "messages": [GO, whole["message"], GO]}).messages == [GO, expected, GO]


@given(message=_answers, data=st.data())
def test_a_responses_answer_is_the_same_however_its_stream_is_cut(message: Message, data: st.DataObject):
    body = {"model": "m", "input": "go", "tools": [{"type": "function", **RUN}]}
    request, answer = RESPONSES.parse(body), completion(message)
    whole = RESPONSES.render(request, answer, "x1")
    stream = RESPONSES.stream(request, "x1")
    events = _events(stream.begin(7) + b"".join(map(stream.feed, _deltas(data, message))) + stream.end(answer))
    assert events[-1]["response"] | {"created_at": 0} == whole | {"created_at": 0}
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole["output"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


# Whatever comes in ----------------------------------------------------------------------------------------------------

CHAT_BODY: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["a"],
    "tools": [{"type": "function", "function": RUN}],
    "tool_choice": {"type": "function", "function": {"name": "run"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]},
        {
            "role": "assistant",
            "reasoning_content": "t",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "run", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ],
}
RESPONSES_BODY: dict[str, Any] = {
    "model": "m",
    "max_output_tokens": 9,
    "stream": True,
    "instructions": "s",
    "metadata": {"a": "b"},
    "tools": [
        {"type": "function", **RUN},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "team", "tools": [{"type": "function", "name": "spawn"}]},
        {"type": "local_shell"},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "function", "name": "run"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}], "encrypted_content": "e"},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "x"}]},
        {"type": "function_call", "call_id": "a", "name": "spawn", "namespace": "team", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "r"}]},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "p"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "r"},
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c", "output": "r"},
    ],
}
FORMATS = [(CHAT, CHAT_BODY), (RESPONSES, RESPONSES_BODY)]


def _survives(provider: Provider, body: dict[str, Any]) -> bool:
    """The body is read, or refused: what comes of it can be said in JSON."""
    try:
        request = provider.parse(request_body(orjson.dumps(body)))
    except BadRequestError as error:
        orjson.dumps(provider.error(400, error.code, str(error)))
        return False
    assert all(message["role"] in ("system", "user", "assistant", "tool") for message in request.messages)
    orjson.dumps([request.messages, request.tools, request.tool_choice, request.response_format, request.wire])
    return True


@pytest.mark.parametrize(("provider", "body"), FORMATS, ids=["chat", "responses"])
def test_the_bodies_that_are_made_worse_below_are_good(provider: Provider, body: dict[str, Any]):
    assert _survives(provider, body)


@given(
    where=st.sampled_from([(provider, body, path) for provider, body in FORMATS for path in paths(body)]),
    value=any_json,
)
def test_a_malformed_body_is_refused_and_nothing_worse(where: tuple[Provider, dict[str, Any], Any], value: Any):
    provider, body, path = where
    _survives(provider, replaced(body, path, value))


@pytest.mark.parametrize("levels", [100, 210, *range(216, 256, 2), 1000])
@pytest.mark.parametrize(("provider", "body"), FORMATS, ids=["chat", "responses"])
def test_nesting_is_passed_on_or_refused(provider: Provider, body: dict[str, Any], levels: int):
    """Guards against a body that can be read and not be written again: it would be a 500, and a call without record."""
    for path in paths(body):
        deep = b'{"text":' * levels + b"1" + b"}" * levels
        raw = orjson.dumps(replaced(body, path, "HERE")).replace(b'"HERE"', deep)
        try:
            request = provider.parse(request_body(raw))
        except BadRequestError:
            continue
        record = {"messages": {"new": request.messages}, "tools": {"new": request.tools}}
        orjson.dumps({"delivery": {"episode": {"trajectory": {"traces": [record]}}}})
