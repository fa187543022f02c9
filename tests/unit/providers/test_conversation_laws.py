"""A conversation that is written in a provider's form, as its clients hand it back, is read as what it was."""

from __future__ import annotations

import base64
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.chat import ids
from polar_gym.chat.messages import canonical_json
from polar_gym.providers import google, openai_responses
from polar_gym.schema import Message
from tests.support.anything import answers
from tests.wire.stand_in import completion, tool_call

RESPONSES, GOOGLE = openai_responses.PROVIDER, google.PROVIDER
FUNCTION = {"name": "run", "parameters": {"type": "object"}}
RESPONSES_TOOLS = [
    {"type": "function", **FUNCTION},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "team", "tools": [{"type": "function", "name": "spawn"}]},
]

_any_text = st.text(max_size=20) | st.text(' \n\r\t"\\\u2028é🦊', max_size=8)
_texts = _any_text.filter(bool)
_images = st.binary(max_size=6).map(
    lambda data: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}
)
_parts = st.lists(_any_text.map(lambda text: {"type": "text", "text": text}) | _images, min_size=2, max_size=3)
_contents = _any_text | _parts
_objects = st.dictionaries(_any_text, st.integers(-5, 5) | _any_text | st.none(), max_size=2).map(canonical_json)
_calls = st.builds(tool_call, st.sampled_from(["run", "team__spawn"]), _objects) | st.builds(
    lambda text: tool_call("patch", canonical_json({"input": text})), _any_text
)
_answers = answers(st.none() | _texts, _calls).filter(lambda message: len(message) > 2 or message["content"])
_turns = st.lists(
    st.tuples(_answers, st.lists(_contents, min_size=3, max_size=3), _contents.filter(bool)), min_size=1, max_size=4
)
"""Each: an answer, what its calls gave, and what the user says next."""

Turns = list[tuple[Message, list[Any], Any]]


def _conversation(turns: Turns) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": "go"}]
    for number, (answer, results, says) in enumerate(turns):
        calls = [
            {**call, "id": ids.tool_call(f"c{number}", index)}
            for index, call in enumerate(answer.get("tool_calls", []))
        ]
        messages.append({**answer, **({"tool_calls": calls} if calls else {})})
        for call, content in zip(calls, results, strict=False):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        messages.append({"role": "user", "content": says})
    return messages


def _responses_content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"]}
        for part in content
    ]


@given(turns=_turns)
def test_responses(turns: Turns):
    request = RESPONSES.parse({"model": "m", "input": "go", "tools": RESPONSES_TOOLS})
    items: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for number, (answer, results, says) in enumerate(turns):
        given = RESPONSES.render(request, completion(answer), f"c{number}")["output"]
        items += orjson.loads(orjson.dumps(given))
        calls = [item for item in given if "call_id" in item]
        for call, content in zip(calls, results, strict=False):
            kind = f"{call['type']}_output"
            items.append({"type": kind, "call_id": call["call_id"], "output": _responses_content(content)})
        items.append({"role": "user", "content": _responses_content(says)})
    body = {"model": "m", "input": items, "tools": RESPONSES_TOOLS}
    assert RESPONSES.parse(body).messages == _conversation(turns)


def _google_parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"text": content}]
    return [
        {"text": part["text"]}
        if part["type"] == "text"
        else {"inlineData": {"mimeType": "image/png", "data": part["image_url"]["url"].partition(",")[2]}}
        for part in content
    ]


@given(turns=_turns)
def test_google(turns: Turns):
    """A tool result is a text and then media, in this format."""
    turns = [(answer, [_text_first(each) for each in results], says) for answer, results, says in turns]
    request = GOOGLE.parse({"model": "m", "contents": "go"})
    contents: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": "go"}]}]
    for number, (answer, results, says) in enumerate(turns):
        given = GOOGLE.render(request, completion(answer), f"c{number}")["candidates"][0]["content"]
        contents.append(orjson.loads(orjson.dumps(given)))
        calls = [part["functionCall"] for part in given["parts"] if "functionCall" in part]
        parts = []
        for call, content in zip(calls, results, strict=False):
            text, *media = _google_parts(content)
            result = {"name": call["name"], "id": call["id"], "response": {"output": text["text"]}}
            parts.append({"functionResponse": result | ({"parts": media} if media else {})})
        contents.append({"role": "user", "parts": [*parts, *_google_parts(says)]})
    assert GOOGLE.parse({"model": "m", "contents": contents}).messages == _conversation(turns)


def _text_first(content: Any) -> Any:
    return content if isinstance(content, str) else [{"type": "text", "text": "x"}, *content]
