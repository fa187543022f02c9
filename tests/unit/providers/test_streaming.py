"""However an answer is cut into deltas, a client puts the same answer together: for every wire format there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.chat import Completion, Delta
from polar_gym.chat.received import Received
from polar_gym.providers import PROVIDERS, Provider, whole_answer
from polar_gym.schema import Message
from tests.support.anything import answers
from tests.wire.stand_in import completion, tool_call

Events = list[dict[str, Any]]

RUN = {"name": "run", "parameters": {"type": "object"}}
RESPONSES_TOOLS = [
    {"type": "function", **RUN},
    {"type": "custom", "name": "apply_patch"},
    {"type": "namespace", "name": "team", "tools": [{"type": "function", "name": "spawn"}]},
    {"type": "local_shell"},
]


# What a client does with the events of each format --------------------------------------------------------------------


def chat(events: Events) -> Any:
    said: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for delta in (event["choices"][0]["delta"] for event in events if event["choices"]):
        for key in ("content", "reasoning_content"):
            said[key] += delta.get(key) or ""
        for part in delta.get("tool_calls") or []:
            if "id" in part:
                assert part["index"] == len(said["calls"]), "calls come one after another"
                said["calls"].append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
            said["calls"][part["index"]]["arguments"] += part["function"]["arguments"]
    endings = [event["choices"][0]["finish_reason"] for event in events if event["choices"]]
    assert not any(endings[:-1])
    return said, endings[-1], events[-1].get("usage")


def responses(events: Events) -> Any:
    """The finished items, and a check that whoever reads the deltas of each has read the same."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: list[dict[str, Any]] = []
    said, open_id = "", None
    for event in events:
        if event["type"] == "response.output_item.added":
            assert open_id is None, "one item after another"
            said, open_id = "", event["item"]["id"]
        elif event["type"] == "response.output_item.done":
            item, open_id = event["item"], None
            texts = {
                "reasoning": lambda item: item["summary"][0]["text"],
                "message": lambda item: item["content"][0]["text"],
                "function_call": lambda item: item["arguments"],
                "custom_tool_call": lambda item: item["input"],
                "local_shell_call": lambda item: "",
            }
            assert said == texts[item["type"]](item)
            assert event["output_index"] == len(items)
            items.append(item)
        elif "item_id" in event:
            assert event["item_id"] == open_id
            said += event.get("delta", "")
    last = events[-1]["response"]
    assert last["output"] == items
    return {**last, "created_at": 0}


def anthropic(events: Events) -> Any:
    blocks: list[dict[str, Any]] = []
    ending = None
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta, block = event["delta"], blocks[-1]
            for theirs, ours in (("text",) * 2, ("thinking",) * 2, ("signature",) * 2, ("partial_json", "json")):
                if theirs in delta:
                    block[ours] += delta[theirs]
        elif event["type"] == "message_delta":
            ending = (event["delta"], event["usage"])
    assert events[-1]["type"] == "message_stop"
    return blocks, ending


def google(events: Events) -> Any:
    parts: list[dict[str, Any]] = []
    for part in (part for event in events for part in event["candidates"][0].get("content", {}).get("parts", [])):
        if parts and "text" in part and "text" in parts[-1] and part.get("thought") == parts[-1].get("thought"):
            parts[-1] = {**parts[-1], **part, "text": parts[-1]["text"] + part["text"]}
        else:
            parts.append(part)
    return parts, events[-1]["candidates"][0].get("finishReason"), events[-1].get("usageMetadata")


@dataclass(frozen=True)
class Format:
    body: dict[str, Any]
    """A request for a stream, with tools."""
    put_together: Callable[[Events], Any]


FORMATS = {
    "openai_chat": Format(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "go"}],
            "tools": [{"type": "function", "function": RUN}],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        chat,
    ),
    "openai_responses": Format({"model": "m", "input": "go", "tools": RESPONSES_TOOLS, "stream": True}, responses),
    "anthropic": Format(
        {
            "model": "m",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "go"}],
            "tools": [{"name": "run", "input_schema": {"type": "object"}}],
            "stream": True,
        },
        anthropic,
    ),
    "google": Format(
        {
            "model": "m",
            "contents": [{"role": "user", "parts": [{"text": "go"}]}],
            "tools": [{"functionDeclarations": [RUN]}],
        },
        google,
    ),
}


def events_of(stream: bytes) -> Events:
    blocks = [block for block in stream.split(b"\n\n") if block.strip()]
    data = [line for block in blocks for line in block.split(b"\n") if line.startswith(b"data: ")]
    return [orjson.loads(line[6:]) for line in data if line != b"data: [DONE]"]


# Cutting an answer into deltas ----------------------------------------------------------------------------------------

TEXTS = st.text(max_size=30) | st.text(' \n"\\{}é🦊', max_size=8)
NAMES = ["run", "team__spawn", "apply_patch", "local_shell", "unknown"]
ARGUMENTS = TEXTS | st.sampled_from(
    ['{"input": "a b\\nc"}', '{"command": ["ls", "-l"]}', '{"x": {"y": [1, 2.50]}}', "{}"]
)
MESSAGES = answers(TEXTS, st.builds(tool_call, st.sampled_from(NAMES), ARGUMENTS))


@st.composite
def cut(draw: st.DrawFn, message: Message) -> list[Delta]:
    """Some deltas that make up the message: any text in pieces, some pieces told together, some deltas empty."""
    atoms = [Delta(reasoning=piece) for piece in draw(pieces(message.get("reasoning") or ""))]
    atoms += [Delta(content=piece) for piece in draw(pieces(message.get("content") or ""))]
    for index, call in enumerate(message.get("tool_calls") or []):
        function, opening = call["function"], {**call, "index": index}
        atoms.append(Delta(tool_calls=[{**opening, "function": {"name": function["name"], "arguments": ""}}]))
        for piece in draw(pieces(function["arguments"])):
            atoms.append(Delta(tool_calls=[{"index": index, "function": {"arguments": piece}}]))
    deltas: list[Delta] = []
    for atom in atoms:
        if deltas and draw(st.booleans()):
            said = deltas[-1]
            deltas[-1] = Delta(
                reasoning=said.reasoning + atom.reasoning,
                content=said.content + atom.content,
                tool_calls=said.tool_calls + atom.tool_calls,
            )
        else:
            deltas += [atom, *draw(st.sampled_from([[], [Delta()]]))]
    return deltas


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    marks = sorted(draw(st.sets(st.integers(0, len(text)), max_size=4)))
    return [text[start:end] for start, end in zip([0, *marks], [*marks, len(text)], strict=True)]


def in_pieces(provider: Provider, answer: Completion, deltas: list[Delta]) -> bytes:
    stream = provider.stream(provider.parse(FORMATS[provider.name].body), "x1")
    begun = stream.begin(len(answer.prompt_ids))
    return begun + b"".join(stream.feed(delta) for delta in deltas) + stream.end(answer)


@pytest.mark.parametrize("name", PROVIDERS.names())
@given(data=st.data())
def test_an_answer_in_pieces_is_the_same_answer(name: str, data: st.DataObject) -> None:
    assert name in FORMATS, f"say here what a client of {name} does with a stream"
    provider = PROVIDERS.get(name)
    message = data.draw(MESSAGES)
    answer = completion(message, data.draw(st.sampled_from([None, "length"])))
    whole = whole_answer(provider.stream(provider.parse(FORMATS[name].body), "x1"), answer)
    stream = in_pieces(provider, answer, data.draw(cut(message)))
    put_together = FORMATS[name].put_together
    assert put_together(events_of(stream)) == put_together(events_of(whole))


@pytest.mark.parametrize("name", PROVIDERS.names())
def test_text_is_not_held_back(name: str) -> None:
    """Guards against a stream that is real in name only."""
    provider = PROVIDERS.get(name)
    stream = provider.stream(provider.parse(FORMATS[name].body), "x1")
    stream.begin(3)
    for word in ("one", "two"):
        assert word.encode() in stream.feed(Delta(reasoning=word))
    for word in ("three", "four"):
        assert word.encode() in stream.feed(Delta(content=word))


@pytest.mark.parametrize("name", PROVIDERS.names())
def test_an_event_is_one_line_also_for_clients_that_know_other_line_breaks(name: str) -> None:
    """Guards against raw U+2028, U+2029 and U+0085 in an event: httpx's `aiter_lines` cuts the event there, and the
    client's JSON parser fails."""
    provider, said = PROVIDERS.get(name), "a\u2028b\u2029c\u0085d"
    answer = completion({"role": "assistant", "content": said, "tool_calls": [tool_call("run", f'{{"x": "{said}"}}')]})
    stream = whole_answer(provider.stream(provider.parse(FORMATS[name].body), "x1"), answer)
    assert stream.decode().splitlines() == stream.decode().removesuffix("\n").split("\n")
    assert said in orjson.dumps(FORMATS[name].put_together(events_of(stream))).decode()


@given(data=st.data())
def test_what_was_received_is_what_was_said(data: st.DataObject) -> None:
    message = data.draw(MESSAGES)
    received = Received()
    for number, delta in enumerate(data.draw(cut(message))):
        received.add(replace(delta, response_ids=[number, number], logprobs=[-1.0, -2.0]))
    assert received.message() == {**message, "content": message["content"] or (None if "tool_calls" in message else "")}
    assert len(received.response_ids) == len(received.logprobs)
