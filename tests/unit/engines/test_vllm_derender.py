"""Answers that vLLM's `/derender` reads from their ids: what it is told, and what is left where it fails."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from aiohttp import web

from polar_gym.chat import ChatRequest, Completion
from polar_gym.engines import EngineError
from polar_gym.engines.vllm import VllmEngine, VllmOptions
from polar_gym.engines.vllm.generate import lacks_call
from polar_gym.schema import Sampling
from tests.exactness.stand_in import StandIn, template
from tests.support.tools import BASH

CALL = '<tool_call>{"name": "bash", "arguments": {"command": "echo 123456789"}}</tool_call>'
CUT = ChatRequest(
    model="m", messages=[{"role": "user", "content": "tokens-20 tool"}], tools=[BASH], max_tokens=19 + len(CALL)
)
"""Asks for an answer that is cut off right behind a tool call: the call is uncertain, and read again."""


class Parsing(StandIn):
    """Keeps the requests to its parsers, which break as those of vLLM do: only for some errors is the status 400."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []
        self.broken = False

    async def _derender(self, http: web.Request) -> web.Response:
        self.asked.append(await http.json())
        if self.broken:
            return web.json_response({"error": {"message": "'NoneType' object is not iterable"}}, status=500)
        return await super()._derender(http)


@asynccontextmanager
async def started(path: Literal["chat", "generate"]) -> AsyncIterator[tuple[VllmEngine, Parsing]]:
    server = Parsing()
    await server.start()
    engine = VllmEngine(VllmOptions(url=server.url, path=path))
    try:
        await engine.start()
        server.asked.clear()
        yield engine, server
    finally:
        await engine.close()
        await server.stop()


async def test_an_answer_stands_as_it_came_where_it_cannot_be_read_again(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a whole answer that counts as the engine's failure, and is sampled again, because a parser broke
    at the policy's tool call."""
    async with started("chat") as (engine, server):
        server.broken = True
        with caplog.at_level(logging.WARNING):
            answers = [await engine.chat(CUT, Sampling()) for _ in range(2)]
    assert len(server.asked) == 2
    for answer in answers:
        assert answer.engine_tokens == len(answer.response_ids) == CUT.max_tokens
        assert [call["function"]["name"] for call in answer.message["tool_calls"]] == ["bash"]
        assert answer.finish_reason == "length"
    assert [record.message for record in caplog.records if "'NoneType' object" in record.message] == [
        f"{server.url} could not read an answer again, which stays as it was streamed: "
        f"{server.url}/v1/chat/completions/derender answered 500: 'NoneType' object is not iterable"
    ], "said once"


async def test_an_answer_that_was_not_read_before_is_its_text_where_the_parsers_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards against the same where the ids alone came."""
    async with started("generate") as (engine, server):
        server.broken = True
        answer = await engine.chat(CUT, Sampling())
    assert answer.engine_tokens == len(answer.response_ids) == CUT.max_tokens
    assert answer.message["content"]
    assert not answer.message.get("tool_calls")
    assert "'NoneType' object" in caplog.text


async def test_a_server_that_can_read_no_answer_is_refused_at_the_start() -> None:
    """Guards against harnesses that get all tool calls as text, for which the policy has the reward 0."""
    server = Parsing()
    server.broken = True
    await server.start()
    engine = VllmEngine(VllmOptions(url=server.url, path="generate"))
    try:
        with pytest.raises(EngineError, match="'NoneType' object"):
            await engine.start()
    finally:
        await engine.close()
        await server.stop()


@pytest.mark.parametrize("spliced", [True, False])
@pytest.mark.parametrize("path", ["chat", "generate"])
async def test_the_parsers_are_told_the_prompt(path: Literal["chat", "generate"], spliced: bool) -> None:
    """Guards against a first token without its leading space (SentencePiece), and against parsers that read an answer
    as if nothing stood before it: some go on from what the prompt has opened."""
    ids = np.asarray(template(CUT.messages, None), np.int32) if spliced else None
    async with started(path) as (engine, server):
        answer = await engine.chat(replace(CUT, prompt_ids=ids), Sampling())
    (asked,) = server.asked
    assert asked["generate_response"]["prompt_token_ids"] == answer.prompt_ids.tolist()
    assert ids is None or answer.prompt_ids.tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("says", "tools", "asks"),
    [("tokens-20", [BASH], 1), ("tokens-20", [], 0), ("tokens-20 tool", [BASH], 0)],
    ids=["no call", "no tools", "a whole call"],
)
@pytest.mark.parametrize("broken", [False, True])
async def test_an_answer_that_could_lack_a_call_is_read_again(
    says: str, tools: list[Any], asks: int, broken: bool
) -> None:
    """Guards against parsers of vLLM that lose a call of which several tokens come at once: the harness went on, and
    the reward said that the policy had called nothing."""
    request = ChatRequest(model="m", messages=[{"role": "user", "content": says}], tools=tools)
    async with started("chat") as (engine, server):
        server.broken = broken
        answer = await engine.chat(request, Sampling())
        assert len(server.asked) == asks
        server.asked.clear()
        await engine.chat(replace(request, stream=True), Sampling(), lambda _: None)
        assert not server.asked, "the harness reads along"
    assert bool(answer.message.get("tool_calls")) == ("tool" in says)
    assert answer.finish_reason == ("tool_calls" if "tool" in says else "stop")


@pytest.mark.parametrize(("arguments", "lacks"), [('{"command": "ls"}', False), ("{}", True), ('{"other": 1}', True)])
def test_a_call_without_a_required_argument_is_read_again(arguments: str, lacks: bool) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    ids = np.zeros(1, np.int32)
    answer = Completion(
        message={"role": "assistant", "content": None, "tool_calls": [call]},
        finish_reason="tool_calls",
        prompt_ids=ids,
        response_ids=ids,
        logprobs=np.zeros(1, np.float32),
        sampling={},
    )
    assert lacks_call(answer, [BASH]) == lacks
    for odd in (True, 5, [["command"]], {"command": 1}, None):
        parameters = {**BASH["function"]["parameters"], "required": odd}
        tool = {**BASH, "function": {**BASH["function"], "parameters": parameters}}
        assert not lacks_call(answer, [tool]), "the schema is the harness's"
