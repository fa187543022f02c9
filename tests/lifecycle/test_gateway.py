"""The gateway's promises to a harness and to the trainer, with the official `openai` SDK as the client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from polar_gym.chat import ChatRequest
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.proxy.capture import SessionCapture
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.schema import Budget, HarnessSpec, RuntimeSpec, TaskRequest
from tests.support.sessions import REQUEST, listing_engine, running_session
from tests.support.tools import ASK, BASH

OTHER = TaskRequest(
    task_id="other", instruction="x", runtime=RuntimeSpec(name="bubblewrap"), agent=HarnessSpec(name="pi")
)


def client(node: Node, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key=key, max_retries=0)


def limited(budget: Budget) -> TaskRequest:
    return REQUEST.model_copy(update={"budget": budget})


async def test_a_call_is_captured_with_what_the_engine_returned(tmp_path: Path) -> None:
    async with running_session(listing_engine(), tmp_path) as (node, capture):
        answer = await client(node, capture.key).chat.completions.create(model="policy", messages=ASK, tools=[BASH])
        (call,) = capture.calls
        assert answer.usage is not None
        assert len(call.prompt_ids) == answer.usage.prompt_tokens
        assert len(call.response_ids) == answer.usage.completion_tokens
        assert len(call.logprobs) == len(call.response_ids) > 0
        assert call.finish_reason == answer.choices[0].finish_reason == "tool_calls"
        assert call.messages == ASK
        assert call.tools == [BASH]
        assert call.sampling["temperature"] == 1.0
        assert call.response is not None
        assert call.outcome == "delivered"
        minted = answer.choices[0].message.tool_calls
        assert minted is not None
        assert call.call_id in minted[0].id, "an id that leaves names the call that it came from"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_in_the_journal_before_its_answer_ends(tmp_path: Path, stream: bool) -> None:
    """Guards against losing what a harness has already seen when the gateway is killed."""
    async with running_session(listing_engine(), tmp_path) as (node, capture):
        headers = {"Authorization": f"Bearer {capture.key}"}
        body = {"model": "policy", "messages": ASK, "tools": [BASH], "stream": stream}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{node.url}/v1/chat/completions", json=body, headers=headers) as response,
        ):
            await response.content.readany()
            assert [call.call_id for call in read_journal(capture.journal.path)] == [capture.calls[0].call_id]


async def test_an_unknown_key_gets_the_providers_401_and_creates_nothing(tmp_path: Path) -> None:
    async with running_session(listing_engine(), tmp_path) as (node, capture):
        with pytest.raises(openai.AuthenticationError) as caught:
            await client(node, "pg-nobody").chat.completions.create(model="policy", messages=ASK)
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            await client(node, "pg-nobody").responses.create(model="policy", input="hi")
        assert capture.calls == []
        assert len(list((tmp_path / "state" / "sessions").iterdir())) == 1, "only the real session has a journal"


async def test_a_session_that_is_not_running_is_refused(tmp_path: Path) -> None:
    async with running_session(listing_engine(), tmp_path) as (node, capture):
        capture.running = False
        with pytest.raises(openai.PermissionDeniedError, match="not running"):
            await client(node, capture.key).chat.completions.create(model="policy", messages=ASK)
        assert capture.calls == []


async def test_a_socket_bound_to_a_session_refuses_another_sessions_key(tmp_path: Path) -> None:
    async with running_session(listing_engine(), tmp_path) as (node, capture), node.session(OTHER) as other:
        other.capture.running = True
        server = await asyncio.get_running_loop().create_server(node.proxy.server_for(capture), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for key, status in ((other.capture.key, 401), (capture.key, 200)):
            async with (
                aiohttp.ClientSession() as http,
                http.get(f"http://127.0.0.1:{port}/v1/models", headers={"Authorization": f"Bearer {key}"}) as response,
            ):
                assert response.status == status
        server.close()


async def test_a_harness_that_hangs_up_leaves_an_abandoned_call(tmp_path: Path) -> None:
    async with running_session(listing_engine(60), tmp_path) as (node, capture):
        with pytest.raises(openai.APITimeoutError):
            await (
                client(node, capture.key)
                .with_options(timeout=0.3)
                .chat.completions.create(model="policy", messages=ASK, tools=[BASH])
            )
        async with asyncio.timeout(60):
            while not capture.calls:  # noqa: ASYNC110 - the server notices the closed socket in its own time
                await asyncio.sleep(0.01)
        assert capture.calls[0].outcome == "abandoned"
        assert read_journal(capture.journal.path)[0].outcome == "abandoned"


async def test_a_budget_of_calls_ends_the_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The episode names the budget; guards against a line in the log for each such session."""
    async with running_session(listing_engine(), tmp_path, limited(Budget(max_calls=1))) as (node, capture):
        ask = client(node, capture.key).chat.completions.create
        await ask(model="policy", messages=ASK, tools=[BASH])
        assert not capture.exhausted.done()
        with pytest.raises(openai.PermissionDeniedError, match="budget"):
            await ask(model="policy", messages=ASK, tools=[BASH])
        assert capture.exhausted.result() == "calls"
        assert len(capture.calls) == 1
    assert "refused" not in caplog.text


async def test_a_budget_of_tokens_cuts_the_answer_and_then_ends_the_session(tmp_path: Path) -> None:
    async with running_session(listing_engine(), tmp_path, limited(Budget(max_sampled_tokens=5))) as (node, capture):
        ask = client(node, capture.key).chat.completions.create
        await ask(model="policy", messages=ASK, tools=[BASH])
        assert len(capture.calls[0].response_ids) == 5
        assert capture.calls[0].finish_reason == "length"
        with pytest.raises(openai.PermissionDeniedError):
            await ask(model="policy", messages=ASK, tools=[BASH])
        assert capture.exhausted.result() == "tokens"


async def test_a_call_is_not_cut_by_what_others_may_sample(tmp_path: Path) -> None:
    """Guards against an answer of 16 tokens, recorded as the policy's own, in a session that has sampled nothing yet:
    three sub-agents had reserved the rest of the budget."""
    waiting, granted = [asyncio.Event() for _ in range(5)], list[int | None]()

    async def call(number: int, wants: int | None) -> None:
        request = ChatRequest(model="policy", messages=[], max_tokens=wants)
        async with capture.admit(request, 1000) as admitted:
            assert admitted is not None
            granted.append(admitted[1].max_tokens)
            await waiting[number].wait()

    async with running_session(listing_engine(), tmp_path, limited(Budget(max_sampled_tokens=2000))) as (_, capture):
        async with asyncio.TaskGroup() as calls:
            for number, wants in enumerate((800, 800, 800, None)):
                calls.create_task(call(number, wants))
                await asyncio.sleep(0)
            calls.create_task(call(4, 16))
            await asyncio.sleep(0)
            assert granted == [800, 800], "the others wait, with 400 free, also one that could go in before them"
            waiting[0].set()
            while len(granted) < 3:  # noqa: ASYNC110 - the call is let in by the loop's next turns
                await asyncio.sleep(0)
            assert granted == [800, 800, 800]
            for each in waiting:
                each.set()
        assert granted == [800, 800, 800, 1000, 16]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/chat/completions", b"{", 400, "not JSON"),
        ("/v1/chat/completions", b"[]", 400, "must be a JSON object"),
        ("/v1/chat/completions", b'{"metadata": ' + b"[" * 500 + b"]" * 500 + b"}", 400, "nested too deeply"),
        ("/v1/chat/completions", b'{"model": "policy"}', 400, "messages"),
        ("/v1/responses", b'{"model": "policy", "input": 5}', 400, "input"),
        ("/v1/responses", b'{"model": "policy", "input": "x", "previous_response_id": "r"}', 400, "previous_response"),
        ("/v1/embeddings", b"{}", 404, "no such endpoint"),
    ],
)
async def test_a_bad_request_gets_the_providers_error_shape(
    tmp_path: Path, path: str, body: bytes, status: int, says: str
) -> None:
    async with running_session(listing_engine(), tmp_path) as (node, capture):
        headers = {"Authorization": f"Bearer {capture.key}", "Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{node.url}{path}", data=body, headers=headers) as response,
        ):
            assert response.status == status
            error = (await response.json())["error"]
            assert says in error["message"]
        assert capture.calls == []


@pytest.mark.parametrize(
    ("header", "shape"),
    [
        ("Authorization", {"message", "type", "param", "code"}),
        ("x-api-key", {"type", "message"}),
        ("x-goog-api-key", {"code", "message", "status"}),
    ],
)
async def test_an_unknown_endpoint_gets_the_404_of_the_provider_that_was_meant(
    tmp_path: Path, header: str, shape: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against Google's errors for OpenAI's clients: both may have a bearer key."""
    async with running_session(listing_engine(), tmp_path) as (node, capture), aiohttp.ClientSession() as http:
        headers = {header: f"Bearer {capture.key}" if header == "Authorization" else capture.key}
        async with http.post(f"{node.url}/v1/embeddings", json={}, headers=headers) as response:
            assert response.status == 404
            assert set((await response.json())["error"]) == shape
    assert "no such endpoint: POST /v1/embeddings" in caplog.text


async def test_a_prompt_that_does_not_fit_is_a_context_length_error_and_is_recorded(tmp_path: Path) -> None:
    async with running_session(listing_engine(), tmp_path) as (node, capture):
        long: Any = [{"role": "user", "content": "word " * 200_000}]
        with pytest.raises(openai.BadRequestError) as caught:
            await client(node, capture.key).chat.completions.create(model="policy", messages=long)
        assert caught.value.code == "context_length_exceeded"
        assert capture.calls[0].outcome == "failed"
        assert capture.calls[0].error is not None
        assert "maximum context length" in capture.calls[0].error


async def test_a_wish_for_one_tool_call_at_most_is_recorded_where_there_are_tools(tmp_path: Path) -> None:
    async with running_session(listing_engine(), tmp_path) as (node, capture):
        ask = client(node, capture.key).chat.completions.create
        await ask(model="policy", messages=ASK, tools=[BASH], parallel_tool_calls=False)
        await ask(model="policy", messages=ASK, parallel_tool_calls=False)
        await ask(model="policy", messages=ASK, tools=[BASH], parallel_tool_calls=True)
        await ask(model="policy", messages=ASK, tools=[BASH])
        assert [call.single_tool_call for call in capture.calls] == [True, False, False, False]


@pytest.mark.parametrize(("space", "max_tokens", "fits"), [(63, 32_000, False), (64, 32_000, True), (5, 5, True)])
async def test_too_little_space_is_an_overflow(tmp_path: Path, space: int, max_tokens: int, fits: bool) -> None:
    """Guards against an answer of a few tokens at the context's end, which harnesses take for the last one: told of an
    overflow they compact. Room for what the request asks for is enough."""
    async with running_session(listing_engine(), tmp_path) as (node, capture):
        ask = client(node, capture.key).chat.completions.create
        first = await ask(model="policy", messages=ASK, tools=[BASH])
        call: Any = first.choices[0].message
        result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "README.md"}
        turn: Any = {"model": "policy", "messages": [*ASK, call, result], "tools": [BASH], "max_tokens": max_tokens}
        await ask(**turn)
        engine: Any = node.proxy.engine
        engine.max_model_len = len(capture.calls[1].prompt_ids) + space
        if fits:
            await ask(**turn)
        else:
            with pytest.raises(openai.BadRequestError, match="too little space") as caught:
                await ask(**turn)
            assert caught.value.code == "context_length_exceeded"
        assert capture.calls[2].error_kind == (None if fits else "context_length")


async def test_concurrent_sessions_never_mix_whatever_else_their_harnesses_send(tmp_path: Path) -> None:
    """A session is its socket and its key, in whichever header the provider has it; headers that name a session of the
    harness's own, also another's, say nothing."""
    async with running_session(listing_engine(), tmp_path) as (node, capture), node.session(OTHER) as other:
        other.capture.running = True
        captures = (capture, other.capture)
        bodies: list[tuple[str, Any]] = [
            ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
            ("/v1/responses", lambda text: {"input": text}),
            ("/v1/messages", lambda text: {"max_tokens": 9, "messages": [{"role": "user", "content": text}]}),
            ("/v1beta/models/m:generateContent", lambda text: {"contents": [{"parts": [{"text": text}]}]}),
        ]
        same = ("x-session-id", "x-session-affinity", "session-id", "thread-id", "x-claude-code-session-id")

        async def ask(http: aiohttp.ClientSession, one: SessionCapture, number: int) -> None:
            path, body = bodies[number % len(bodies)]
            key = {"x-api-key": one.key} if "messages" in path else {"Authorization": f"Bearer {one.key}"}
            headers = key | dict.fromkeys(same, capture.session_id)
            said = {"model": "m"} | body(f"{one.session_id} {number}")
            async with http.post(f"{node.url}{path}", json=said, headers=headers) as response:
                assert response.status == 200, await response.text()

        async with aiohttp.ClientSession() as http:
            await asyncio.gather(*(ask(http, one, number) for number in range(20) for one in captures))
        for one in captures:
            texts = [call.messages[-1]["content"] for call in one.calls]
            assert sorted(texts) == sorted(f"{one.session_id} {number}" for number in range(20))
            assert {call.session_id for call in read_journal(one.journal.path)} == {one.session_id}


async def test_counting_tokens_is_no_call(tmp_path: Path) -> None:
    body = {"model": "policy", "input": "hi"}
    async with running_session(listing_engine(), tmp_path) as (node, capture):
        headers = {"Authorization": f"Bearer {capture.key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{node.url}/v1/responses/input_tokens", json=body, headers=headers) as response,
        ):
            assert (await response.json())["input_tokens"] > 0
        assert capture.calls == []


async def test_a_count_is_the_length_of_the_prompt_that_a_call_would_have(tmp_path: Path) -> None:
    """Guards against harnesses compacting by the length of another prompt than the spliced one."""
    tool: Any = {"type": "function", "name": "bash", **{k: v for k, v in BASH["function"].items() if k != "name"}}
    async with running_session(listing_engine(), tmp_path) as (node, capture):
        responses = client(node, capture.key).responses
        first = await responses.create(model="policy", input="List the files.", tools=[tool])
        call = next(item for item in first.output if item.type == "function_call")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "README.md"}
        turn: Any = [{"role": "user", "content": "List the files."}, call.model_dump(exclude_none=True), result]
        counted = await responses.input_tokens.count(model="policy", input=turn, tools=[tool])
        await responses.create(model="policy", input=turn, tools=[tool])
        assert capture.calls[1].continuation == "spliced"
        assert counted.input_tokens == len(capture.calls[1].prompt_ids)


async def test_codex_is_told_that_the_usage_has_its_reasoning(tmp_path: Path) -> None:
    """Guards against Codex adding an estimate of earlier reasoning to the usage, and compacting too early."""
    async with running_session(listing_engine(), tmp_path) as (node, capture):
        ask = client(node, capture.key).responses.with_streaming_response.create
        async with ask(model="policy", input="List the files.", stream=True) as response:
            assert response.headers["X-Reasoning-Included"] == "true"
