"""vLLM's streams where the bytes come in odd pieces or the server is at fault.

Healthy ones are in tests/e2e/test_vllm_streaming.py.
"""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.chat import Completion, Delta, OnDelta
from polar_gym.engines import EngineError
from polar_gym.engines.http import Http
from polar_gym.engines.vllm import VllmEngine, VllmOptions
from polar_gym.engines.vllm.stream import Events, StreamedAnswer
from polar_gym.schema import Sampling
from tests.support.vllm_stand_in import MODELS, REQUEST, Handler, answer, started

ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2]}
DONE = b"data: [DONE]\n\n"


def chunk(
    ids: list[int] | None, *, finish: str | None = None, logprobs: int | None = None, **delta: Any
) -> dict[str, Any]:
    known = len(ids or []) if logprobs is None else logprobs
    entries = [{"token": "a", "logprob": -0.5}] * known
    choice = {"delta": delta, "token_ids": ids, "logprobs": {"content": entries}, "finish_reason": finish}
    return {"choices": [choice]}


def call(index: int, arguments: str, **named: str) -> dict[str, Any]:
    return {"index": index, **({"id": f"id-{index}"} if named else {}), "function": {**named, "arguments": arguments}}


def events(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(each) + b"\n\n" for each in chunks)


def streaming(*chunks: dict[str, Any], end: bytes = DONE) -> Handler:
    """A server that answers probes as it should, and streams with these chunks."""
    body = events(*chunks) + end

    def handle(request: dict[str, Any]) -> web.Response:
        return web.Response(body=body, content_type="text/event-stream") if request["stream"] else answer([5], 1)

    return handle


async def test_chunks_become_deltas_and_an_answer() -> None:
    chunks = [
        ROLE,
        chunk([5], reasoning_content="hm"),
        chunk([6, 7]),
        chunk([8], content="So: "),
        chunk([9], tool_calls=[call(0, "", name="run"), call(0, '{"a"')]),
        chunk([10, 11], tool_calls=[call(0, ": 1}"), call(1, "{}", name="look")]),
        chunk([12], finish="tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 8}},
    ]
    deltas: list[Delta] = []
    async with started(streaming(*chunks)) as engine:
        completion = await engine.chat(REQUEST, Sampling(), deltas.append)
    assert completion.message == {
        "role": "assistant",
        "content": "So: ",
        "reasoning": "hm",
        "tool_calls": [
            {"id": "id-0", "type": "function", "function": {"name": "run", "arguments": '{"a": 1}'}},
            {"id": "id-1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        ],
    }
    assert completion.finish_reason == "tool_calls"
    assert completion.prompt_ids.tolist() == [1, 2]
    assert completion.response_ids.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert completion.logprobs.tolist() == [-0.5] * 8
    assert completion.engine_tokens == deltas[-1].engine_tokens == 8
    assert [delta.prompt_ids is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)


async def test_calls_keep_their_order_where_the_server_skips_an_index() -> None:
    """Guards against an IndexError: vLLM counts calls of which it tells no name, or nothing at all."""
    chunks = [
        ROLE,
        chunk([5], tool_calls=[call(0, "lost")]),
        chunk([6], tool_calls=[call(2, "", name="run")]),
        chunk([7], tool_calls=[call(2, "{}"), call(5, "{}", name="look")]),
        chunk([8], finish="tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 4}},
    ]
    deltas: list[Delta] = []
    async with started(streaming(*chunks)) as engine:
        completion = await engine.chat(REQUEST, Sampling(), deltas.append)
    calls = [each["function"] for each in completion.message["tool_calls"]]
    assert calls == [{"name": "run", "arguments": "{}"}, {"name": "look", "arguments": "{}"}]
    assert {fragment["index"] for delta in deltas for fragment in delta.tool_calls} == {0, 1}
    assert completion.response_ids.tolist() == [5, 6, 7, 8]


async def test_text_after_a_call_waits_for_the_calls_end() -> None:
    """Guards against a call that the harness got twice, the first time with half of its arguments: vLLM tells text
    between two calls while the second one is open."""
    chunks = [
        ROLE,
        chunk([5], content="a"),
        chunk([6], tool_calls=[call(0, '{"x"', name="run")]),
        chunk([7], content="b"),
        chunk([8], tool_calls=[call(0, ": 1}"), call(1, "{}", name="look")]),
        chunk([9], content="c", finish="tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 5}},
    ]
    deltas: list[Delta] = []
    async with started(streaming(*chunks)) as engine:
        completion = await engine.chat(REQUEST, Sampling(), deltas.append)
    told = [(each.content, [fragment["index"] for fragment in each.tool_calls]) for each in deltas]
    kinds = [kind for content, calls in told for kind in (*([content] if content else []), *calls)]
    assert [kind for kind, _ in groupby(kinds)] == ["a", 0, "b", 1, "c"]
    assert completion.message["content"] == "abc"
    assert [each["function"]["arguments"] for each in completion.message["tool_calls"]] == ['{"x": 1}', "{}"]
    assert completion.response_ids.tolist() == [5, 6, 7, 8, 9]


FAULTS: dict[str, tuple[Handler, str, int]] = {
    "an error event": (
        streaming(ROLE, chunk([5], content="a"), {"error": {"message": "engine died"}}),
        "broke off its answer: engine died",
        1,
    ),
    "a clean end without an end": (streaming(ROLE, chunk([5], content="a"), end=b""), "ended after 1 tokens", 1),
    "no finish reason": (streaming(ROLE, chunk([5], content="a")), "ended after 1 tokens", 1),
    "not JSON": (streaming(ROLE, end=b"data: {oh\n\n"), "not JSON", 0),
    "no prompt ids": (streaming({"choices": ROLE["choices"]}), "without token ids", 0),
    "no ids": (streaming(ROLE, chunk(None, content="a")), "without token ids", 0),
    "a gap": (
        streaming(
            ROLE,
            chunk([9], tool_calls=[call(0, "{}", name="run")]),
            chunk([10], finish="tool_calls"),
            {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 8}},
        ),
        "sampled 8 tokens and answered with 2 ids",
        2,
    ),
    "no logprobs": (streaming(ROLE, chunk([5, 6], logprobs=1, content="a")), "2 ids but 1 logprobs", 0),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_broken_stream_is_an_error_and_not_tried_again(fault: str) -> None:
    handler, words, received = FAULTS[fault]
    deltas: list[Delta] = []
    async with started(handler) as engine:
        with pytest.raises(EngineError, match=words) as failure:
            await engine.chat(REQUEST, Sampling(), deltas.append)
    assert failure.value.status == 502
    assert sum(len(delta.response_ids) for delta in deltas) == received
    assert not deltas or deltas[0].prompt_ids is not None


async def cut_off(sent: bytes, on_delta: OnDelta | None) -> Completion:
    """Asks a server that resets the first connection after the headers and `sent`. A failure says how often it was
    asked."""
    tries = 0

    async def models(request: web.Request) -> web.Response:
        return web.json_response(MODELS)

    async def chat(request: web.Request) -> web.StreamResponse:
        nonlocal tries
        body = await request.json()
        if "top_logprobs" in body:
            return answer([5], 1)
        tries += 1
        if tries > 1:
            whole = web.Response(body=events(ROLE, chunk([5], finish="stop", content="a")) + DONE)
            return whole if body["stream"] else answer([5], 1)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(sent)
        assert request.transport is not None
        request.transport.abort()
        return response

    application = web.Application()
    application.router.add_get("/v1/models", models)
    application.router.add_post("/v1/chat/completions", chat)
    async with TestServer(application) as server:
        engine = VllmEngine(VllmOptions(url=str(server.make_url("/"))))
        await engine.start()
        try:
            return await engine.chat(REQUEST, Sampling(), on_delta)
        except EngineError as error:
            error.add_note(f"tries: {tries}")
            raise
        finally:
            await engine.close()


async def test_a_connection_cut_in_the_middle_is_an_error_and_not_tried_again() -> None:
    """Guards against a second try whose tokens would come after the first one's."""
    deltas: list[Delta] = []
    with pytest.raises(EngineError, match="broke off its answer") as failure:
        await cut_off(events(ROLE, chunk([5], content="a")), deltas.append)
    assert (failure.value.status, failure.value.__notes__) == (502, ["tries: 1"])
    assert [each for delta in deltas for each in delta.response_ids] == [5]


@pytest.mark.parametrize("streams", [True, False])
async def test_a_connection_cut_before_the_first_token_is_tried_again(streams: bool) -> None:
    """Guards against a session that fails because vLLM, which sends its status line at once, was restarted while a
    request was waiting there."""
    deltas: list[Delta] = []
    sent = b": waiting\n\n" if streams else b'{"choices": ['
    completion = await cut_off(sent, deltas.append if streams else None)
    assert completion.response_ids.tolist() == [5]
    assert sum(len(delta.response_ids) for delta in deltas) == (1 if streams else 0)


SAYINGS = st.one_of(
    st.fixed_dictionaries({"content": st.text(max_size=3)}),
    st.fixed_dictionaries({"reasoning": st.text(max_size=3)}),
    st.builds(lambda arguments: {"tool_calls": [call(0, arguments, name="run")]}, st.text(max_size=3)),
)


@given(said=st.lists(SAYINGS, min_size=1, max_size=12), cuts=st.lists(st.integers(1, 12), max_size=6))
def test_events_that_come_together_say_what_they_say_alone(said: list[dict[str, Any]], cuts: list[int]) -> None:
    """Additions that come together are told at once: no id is lost, and no text leaves before earlier text. Text after
    a call waits for the call's end."""
    chunks = [ROLE, *(chunk([10 + place], **delta) for place, delta in enumerate(said))]
    data = [*map(orjson.dumps, chunks), b"[DONE]"]
    deltas: list[Delta] = []
    answer = StreamedAnswer(Http("vLLM", "http://engine", None, 0.0), deltas.append, None)
    marks = sorted(min(mark, len(data)) for mark in cuts)
    for start, end in zip([0, *marks], [*marks, len(data)], strict=True):
        answer.take(data[start:end])
    assert [each for delta in deltas for each in delta.response_ids] == [10 + place for place in range(len(said))]
    assert sum(len(delta.logprobs) for delta in deltas) == len(said)
    first_call = next((place for place, delta in enumerate(said) if "tool_calls" in delta), len(said))
    calls = [delta for delta in said[first_call:] if "tool_calls" in delta]
    late: dict[str, Any] = {
        kind: "".join(delta.get(kind, "") for delta in said[first_call:]) for kind in ("reasoning", "content")
    }
    assert _in_order(deltas) == _in_order([Delta(**delta) for delta in (*said[:first_call], *calls)] + [Delta(**late)])


def _in_order(deltas: list[Delta]) -> list[tuple[str, str]]:
    """Return the text of each kind as it leaves, the pieces of one kind that follow each other put together."""
    pieces = []
    for delta in deltas:
        arguments = "".join(each["function"]["arguments"] for each in delta.tool_calls)
        pieces += [("reasoning", delta.reasoning), ("content", delta.content), ("arguments", arguments)]
    kinds = groupby((piece for piece in pieces if piece[1]), key=lambda piece: piece[0])
    return [(kind, "".join(text for _, text in group)) for kind, group in kinds]


@given(cuts=st.lists(st.integers(0, 400), max_size=8), ending=st.sampled_from([b"\n", b"\r\n"]))
def test_events_survive_any_cut(cuts: list[int], ending: bytes) -> None:
    events = [b'{"a": 1}', "é🦊".encode(), b"x" * 300, b"[DONE]"]
    stream = ending.join(line for event in events for line in (b": comment", b"event: e", b"data: " + event, b"", b""))
    marks = sorted(min(mark, len(stream)) for mark in cuts)

    async def read() -> list[bytes]:
        content = aiohttp.StreamReader(BaseProtocol(asyncio.get_running_loop()), limit=2**16)
        reader, found = Events(content), []
        for start, end in zip([0, *marks], [*marks, len(stream)], strict=True):
            content.feed_data(stream[start:end])
            if start < end:
                found += await reader.read() or []
        content.feed_eof()
        assert await reader.read() is None
        return found

    assert asyncio.run(read()) == events
