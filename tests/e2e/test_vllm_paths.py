"""The two paths to a real vLLM, chat and generate: the same prompts in, the same answers out; and which is taken."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polar_gym.chat import ChatRequest, Completion, Delta
from polar_gym.engines import EngineError
from polar_gym.engines.vllm import VllmOptions
from polar_gym.schema import Sampling
from tests.e2e.guided_engine import TWO_CALLS, GuidedEngine, without_ids
from tests.e2e.vllm_server import VllmServer
from tests.support.tools import ASK, BASH

SEED = Sampling(seed=5)
NAMED = {"type": "function", "function": {"name": "bash"}}
GENERATE = "/inference/v1/generate"
RENDER = "/v1/chat/completions/render"


@asynccontextmanager
async def guided(
    url: str, path: Literal["auto", "chat", "generate"] = "auto", *, thinking: bool = True
) -> AsyncIterator[GuidedEngine]:
    made = GuidedEngine(VllmOptions(url=url, path=path, chat_template_kwargs={"enable_thinking": thinking}))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def relay(server: VllmServer, *, drops: Collection[str] = (), lacks: Collection[str] = ()) -> AsyncIterator[str]:
    """vLLM as another version of it would be: it does not know these fields and has none of these routes."""

    async def forward(request: web.Request) -> web.Response:
        if request.path in lacks:
            raise web.HTTPNotFound
        body = await request.json() if request.can_read_body else None
        kept = None if body is None else {name: value for name, value in body.items() if name not in drops}
        async with http.request(request.method, server.url + request.path, json=kept) as response:
            return web.Response(body=await response.read(), status=response.status, content_type="application/json")

    application = web.Application(client_max_size=2**24)
    application.router.add_route("*", "/{path:.*}", forward)
    async with aiohttp.ClientSession() as http, TestServer(application) as front:
        yield str(front.make_url("/")).rstrip("/")


def assert_same(one: Completion, other: Completion) -> None:
    assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
    assert one.response_ids.tolist() == other.response_ids.tolist()
    assert one.logprobs.tolist() == pytest.approx(other.logprobs.tolist(), abs=1e-4)
    assert (one.finish_reason, one.stop_sequence) == (other.finish_reason, other.stop_sequence)
    assert without_ids(one) == without_ids(other)
    assert one.sampling == other.sampling


@pytest.mark.parametrize(
    ("says", "fields"),
    [
        (None, {"max_tokens": 40}),
        (None, {"max_tokens": 40, "stop": ["e"]}),
        (None, {"max_tokens": 1, "tools": [BASH]}),
        (TWO_CALLS, {"tools": [BASH], "max_tokens": 300}),
        (TWO_CALLS, {"tools": [BASH], "max_tokens": 300, "tool_choice": "none"}),
        (TWO_CALLS, {"tools": [BASH], "max_tokens": 30}),
        (TWO_CALLS, {"tools": [BASH], "max_tokens": 300, "stop": ["ls"]}),
        (TWO_CALLS, {"max_tokens": 300}),
        ("Just words.", {"tools": [BASH], "max_tokens": 300}),
        ("Just words.", {"max_tokens": 300, "stop": ["wo"]}),
        ("Just words.", {"max_tokens": 1_000_000}),
        (None, {"tools": [BASH], "max_tokens": 40, "tool_choice": NAMED}),
        (None, {"tools": [BASH], "max_tokens": 40, "tool_choice": "required"}),
    ],
    ids=[
        *("cut off", "stop string", "one token", "two calls", "no calls wanted", "cut in a call", "stop in a call"),
        *("calls without tools", "words", "words and a stop string", "more than the room", "named tool", "some tool"),
    ],
)
@pytest.mark.parametrize("spliced", [False, True], ids=["templated", "spliced"])
async def test_both_paths_answer_the_same(
    vllm_server: VllmServer, says: str | None, fields: dict[str, Any], spliced: bool
) -> None:
    answers = []
    for path in ("chat", "generate"):
        async with guided(vllm_server.url, path, thinking="tool_choice" not in fields) as engine:
            engine.says = says
            request = ChatRequest(model="m", messages=ASK, **fields)
            if spliced:  # a prompt that no messages are templated to
                request = replace(request, prompt_ids=np.tile(await engine.template(ASK, []), 2))
            answers.append(await engine.chat(request, SEED))
            if request.prompt_ids is not None:
                assert answers[-1].prompt_ids.tolist() == request.prompt_ids.tolist()
    assert_same(*answers)
    by_chat, by_ids = answers
    assert [span.version for span in by_ids.weight_versions] == ["default"]
    assert (by_ids.weight_versions[0].start, by_ids.weight_versions[0].end) == (0, len(by_ids.response_ids))
    assert by_chat.weight_versions == []


async def test_the_text_comes_last_and_whole_by_ids(vllm_server: VllmServer) -> None:
    deltas: list[Delta] = []
    async with guided(vllm_server.url, "generate") as engine:
        engine.says = TWO_CALLS
        completion = await engine.chat(ChatRequest(model="m", messages=ASK, tools=[BASH]), SEED, deltas.append)
    *ids, text = deltas
    assert [token for delta in ids for token in delta.response_ids] == completion.response_ids.tolist()
    assert text.response_ids == []
    assert [call["index"] for call in text.tool_calls] == [0, 1]


@pytest.mark.parametrize(
    ("drops", "lacks", "path"),
    [((), (), "chat"), (("kv_transfer_params",), (), "generate"), (("kv_transfer_params",), (GENERATE,), "plain")],
    ids=["both are there", "chat takes no ids", "neither takes ids"],
)
async def test_the_probe_picks_the_path(
    vllm_server: VllmServer, drops: tuple[str], lacks: tuple[str], path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with relay(vllm_server, drops=drops, lacks=lacks) as url, guided(url) as engine:
        assert engine.info.path == path
        prompt_ids = np.tile(await engine.template(ASK, []), 2)
        request = ChatRequest(model="m", messages=ASK, max_tokens=3, prompt_ids=prompt_ids)
        completion = await engine.chat(request, SEED)
    honoured = completion.prompt_ids.tolist() == prompt_ids.tolist()
    assert honoured == (path != "plain")
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (path == "plain")
    assert all("no prompt is spliced" in warning for warning in warnings)


async def test_a_server_that_shows_no_rendered_requests_may_have_a_grammar(
    vllm_server: VllmServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with relay(vllm_server, lacks=[RENDER]) as url, guided(url) as engine:
        assert (engine.info.path, engine.info.own_grammar) == ("chat", None)
    assert [record.levelname for record in caplog.records if "grammar of its own is not known" in record.message] == [
        "WARNING"
    ]


async def test_a_path_that_is_not_there_is_refused_with_the_flag(vllm_server: VllmServer) -> None:
    async with relay(vllm_server, lacks=[GENERATE]) as url:
        with pytest.raises(EngineError, match=r"engine\.path=generate: .*--enable-scale-out"):
            async with guided(url, "generate"):
                pass
