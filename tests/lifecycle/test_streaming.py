"""Real streaming: the harness reads along, and the record is what it is without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from polar_gym.builders import build_trajectory
from polar_gym.chat import ChatRequest, Completion, Delta, OnDelta
from polar_gym.engines import EngineError
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.proxy import proxy, sending
from polar_gym.gateway.proxy.capture import SessionCapture
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.schema import HarnessSpec, ModelCall, Sampling
from tests.support.sessions import REQUEST, running_session
from tests.support.tools import ASK, BASH

FINAL = "All the files are listed: é 🦊, and that is the whole of it."
SCRIPT = Script(commands=["ls -a 'é 🦊'"], final_message=FINAL)
OPENCODE = REQUEST.model_copy(update={"agent": HarnessSpec(name="opencode")})


class HesitantEngine(EmbeddedEngine):
    """Says half of its answer, or nothing yet, and then waits to be told to go on, or to fail."""

    def __init__(self, half: bool = True) -> None:
        super().__init__(EmbeddedOptions(scripts=[SCRIPT]))
        self.half = half
        self.go_on = asyncio.Event()
        self.failure: EngineError | None = None
        self.stopped = asyncio.Event()
        self.said: list[Delta] = []
        self.completion: Completion | None = None

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        deltas: list[Delta] = []
        self.completion = await super().chat(request, sampling, deltas.append)
        self.said = deltas[: len(deltas) // 2 if self.half else 0]
        for delta in self.said if on_delta else ():
            on_delta(delta)  # type: ignore[misc]
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.stopped.set()
            raise
        if self.failure is not None:
            raise self.failure
        for delta in deltas[len(self.said) :] if on_delta else ():
            on_delta(delta)  # type: ignore[misc]
        return self.completion


@asynccontextmanager
async def asked(node: Node, capture: SessionCapture) -> AsyncIterator[aiohttp.ClientResponse]:
    """A request for a stream, and whatever has come of its answer."""
    headers = {"Authorization": f"Bearer {capture.key}"}
    body = {"model": "policy", "messages": ASK, "stream": True}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{node.url}/v1/chat/completions", json=body, headers=headers) as response,
    ):
        yield response


def client(node: Node, capture: SessionCapture) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key=capture.key, max_retries=0)


async def one_call(capture: SessionCapture) -> ModelCall:
    """The call, once it is recorded: a server notices a closed socket in its own time."""
    async with asyncio.timeout(60):
        while not capture.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (call,) = capture.calls
    (written,) = read_journal(capture.journal.path)
    assert (written.outcome, written.response_ids.tolist()) == (call.outcome, call.response_ids.tolist())
    return call


def record(call: ModelCall) -> dict[str, Any]:
    """What must not depend on how the answer was sent. Tool-call ids are made anew for every answer."""
    kept = {"messages", "tools", "response", "sampling", "prompt_ids", "response_ids", "logprobs", "finish_reason"}
    fields = call.model_dump(mode="json", include=kept | {"outcome", "error"})
    for made in fields["response"].get("tool_calls", []):
        del made["id"]
    return fields


@pytest.mark.parametrize("tools", [[BASH], []], ids=["a tool call", "text"])
async def test_the_record_is_the_same_however_the_answer_is_sent(tmp_path: Path, tools: Any) -> None:
    records = []
    ways: list[tuple[proxy.Streaming, bool]] = [("synthetic", False), ("synthetic", True), ("real", True)]
    for streaming, stream in ways:
        engine = EmbeddedEngine(EmbeddedOptions(scripts=[SCRIPT]))
        async with running_session(engine, tmp_path / streaming, OPENCODE, streaming=streaming) as (node, capture):
            answer: Any = await client(node, capture).chat.completions.create(
                model="policy", messages=ASK, tools=tools, stream=stream
            )
            if stream:
                chunks = [chunk async for chunk in answer]
                assert len(chunks) > (5 if streaming == "real" and not tools else 2)
            records.append(record(capture.calls[0]))
    assert records[0] == records[1] == records[2]
    assert records[0]["response_ids"]


async def test_the_sdks_helpers_read_along(tmp_path: Path) -> None:
    engine = EmbeddedEngine(EmbeddedOptions(scripts=[SCRIPT]))
    async with running_session(engine, tmp_path, OPENCODE, streaming="real") as (node, capture):
        sdk = client(node, capture)
        async with sdk.chat.completions.stream(model="policy", messages=ASK, tools=[BASH]) as stream:
            said = await stream.get_final_completion()
        calls = said.choices[0].message.tool_calls
        assert calls is not None
        assert [json.loads(call.function.arguments) for call in calls] == [{"command": "ls -a 'é 🦊'"}]
        assert said.choices[0].finish_reason == "tool_calls"

        async with sdk.chat.completions.stream(model="policy", messages=ASK) as stream:
            deltas = [event.delta async for event in stream if event.type == "content.delta"]
        assert "".join(deltas) == FINAL
        assert len(deltas) > 3

        function: Any = {"type": "function", **BASH["function"], "strict": False}
        async with sdk.responses.stream(model="policy", input="List the files.", tools=[function]) as events:
            response: Any = await events.get_final_response()
        (item,) = response.output
        assert (item.type, json.loads(item.arguments)) == ("function_call", {"command": "ls -a 'é 🦊'"})

        async with sdk.responses.stream(model="policy", input="List the files.") as events:
            texts = [event.delta async for event in events if event.type == "response.output_text.delta"]
            response = await events.get_final_response()
        assert response.output_text == "".join(texts) == FINAL
        assert len(texts) > 3
        assert response.usage.output_tokens == len(capture.calls[-1].response_ids)
    assert [call.outcome for call in capture.calls] == ["delivered"] * 4


async def test_the_call_is_in_the_journal_as_far_as_it_left(tmp_path: Path) -> None:
    """Guards against a gateway that is killed in the middle of an answer and knows nothing of its tokens afterwards."""
    engine = HesitantEngine()
    async with (
        running_session(engine, tmp_path, OPENCODE, streaming="real") as (node, capture),
        asked(node, capture) as response,
    ):
        said = b""
        while b"All the" not in said:
            said += await response.content.readany()
        (half,) = read_journal(capture.journal.path)
        received = [token for delta in engine.said for token in delta.response_ids]
        assert (half.outcome, half.error) == ("failed", "the gateway process died while the engine answered")
        assert half.response_ids.tolist() == received
        assert len(half.logprobs) == len(received) > 0
        engine.go_on.set()
        while b'finish_reason":"stop' not in said:
            chunk = await response.content.readany()
            assert chunk, "the stream ended before the answer did"
            said += chunk
        (call,) = read_journal(capture.journal.path)
        assert (call.outcome, call.error) == ("delivered", None)
        assert engine.completion is not None
        assert call.response_ids.tolist() == engine.completion.response_ids.tolist()
        assert call.to_json() == capture.calls[0].to_json()


async def test_a_harness_that_hangs_up_stops_the_engine_and_leaves_what_was_received(tmp_path: Path) -> None:
    engine = HesitantEngine()
    async with running_session(engine, tmp_path, OPENCODE, streaming="real") as (node, capture):
        async with asked(node, capture) as response:
            await response.content.readany()
        async with asyncio.timeout(60):
            await engine.stopped.wait()
        call = await one_call(capture)
    assert engine.completion is not None
    received = [token for delta in engine.said for token in delta.response_ids]
    assert call.outcome == "abandoned"
    assert call.prompt_ids.tolist() == engine.completion.prompt_ids.tolist()
    assert call.response_ids.tolist() == received == engine.completion.response_ids.tolist()[: len(received)]
    assert 0 < len(received) < len(engine.completion.response_ids)
    assert call.finish_reason is None
    assert call.response is not None
    assert FINAL.startswith(call.response["content"])
    assert build_trajectory([call], REQUEST.builder).fidelity.excluded == {"abandoned": len(received)}


async def test_an_error_in_the_middle_is_an_event_and_a_failed_call(tmp_path: Path) -> None:
    engine = HesitantEngine()
    engine.failure = EngineError(502, "the engine fell over", kind="server")
    async with running_session(engine, tmp_path, OPENCODE, streaming="real") as (node, capture):
        stream = await client(node, capture).chat.completions.create(model="policy", messages=ASK, stream=True)
        while not (await anext(stream)).choices[0].delta.content:
            pass
        engine.go_on.set()
        with pytest.raises(openai.APIError, match="the engine fell over"):
            [chunk async for chunk in stream]
        call = await one_call(capture)
    assert (call.outcome, call.error) == ("failed", "the engine fell over")
    assert call.response_ids.tolist() == [token for delta in engine.said for token in delta.response_ids]
    assert build_trajectory([call], REQUEST.builder).fidelity.excluded == {"failed": len(call.response_ids)}


async def test_a_harness_that_an_error_event_would_stop_gets_none_where_asking_again_may_help(tmp_path: Path) -> None:
    for kind, told in (("overloaded", False), ("invalid_request", True)):
        engine = HesitantEngine()
        engine.failure = EngineError(503 if kind == "overloaded" else 400, "the engine fell over", kind=kind)
        engine.go_on.set()
        async with running_session(engine, tmp_path / kind, streaming="real") as (node, capture):
            async with asked(node, capture) as response:
                said = await response.text()
            assert (await one_call(capture)).outcome == "failed"
        assert "All the" in said
        assert ("the engine fell over" in said) == told
        assert "[DONE]" not in said


async def test_an_error_before_the_first_word_has_its_status(tmp_path: Path) -> None:
    engine = HesitantEngine(half=False)
    engine.failure = EngineError(503, "busy", kind="overloaded")
    engine.go_on.set()
    async with running_session(engine, tmp_path, OPENCODE, streaming="real") as (node, capture):
        with pytest.raises(openai.InternalServerError) as caught:
            await client(node, capture).chat.completions.create(model="policy", messages=ASK, stream=True)
        assert caught.value.status_code == 503
        call = await one_call(capture)
    assert (call.outcome, len(call.prompt_ids), call.response) == ("failed", 0, None)


@pytest.mark.parametrize("streaming", ["synthetic", "real"])
async def test_a_silent_engine_is_covered_by_keep_alives(
    tmp_path: Path, streaming: proxy.Streaming, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against clients that give up on silent headers, or on a stream that falls silent."""
    monkeypatch.setattr(sending, "HOLD_SECONDS", 0.1)
    monkeypatch.setattr(sending, "KEEP_ALIVE_SECONDS", 0.02)
    engine = HesitantEngine(half=False)
    async with (
        running_session(engine, tmp_path, OPENCODE, streaming=streaming) as (node, capture),
        asked(node, capture) as response,
    ):
        assert response.status == 200, "before the engine has said anything"
        said = b""
        while said.count(b": keep-alive\n\n") < 3:
            said += await response.content.readany()
        engine.go_on.set()
        said += await response.content.read()
    assert said.startswith(b": keep-alive\n\n")
    assert said.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("harness", "path", "body", "keep_alive"),
    [
        ("codex", "/v1/responses", {"input": "go"}, b'event: keepalive\ndata: {"type":"keepalive"}\n\n'),
        ("claude_code", "/v1/messages", {"max_tokens": 99, "messages": ASK}, b'event: ping\ndata: {"type":"ping"}\n\n'),
        (
            "gemini_cli",
            "/v1beta/models/m:streamGenerateContent?alt=sse",
            {"contents": [{"parts": [{"text": "go"}]}]},
            b"\n\n",
        ),
        ("qwen_code", "/v1/chat/completions", {"messages": ASK}, b": keep-alive\n\n"),
    ],
)
async def test_each_client_is_kept_waiting_by_what_it_tolerates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harness: str, path: str, body: Any, keep_alive: bytes
) -> None:
    """Guards against comments, which Gemini CLI takes for a broken stream and Codex does not hear."""
    monkeypatch.setattr(sending, "HOLD_SECONDS", 0.1)
    monkeypatch.setattr(sending, "KEEP_ALIVE_SECONDS", 0.02)
    engine = HesitantEngine(half=False)
    request = REQUEST.model_copy(update={"agent": HarnessSpec(name=harness)})
    async with (
        running_session(engine, tmp_path, request) as (node, capture),
        aiohttp.ClientSession(headers={"x-api-key": capture.key, "Authorization": f"Bearer {capture.key}"}) as http,
        http.post(f"{node.url}{path}", json={"model": "m", "stream": True} | body) as response,
    ):
        assert response.status == 200
        said = b""
        while len(said) < 3 * len(keep_alive):
            said += await response.content.readany()
        engine.go_on.set()
        said += await response.content.read()
        while said.startswith(keep_alive):
            said = said.removeprefix(keep_alive)
        assert b"All the files" in said
        assert said.startswith((b"data:", b"event:")), "nothing else was sent meanwhile"
