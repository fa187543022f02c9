"""What holds for every answer, every conversation and every body."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.chat import Delta, ids
from polar_gym.chat.messages import canonical_json
from polar_gym.harnesses.claude_code import HARNESS as CLAUDE_CODE
from polar_gym.providers import BadRequestError, whole_answer
from polar_gym.providers.anthropic import PROVIDER
from polar_gym.providers.anthropic.output import MessageStream
from polar_gym.schema import Message
from tests.support.anything import answers, any_json, paths, replaced
from tests.unit.providers.anthropic_requests import GO, PNG, RUN, parse, result, said, text, tool_use, user
from tests.wire.stand_in import completion, tool_call

# There and back -------------------------------------------------------------------------------------------------------

_any_text = st.text(max_size=40) | st.text(' \n\r\t"\\\u2028é🦊', max_size=8)
"""Blanks at the ends, quotes and line breaks are where translations go wrong, and rare in random text."""
_texts = _any_text.filter(bool)


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False


_objects = st.dictionaries(_any_text, _any_text | st.integers(-9, 9) | st.none() | st.lists(_any_text, max_size=2))
_arguments = st.builds(canonical_json, _objects) | _texts.filter(lambda arguments: not _is_object(arguments))
_answers = answers(st.none() | _texts, st.builds(tool_call, st.just("run"), _arguments))


def _with_minted_ids(message: Message, call_id: str) -> Message:
    calls = [{**call, "id": ids.tool_call(call_id, n)} for n, call in enumerate(message.get("tool_calls", []))]
    return {**message, **({"tool_calls": calls} if calls else {})}


def _events(stream: bytes) -> Iterator[dict[str, Any]]:
    for event in stream.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        parsed = orjson.loads(data.removeprefix(b"data: "))
        assert name == f"event: {parsed['type']}".encode()
        yield parsed


_GROWS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("input", "partial_json"),
}


def _reassembled(stream: bytes) -> dict[str, Any]:
    """The message as Claude Code has it: a block counts when it has stopped, and arguments are parsed as they are."""
    first, *events = _events(stream)
    message, blocks = first["message"], []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            assert event["index"] == len(blocks) - 1
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = ""
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            name, key = _GROWS[event["delta"]["type"]]
            blocks[-1][name] += event["delta"][key]
        elif event["type"] == "content_block_stop":
            assert event["index"] == len(blocks) - 1
            message["content"].append(blocks[-1])
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    assert events[-1]["type"] == "message_stop"
    assert len(blocks) == len(message["content"])
    for block in message["content"]:
        if block["type"] == "tool_use":
            raw = block["input"]
            unparsed = {"__unparsedToolInput": {"raw": raw, "len": len(raw.encode("utf-16-le")) // 2}}
            block["input"] = orjson.loads(raw) if _is_object(raw) else unparsed
    return message


@given(message=_answers)
def test_an_answer_comes_back_as_it_was_given(message: Message):
    request = parse(GO, tools=[RUN])
    answer = completion(message)
    whole = PROVIDER.render(request, answer, "x1")
    assert _reassembled(whole_answer(MessageStream(request, "x1"), answer)) == whole
    history = orjson.loads(orjson.dumps([GO, {"role": "assistant", "content": whole["content"]}, GO]))
    assert parse(*history).messages == [GO, _with_minted_ids(message, "x1"), GO]


@given(message=_answers, data=st.data())
def test_a_stream_says_the_same_however_it_is_cut(message: Message, data: st.DataObject):
    def pieces(whole: str | None) -> list[str]:
        cut = data.draw(st.integers(0, len(whole or "")))
        return [piece for piece in ((whole or "")[:cut], (whole or "")[cut:]) if piece]

    deltas = [Delta(reasoning=piece) for piece in pieces(message.get("reasoning"))]
    deltas += [Delta(content=piece) for piece in pieces(message["content"])]
    for index, call in enumerate(message.get("tool_calls", [])):
        opening = {"index": index, "id": "engine-own", "function": {"name": call["function"]["name"]}}
        deltas.append(Delta(tool_calls=[opening]))
        deltas += [
            Delta(tool_calls=[{"index": index, "function": {"arguments": piece}}])
            for piece in pieces(call["function"]["arguments"])
        ]
    request, answer = parse(GO), completion(message)
    stream = MessageStream(request, "x1")
    sent = stream.begin(7) + b"".join(stream.feed(delta) for delta in deltas) + stream.end(answer)
    assert _reassembled(sent) == PROVIDER.render(request, answer, "x1")


def _to_wire(messages: list[Message]) -> list[dict[str, Any]]:
    """Chat messages as a client of this API would write them."""
    return [_WRITERS[message["role"]](message) for message in messages]


def _block(part: dict[str, Any]) -> dict[str, Any]:
    return part if part["type"] == "text" else {"type": "image", "source": {"type": "url", **part["image_url"]}}


def _content(content: Any) -> Any:
    return content if isinstance(content, str) else [_block(part) for part in content]


_WRITERS: dict[str, Any] = {
    "system": lambda message: message,
    "user": lambda message: {"role": "user", "content": _content(message["content"])},
    "assistant": lambda message: {
        "role": "assistant",
        "content": PROVIDER.render(parse(GO), completion(message), "x1")["content"],
    },
    "tool": lambda message: user(result(message["tool_call_id"], _content(message["content"]))),
}
_images = st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, _texts)
_parts = st.lists(st.builds(text, _any_text) | _images, min_size=2, max_size=3) | st.lists(
    _images, min_size=1, max_size=1
)
_contents = _any_text | _parts
_conversations = st.lists(
    st.builds(lambda content: {"role": "user", "content": content}, _contents)
    | st.builds(lambda message: _with_minted_ids(message, "x1"), _answers)
    | st.builds(lambda id_, content: {"role": "tool", "tool_call_id": id_, "content": content}, _any_text, _contents)
    | st.builds(lambda content: {"role": "system", "content": content}, _any_text),
    max_size=5,
)


@given(system=_texts, messages=_conversations)
def test_a_conversation_comes_back_as_it_was_written(system: str, messages: list[Message]):
    first: Message = {"role": "system", "content": system}
    assert parse(GO, *_to_wire(messages), GO, system=system).messages == [first, GO, *messages, GO]


# Whatever comes in ----------------------------------------------------------------------------------------------------

VALID: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "stream": True,
    "system": [text("s")],
    "stop_sequences": ["a"],
    "tools": [RUN, {"type": "web_search_20250305", "name": "web_search"}],
    "tool_choice": {"type": "tool", "name": "run", "disable_parallel_tool_use": True},
    "mcp_servers": [{"name": "a"}],
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
    "messages": [
        user(
            text("a"), {"type": "image", "source": PNG}, {"type": "document", "source": {"type": "text", "data": "d"}}
        ),
        {"role": "system", "content": "later"},
        said({"type": "thinking", "thinking": "t", "signature": "s"}, text("x"), tool_use("a", command="ls")),
        user(result("a", [text("r")], is_error=True), text("go on")),
    ],
}


def _survives(body: dict[str, Any]) -> None:
    """The body is read or refused, and what is refused can be said in JSON."""
    CLAUDE_CODE.classify({}, body)
    try:
        request = PROVIDER.parse(body)
    except BadRequestError as error:
        orjson.dumps(PROVIDER.error(400, error.code, str(error)))
    else:
        json.dumps(request.messages)


@given(path=st.sampled_from(list(paths(VALID))), value=any_json)
def test_a_malformed_body_is_refused_and_nothing_worse(path: tuple[Any, ...], value: Any):
    _survives(replaced(VALID, path, value))


@pytest.mark.parametrize("path", list(paths(VALID)), ids=str)
def test_deep_nesting_is_refused_and_nothing_worse(path: tuple[Any, ...]):
    """As deep as the JSON parser lets through."""
    for deep in (b"[" * 1000 + b"]" * 1000, b'{"text":' * 1000 + b"1" + b"}" * 1000):
        CLAUDE_CODE.classify({}, replaced(VALID, path, orjson.loads(deep)))
        try:
            PROVIDER.parse(replaced(VALID, path, orjson.loads(deep)))
        except BadRequestError as error:
            orjson.dumps(PROVIDER.error(400, error.code, str(error)))
