"""The SGLang engine against a small server that answers in SGLang's form, as its sources have it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polar_gym.builders import build_trajectory
from polar_gym.chat import ChatRequest, Delta
from polar_gym.engines import ENGINES, Engine, EngineError
from polar_gym.engines.openai_form import ServerOptions
from polar_gym.engines.sglang import SglangEngine, SglangReplicas
from polar_gym.schema import BuilderSpec, PluginSpec, Sampling
from tests.support.sessions import running_session
from tests.support.tools import ASK
from tests.support.vllm_stand_in import without_templates

CALL = {"id": "call_1", "index": 0, "type": "function", "function": {"name": "bash", "arguments": "{}"}}


class StandIn:
    """Conditions on `input_ids` where they are given, else on [1, 2]; answers [7, 8]."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.gives_ids = True
        self.complaint = ""
        self.full = False
        self.breaks: str | None = None
        """Where answers break off."""

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/chat/completions", self._chat)
        application.router.add_post("/detokenize", self._detokenize)
        application.router.add_post("/generate", self._generate)
        return application

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "root": "m", "max_model_len": 64}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if self.breaks is not None:
            return await self._broken(request)
        if self.full or body.get("max_tokens", 0) > 64:
            return web.json_response({"object": "error", "message": self.complaint, "code": 400}, status=400)
        choice: dict[str, Any] = {
            "message": {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
            "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]},
            "finish_reason": "tool_calls",
            "matched_stop": 8,
        }
        if self.gives_ids:
            choice |= {"prompt_token_ids": body.get("input_ids", [1, 2]), "response_token_ids": [7, 8]}
        return web.json_response({"choices": [choice]})

    async def _broken(self, request: web.Request) -> web.StreamResponse:
        if self.breaks == "at a proxy":
            return web.Response(status=504, text="upstream timed out")
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        if self.breaks == "in its body":
            await response.prepare(request)
            await response.write(b"{")
        assert request.transport is not None
        request.transport.close()
        return response

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["skip_special_tokens"] is False
        return web.json_response({"text": "".join(f"<{token}>" for token in body["tokens"])})

    async def _generate(self, request: web.Request) -> web.Response:
        ids = (await request.json())["input_ids"]
        entries = [[None if index == 0 else -0.1 * index, token, None] for index, token in enumerate(ids)]
        return web.json_response({"meta_info": {"input_token_logprobs": entries}})


@pytest.fixture
async def stand_in() -> AsyncIterator[tuple[StandIn, str]]:
    made = StandIn()
    async with TestServer(made.application()) as server:
        yield made, str(server.make_url("/v1"))


@pytest.fixture
async def engine(stand_in: tuple[StandIn, str]) -> AsyncIterator[Engine]:
    options = {"url": stand_in[1], "chat_template_kwargs": {"thinking": True}}
    made = ENGINES.make(PluginSpec.model_validate({"name": "sglang", **options}))
    await made.start()
    yield made
    await made.close()


def request(**fields: Any) -> ChatRequest:
    return ChatRequest(model="x", messages=[{"role": "user", "content": "hi"}], **fields)


async def test_a_spliced_prompt_is_sent_and_echoed(engine: Engine, stand_in: tuple[StandIn, str]) -> None:
    deltas: list[Delta] = []
    completion = await engine.chat(request(prompt_ids=np.asarray([4, 5, 6], np.int32)), Sampling(), deltas.append)
    sent = stand_in[0].asked[-1]
    assert sent["input_ids"] == [4, 5, 6]
    assert (sent["stream"], sent["return_token_ids"], sent["logprobs"]) == (False, True, True)
    assert sent["chat_template_kwargs"] == {"thinking": True}
    assert Sampling().model_dump(exclude={"seed"}).items() <= sent.items()
    assert completion.prompt_ids.tolist() == [4, 5, 6]
    assert completion.response_ids.tolist() == [7, 8]
    assert completion.logprobs.tolist() == [-0.5, -0.25]
    assert completion.message == {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]}
    assert (completion.finish_reason, completion.stop_sequence) == ("tool_calls", None)
    assert deltas == [], "SGLang streams no ids"


async def test_reasoning_is_sent_under_the_name_sglang_reads(engine: Engine, stand_in: tuple[StandIn, str]) -> None:
    said = {"role": "assistant", "content": "Hm.", "reasoning": "hm"}
    await engine.template([*request().messages, said, *request().messages], [])
    assert [each.get("reasoning_content") for each in stand_in[0].asked[-1]["messages"]] == [None, "hm", None]


async def test_templating_decoding_and_scoring(engine: Engine) -> None:
    assert (engine.info.model, engine.info.max_model_len, engine.info.logprobs_mode) == ("m", 64, None)
    assert (await engine.template(request().messages, [])).tolist() == [1, 2]
    assert await engine.decode([3, 4]) == "<3><4>"
    scores = await engine.score(np.asarray([4, 5, 6], np.int32))
    assert np.isnan(scores[0])
    assert scores[1:].tolist() == pytest.approx([-0.1, -0.2])


@pytest.mark.parametrize(
    "complaint",
    [
        "Requested token count exceeds the model's maximum context length of 64 tokens.",
        "The input (70 tokens) is longer than the model's context length (64 tokens).",
        # vLLM's, of some versions
        "You passed 50 input tokens and requested 100 output tokens. However, the model's context length is only 64 "
        "tokens, resulting in a maximum input length of 0 tokens.",
    ],
)
async def test_a_full_context_is_known_in_each_wording(
    engine: Engine, stand_in: tuple[StandIn, str], complaint: str
) -> None:
    """Guards against an overflow that is taken for a bad request of the agent: no harness compacts then, and the
    session is graded."""
    stand_in[0].complaint = complaint
    completion = await engine.chat(request(max_tokens=100), Sampling())
    assert "max_tokens" not in completion.sampling
    stand_in[0].full = True
    with pytest.raises(EngineError) as refusal:
        await engine.chat(request(max_tokens=100), Sampling())
    assert (refusal.value.status, refusal.value.kind) == (400, "context_length")


@pytest.mark.parametrize("breaks", ["before its head", "in its body", "at a proxy"])
async def test_a_call_whose_answer_breaks_off_is_recorded_and_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    """Guards against sampled tokens in no record: the server had sampled them all, and the same request was sent again,
    or to another server."""
    without_templates(monkeypatch)
    sick, other = StandIn(), StandIn()
    async with TestServer(sick.application()) as first, TestServer(other.application()) as second:
        engine = SglangReplicas(ServerOptions(url=[str(each.make_url("/v1")) for each in (first, second)]))
        async with running_session(engine, tmp_path) as (node, capture), aiohttp.ClientSession() as http:

            async def ask() -> int:
                headers, body = {"Authorization": f"Bearer {capture.key}"}, {"model": "m", "messages": ASK}
                async with http.post(f"{node.url}/v1/chat/completions", json=body, headers=headers) as said:
                    return said.status

            sick.breaks = breaks
            sick.asked.clear()
            other.asked.clear()
            statuses = [await ask()]
            of_sessions = [body for each in (sick, other) for body in each.asked if "max_tokens" not in body]
            assert len(of_sessions) == 1
            async with asyncio.timeout(60):
                while engine.replicas[0].up:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            statuses.append(await ask())
            assert statuses == [502, 200]
            calls = capture.calls
    assert [(call.outcome, call.error_kind) for call in calls] == [("failed", "server"), ("delivered", None)]
    assert build_trajectory(calls, BuilderSpec(name="prefix_merging")).fidelity.uncounted["server"] == 1


async def test_a_server_that_gives_no_ids_is_refused_at_the_start(stand_in: tuple[StandIn, str]) -> None:
    stand_in[0].gives_ids = False
    engine = SglangEngine(ServerOptions(url=stand_in[1]))
    with pytest.raises(EngineError, match=r"without token ids.*router.*worker"):
        await engine.start()
    await engine.close()
