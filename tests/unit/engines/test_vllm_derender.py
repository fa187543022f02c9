"""Answers that vLLM's `/derender` reads from their ids: what it is told, and what is left where it fails."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
from aiohttp import web

from polar_gym.chat import ChatRequest
from polar_gym.engines.vllm import VllmEngine, VllmOptions
from polar_gym.schema import Sampling
from tests.exactness.stand_in import StandIn
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
        f"{server.url} could not read a broken tool call again, whose text stays as it was streamed: "
        f"{server.url}/v1/chat/completions/derender answered 500: 'NoneType' object is not iterable"
    ], "said once"
