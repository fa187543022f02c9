"""What engines and clients do wrong comes out in the provider's error shape, and every token received is on record."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from polar_gym.builders import build_trajectory
from polar_gym.chat import ChatRequest, Completion, Delta, OnDelta
from polar_gym.chat.received import whole_delta
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.proxy import proxy
from polar_gym.gateway.proxy.capture import CaptureError, SessionCapture
from polar_gym.providers import routes
from polar_gym.schema import BuilderSpec, HarnessSpec, RuntimeSpec, Sampling, TaskRequest
from tests.support.sessions import running_session

ASK: Any = {"role": "user", "content": "List the files."}


@asynccontextmanager
async def calling_session(
    tmp_path: Path, engine: EmbeddedEngine, **options: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, SessionCapture]]:
    """Open a client of the proxy that has the key of a running session."""
    async with running_session(engine, tmp_path, **options) as (node, capture):
        headers = {"Authorization": f"Bearer {capture.key}"}
        async with aiohttp.ClientSession(f"{node.url}/v1/", headers=headers) as http:
            yield http, capture


def options() -> EmbeddedOptions:
    return EmbeddedOptions(scripts=[Script(final_message="All done, and well.")])


class Confused(EmbeddedEngine):
    """Breaks off with what no engine should raise, after a first piece where it streams."""

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        if on_delta is not None:
            on_delta(Delta(prompt_ids=np.array([1, 2], np.int32), content="All", response_ids=[5], logprobs=[-1.0]))
            await asyncio.sleep(0.1)
        raise KeyError("choices")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_answers_nonsense_is_an_error_in_the_providers_shape(tmp_path: Path, stream: bool) -> None:
    """Guards against a bare 500 to the harness, and against losing the tokens that had come."""
    async with calling_session(tmp_path, Confused(options()), streaming="real") as (http, capture):
        body = {"model": "policy", "messages": [ASK], "stream": stream}
        async with http.post("chat/completions", json=body) as response:
            said = await response.text()
        assert response.status == (200 if stream else 502)
        assert stream or '"server_error"' in said
        (call,) = capture.calls
        assert (call.outcome, call.response_ids.tolist()) == ("failed", [5])


class Deaf(EmbeddedEngine):
    """Takes no pre-tokenised prompts, and is slow with what follows its first token."""

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        if request.prompt_ids is None or on_delta is None:
            return await super().chat(request, sampling, on_delta)
        on_delta(Delta(prompt_ids=np.array([1, 2], np.int32), content="All", response_ids=[5], logprobs=[-1.0]))
        await asyncio.sleep(60)
        raise AssertionError


async def test_a_call_cut_off_on_an_engine_that_ignores_its_prompt_is_not_called_spliced(tmp_path: Path) -> None:
    """Guards against a trajectory that cannot be built: its fidelity refuses a spliced call with another prompt."""
    async with calling_session(tmp_path, Deaf(options()), streaming="real") as (http, capture):
        body = {"model": "policy", "messages": [ASK], "stream": True}
        async with http.post("chat/completions", json=body) as response:
            await response.read()
        said = {"role": "assistant", "content": "All done, and well."}
        body["messages"] = [ASK, said, {"role": "user", "content": "Thanks."}]
        async with http.post("chat/completions", json=body) as response:
            await response.content.readany()
        await capture.end()
        assert [call.continuation for call in capture.calls] == ["root", "canonical"]
        fidelity = build_trajectory(capture.calls, BuilderSpec(name="prefix_merging")).fidelity
        assert fidelity.excluded == {"abandoned": 1}


class GivesUp(EmbeddedEngine):
    """Ends its first answer in the middle and calls it complete, as vLLM does when it is paused with `mode=abort`."""

    given_up = 0

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        if self.given_up:
            return await super().chat(request, sampling, on_delta)
        self.given_up += 1
        completion = await super().chat(request, sampling)
        completion = replace(
            completion,
            message={"role": "assistant", "content": "All"},
            finish_reason="abort",
            response_ids=completion.response_ids[:2],
            logprobs=completion.logprobs[:2],
        )
        if on_delta is not None:
            on_delta(whole_delta(completion))
        return completion


@pytest.mark.parametrize("streaming", ["synthetic", "real"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_the_engine_gave_up_is_asked_for_again(
    tmp_path: Path, stream: bool, streaming: Any
) -> None:
    """Guards against half an answer that passes for the policy's last word, and is trained on, whenever the engine is
    paused for new weights."""
    async with calling_session(tmp_path, GivesUp(options()), streaming=streaming) as (http, capture):
        body = {"model": "policy", "messages": [ASK], "stream": stream}
        async with http.post("chat/completions", json=body) as response:
            said = await response.text()
            begun = stream and streaming == "real"
            assert response.status == (200 if begun else 503)
            assert 'finish_reason":"' not in said, "nothing that a client could take for the end of an answer"
        async with http.post("chat/completions", json=body) as response:
            assert response.status == 200
        given_up, again = capture.calls
        assert (given_up.outcome, given_up.error_kind, len(given_up.response_ids)) == ("failed", "overloaded", 2)
        assert again.outcome == "delivered"
        fidelity = build_trajectory(capture.calls, BuilderSpec(name="prefix_merging")).fidelity
        assert (fidelity.excluded, fidelity.trainable_tokens) == ({"failed": 2}, len(again.response_ids))


class Patching(EmbeddedEngine):
    """Calls a freeform tool with an input that is no text."""

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        completion = await super().chat(request, sampling)
        function = {"name": "apply_patch", "arguments": '{"input": "half a fox: \\ud83e"}'}
        call = {"id": "engine-own", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        completion = replace(completion, message=message, finish_reason="tool_calls")
        if on_delta is not None:
            on_delta(whole_delta(completion))
        return completion


@pytest.mark.parametrize("streaming", ["synthetic", "real"])
async def test_what_a_policy_gets_wrong_reaches_the_harness(tmp_path: Path, streaming: Any) -> None:
    """Guards against a 500, and an answer that is excluded as abandoned, for arguments that no JSON text can hold."""
    tool = {"type": "custom", "name": "apply_patch"}
    async with calling_session(tmp_path, Patching(options()), streaming=streaming) as (http, capture):
        for stream in (False, True):
            body = {"model": "policy", "input": "go", "tools": [tool], "stream": stream}
            async with http.post("responses", json=body) as response:
                assert response.status == 200
                assert "custom_tool_call" in await response.text()
        assert [call.outcome for call in capture.calls] == ["delivered"] * 2


class Counted(EmbeddedEngine):
    asked = 0

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        self.asked += 1
        return await super().chat(request, sampling, on_delta)


async def test_a_harness_file_that_fails_costs_no_tokens(tmp_path: Path) -> None:
    """Guards against an answer that is sampled and on no record, because what its request says could not be read."""

    def classify(headers: Any, body: Any) -> dict[str, str]:
        raise RecursionError

    engine = Counted(options())
    async with calling_session(tmp_path, engine) as (http, capture):
        capture.harness = replace(capture.harness, classify=classify)
        async with http.post("chat/completions", json={"model": "policy", "messages": [ASK]}) as response:
            assert response.status == 500
            assert '"server_error"' in await response.text()
        assert (engine.asked, capture.calls) == (0, [])


def _fail(*_: Any) -> Any:
    raise RecursionError


async def test_a_call_is_counted_by_the_outcome_that_is_on_its_record(tmp_path: Path) -> None:
    """Guards against metrics that count an answer as delivered which never left, and a call twice."""
    async with running_session(EmbeddedEngine(options()), tmp_path) as (node, capture):
        headers, body = {"Authorization": f"Bearer {capture.key}"}, {"model": "policy", "messages": [ASK]}
        async with aiohttp.ClientSession(f"{node.url}/v1/", headers=headers) as http:
            async with http.post("chat/completions", json=body) as response:
                assert response.status == 200
                await response.read()
            node.proxy._routes = routes([replace(each, render=_fail) for each in node.proxy.providers])
            async with http.post("chat/completions", json=body) as response:
                assert response.status == 500
        assert [call.outcome for call in capture.calls] == ["delivered", "abandoned"]
        assert node.proxy.calls == {"delivered": 1, "abandoned": 1}


async def test_a_key_that_is_no_text_opens_nothing(tmp_path: Path) -> None:
    """Guards against a 500: header values may hold any byte."""
    request = TaskRequest(
        task_id="t", instruction="x", runtime=RuntimeSpec(name="bubblewrap"), agent=HarnessSpec(name="pi")
    )
    async with Node(EmbeddedEngine(options()), cache=tmp_path) as node, node.session(request) as life:
        bound = node.proxy.server_for(life.capture)
        server = await asyncio.get_running_loop().create_server(bound, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()
        server.close()
    assert answer.startswith(b"HTTP/1.1 401 ")


async def test_a_sandbox_has_some_connections_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against an agent that opens thousands, so that the gateway has no descriptor left for other sessions."""
    monkeypatch.setattr(proxy, "MAX_CONNECTIONS", 2)
    get = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with running_session(EmbeddedEngine(options()), tmp_path) as (node, capture):
        server = await asyncio.get_running_loop().create_server(node.proxy.server_for(capture), "127.0.0.1", 0)

        async def ask() -> tuple[bytes, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(get)
            try:
                return await reader.readline(), writer
            except ConnectionResetError:
                return b"", writer

        asked = [await ask() for _ in range(4)]
        assert [line for line, _ in asked] == [b"HTTP/1.1 200 OK\r\n"] * 2 + [b""] * 2
        assert caplog.text.count(f"session {capture.session_id} has 2 connections open") == 1
        for _, writer in asked:
            writer.close()
        async with asyncio.timeout(60):
            while not (again := await ask())[0]:  # noqa: ASYNC110 - the server notices closed sockets in its own time
                await asyncio.sleep(0.01)
        again[1].close()
        server.close()


async def test_keys_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against an access log with URLs: Gemini's clients have their key in the query."""
    caplog.set_level("DEBUG")
    async with calling_session(tmp_path, EmbeddedEngine(options())) as (http, capture):
        async with http.get("../v1beta/models", params={"key": capture.key}) as response:
            await response.read()
        assert capture.key not in caplog.text


async def test_a_call_that_is_abandoned_is_so_also_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against training on an answer that the harness never had, and a session that goes on unrecorded."""

    def full(file: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with calling_session(tmp_path, EmbeddedEngine(options())) as (http, capture):
        async with http.post("chat/completions", json={"model": "m", "messages": [ASK]}) as response:
            assert response.status == 200
        with monkeypatch.context() as disk:
            disk.setattr(os, "write", full)
            with pytest.raises(CaptureError, match="No space left"):
                capture.mark_abandoned(capture.calls[0])
        assert capture.calls[0].outcome == "abandoned"
        assert build_trajectory(capture.calls, BuilderSpec(name="prefix_merging")).traces == []
        with pytest.raises(CaptureError, match="could not be written"):
            await capture.exhausted
