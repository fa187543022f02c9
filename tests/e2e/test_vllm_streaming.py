"""Real streaming from a real vLLM: the same ids, logprobs and endings as without, and nothing goes on unheard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import aiohttp
import openai
import pytest

from polar_gym.chat import ChatRequest, Delta
from polar_gym.chat.received import Received
from polar_gym.engines import EngineError
from polar_gym.engines.vllm import VllmOptions
from polar_gym.schema import ModelCall, Sampling
from tests.e2e.guided_engine import SEEDED, TWO_CALLS, GuidedEngine, without_ids
from tests.e2e.vllm_server import INSTALL, VllmServer, run_server, vllm_python
from tests.e2e.vllm_work import (
    ENDLESS,
    LONG_MESSAGE,
    EndlessEngine,
    running_requests,
    sampled_tokens,
    slow_engine,
    wait_until,
)
from tests.support.requirements import need
from tests.support.sessions import running_session
from tests.support.tools import ASK, BASH

UNCLOSED = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls}\n</tool_call>'
NAME_LAST = '<tool_call>\n{"arguments": {"command": "ls"}, "name": "bash"}\n</tool_call>'
SURROGATE = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls \\ud83d"}}\n</tool_call>'
NAMELESS = (
    "<tool_call>\n<function=>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
)
"""Two calls in the form of Qwen3-Coder, of which the first has no name."""


@asynccontextmanager
async def started_engine(
    server: VllmServer, path: Literal["auto", "chat", "generate"] = "auto"
) -> AsyncIterator[GuidedEngine]:
    made = GuidedEngine(VllmOptions(url=server.url, path=path))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def engine(vllm_server: VllmServer) -> AsyncIterator[GuidedEngine]:
    async with started_engine(vllm_server) as made:
        yield made


@pytest.mark.parametrize("path", ["chat", "generate"])
@pytest.mark.parametrize(
    ("says", "message"),
    [
        (UNCLOSED, {"content": UNCLOSED}),
        (NAME_LAST, {"content": None, "tool_calls": [{"name": "bash", "arguments": '{"command": "ls"}'}]}),
    ],
    ids=["a call that never ends", "a call's name after its arguments"],
)
async def test_a_broken_call_is_read_again_where_nobody_reads_along(
    vllm_server: VllmServer, path: Literal["chat", "generate"], says: str, message: dict[str, Any]
) -> None:
    """Guards against vLLM's streaming parsers: they tell of a call before they know it."""
    async with started_engine(vllm_server, path) as engine:
        engine.says = says
        answer = await engine.chat(ChatRequest(model="m", messages=ASK, tools=[BASH], max_tokens=300), Sampling(seed=5))
    assert without_ids(answer) == {"role": "assistant", "tool_calls": [], **message}
    assert answer.finish_reason == ("tool_calls" if message.get("tool_calls") else "stop")


@pytest.mark.parametrize("path", ["chat", "generate"])
async def test_a_lone_surrogate_in_a_call_costs_no_token(
    vllm_server: VllmServer, path: Literal["chat", "generate"]
) -> None:
    """Guards against vLLM's 400 for such an answer after it was sampled: the reward went to the tokens before."""
    async with started_engine(vllm_server, path) as engine:
        engine.says = SURROGATE
        answer = await engine.chat(ChatRequest(model="m", messages=ASK, tools=[BASH], max_tokens=300), Sampling(seed=5))
    assert answer.engine_tokens == len(answer.response_ids) > 10
    assert SURROGATE in (answer.message["content"] or SURROGATE)


async def test_a_call_without_a_name_costs_no_token(tmp_path: Path) -> None:
    """Guards against vLLM's newer parsers, which count calls that they do not tell: the answer was in no record."""
    python = vllm_python()
    need(python, "a real vLLM", INSTALL)
    assert python is not None
    with run_server(python, tmp_path, flags=("--tool-call-parser", "qwen3_coder")) as server:
        async with started_engine(server) as engine:
            engine.says = NAMELESS
            request = ChatRequest(model="m", messages=ASK, tools=[BASH], max_tokens=300)
            answer = await engine.chat(request, Sampling(seed=5))
    assert without_ids(answer)["tool_calls"] == [{"name": "bash", "arguments": '{"command": "ls"}'}]
    assert answer.engine_tokens == len(answer.response_ids) > 10


@pytest.mark.parametrize(
    ("says", "fields"),
    [
        (None, {"max_tokens": 40}),
        (None, {"max_tokens": 40, "stop": ["e"]}),
        (None, {"max_tokens": 1}),
        (TWO_CALLS, {"tools": [BASH], "max_tokens": 300}),
        ("Just words.", {"tools": [BASH], "max_tokens": 300}),
        ("Just words.", {"max_tokens": 1_000_000}),
    ],
    ids=["cut off", "stop string", "one token", "two calls", "words beside tools", "more than the room"],
)
async def test_a_streamed_answer_is_the_same_answer(
    engine: GuidedEngine, says: str | None, fields: dict[str, Any]
) -> None:
    engine.says = says
    request, sampling = ChatRequest(model="m", messages=ASK, **fields), Sampling(seed=5)
    whole = await engine.chat(request, sampling)
    deltas: list[Delta] = []
    streamed = await engine.chat(replace(request, stream=True), sampling, deltas.append)
    assert streamed.prompt_ids.tolist() == whole.prompt_ids.tolist()
    assert streamed.response_ids.tolist() == whole.response_ids.tolist()
    assert streamed.logprobs.tolist() == pytest.approx(whole.logprobs.tolist(), abs=1e-4)
    assert streamed.finish_reason == whole.finish_reason
    assert streamed.sampling == whole.sampling
    assert without_ids(streamed) == without_ids(whole)
    received = Received()
    for delta in deltas:
        received.add(delta)
    assert received.message() == streamed.message
    assert received.response_ids == streamed.response_ids.tolist()
    assert [delta.prompt_ids is None for delta in deltas[1:]] == [True] * (len(deltas) - 1)


async def test_a_prompt_too_long_is_refused_before_the_stream(engine: GuidedEngine) -> None:
    deltas: list[Delta] = []
    request = ChatRequest(model="m", messages=[{"role": "user", "content": "hi hi " * 40_000}])
    with pytest.raises(EngineError) as refusal:
        await engine.chat(request, Sampling(), deltas.append)
    assert (refusal.value.status, refusal.value.kind, deltas) == (400, "context_length", [])


async def test_the_record_is_the_same_in_both_modes(vllm_server: VllmServer, tmp_path: Path) -> None:
    records: list[ModelCall] = []
    for streaming in ("synthetic", "real"):
        engine = GuidedEngine(VllmOptions(url=vllm_server.url))
        engine.says = TWO_CALLS
        async with running_session(engine, tmp_path / streaming, SEEDED, streaming=streaming) as (node, capture):
            tool: Any = BASH
            function: Any = {"type": "function", "strict": False, **BASH["function"]}
            async with openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key=capture.key, max_retries=0) as sdk:
                async with sdk.chat.completions.stream(model="m", messages=ASK, tools=[tool]) as stream:
                    answer = await stream.get_final_completion()
                async with sdk.responses.stream(model="m", input="List the files.", tools=[function]) as events:
                    response: Any = await events.get_final_response()
            records += capture.calls
        arguments = ['{"command": "ls é"}', '{"command": "ls -a"}']
        assert [call.function.arguments for call in answer.choices[0].message.tool_calls or []] == arguments
        assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
        assert [item.arguments for item in response.output[1:]] == arguments
    for one, other in zip(records[:2], records[2:], strict=True):
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert one.logprobs.tolist() == pytest.approx(other.logprobs.tolist(), abs=1e-4)
        assert one.finish_reason == other.finish_reason == "tool_calls"
        assert one.outcome == other.outcome == "delivered"


@pytest.mark.parametrize("streaming", ["synthetic", "real"])
async def test_a_harness_that_hangs_up_stops_vllm(
    vllm_server: VllmServer, tmp_path: Path, streaming: Literal["synthetic", "real"]
) -> None:
    """Guards also against a balance that misses what vLLM sampled for the harness by then."""
    url = vllm_server.url
    engine = EndlessEngine(VllmOptions(url=url))
    async with (
        running_session(engine, tmp_path, SEEDED, streaming=streaming) as (node, capture),
        aiohttp.ClientSession() as http,
    ):
        once = ChatRequest(model="policy", messages=[LONG_MESSAGE], max_tokens=1)
        await engine.chat(once, Sampling())  # a slow engine finds the message in its cache
        before = await asyncio.to_thread(sampled_tokens, url)
        headers = {"Authorization": f"Bearer {capture.key}"}
        body = {"model": "m", "messages": [LONG_MESSAGE], "stream": True}
        with slow_engine(url):
            asked = asyncio.create_task(http.post(f"{node.url}/v1/chat/completions", json=body, headers=headers))
            await asyncio.to_thread(wait_until, lambda: sampled_tokens(url) > before + 20)
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # else the headers had come
                (await asked).close()
            await asyncio.to_thread(wait_until, lambda: bool(capture.calls) and running_requests(url) == 0)
        (call,) = capture.calls
    sampled = await asyncio.to_thread(sampled_tokens, url) - before
    assert call.outcome == "abandoned"
    assert len(call.prompt_ids) > 0
    assert call.engine_tokens == len(call.response_ids) == len(call.logprobs) == sampled < ENDLESS
