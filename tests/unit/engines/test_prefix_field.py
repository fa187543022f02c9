"""NeMo RL's chat route takes the ids already seen and templates the rest itself. A stand-in splices as it does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polar_gym.chat import ChatRequest, Completion
from polar_gym.engines import EngineError
from polar_gym.engines.embedded.chatml import TOKENIZER_FILE, ChatML
from polar_gym.engines.vllm import VllmEngine, VllmOptions
from polar_gym.schema import Message, Sampling
from polar_gym.splicing.plan import SessionMemory, Splicer
from polar_gym.splicing.terms import Terms
from tests.support.calls import make_call
from tests.support.vllm_stand_in import streamed

CHATML = ChatML()
USER: Message = {"role": "user", "content": "Hello."}
END = CHATML.answer_ids({"role": "assistant", "content": "x"})[-1]
SAID = [token for character in "Hi there." for token in CHATML._plain.encode(character).ids]
"""An answer in ids that no tokenizer would give its text."""


class NemoRl:
    """Templates the messages; the ids up to the last answer's end are replaced by the required ones.

    Not the real server, and untested against one: written from its sources. It has two routes, and asserts that it is
    asked for the sampling that it trains with."""

    def __init__(self, *, honours: bool) -> None:
        self._honours = honours
        self.asked: list[dict[str, Any]] = []

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._chat)
        application.router.add_post("/tokenize", self._tokenize)
        return application

    async def _tokenize(self, request: web.Request) -> web.Response:
        ids = CHATML.prompt_ids((await request.json())["messages"], [])
        return web.json_response({"count": len(ids), "max_model_len": 4096, "tokens": ids})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        if (body["temperature"], body["top_p"], body["top_k"]) != (1.0, 1.0, -1):
            return web.Response(status=500, text="Internal Server Error")
        ids = CHATML.prompt_ids(body["messages"], [])
        if self._honours and "required_prefix_token_ids" in body:
            ids = self._with_prefix(ids, body["messages"], body["required_prefix_token_ids"])
        entry = {"logprob": -0.5, "top_logprobs": [{"logprob": -0.5}, {"logprob": -1.5}]}
        choice = {
            "message": {"role": "assistant", "content": "Hi there."},
            "finish_reason": "stop",
            "token_ids": [*SAID, END],
            "logprobs": {"content": [entry] * (len(SAID) + 1)},
        }
        return streamed(web.json_response({"choices": [choice], "prompt_token_ids": ids}))

    def _with_prefix(self, ids: list[int], messages: Sequence[Message], required: list[int]) -> list[int]:
        last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
        ends = [position for position, token in enumerate(ids) if token == END]
        after = ids[ends[last] :]  # one end to each message; the end itself is the template's
        return [*(required[:-1] if required[-1] == END else required), *after]


@asynccontextmanager
async def started(server: NemoRl, **options: Any) -> AsyncIterator[VllmEngine]:
    async with TestServer(server.application()) as front:
        url = str(front.make_url("/"))
        given: dict[str, Any] = {"url": url, "model": "m", "tokenizer": str(TOKENIZER_FILE), **options}
        engine = VllmEngine(VllmOptions(prefix_field="required_prefix_token_ids", **given))
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()


GO_ON: list[Message] = [{"role": "user", "content": "Go on."}]


async def second_turn(
    engine: VllmEngine, new: Sequence[Message] = GO_ON
) -> tuple[str, ChatRequest, Completion, Splicer]:
    """A conversation's second turn, whose first the engine answered in ids of its own."""
    memory, splicer = SessionMemory(), Splicer(engine, enabled=True)
    first = ChatRequest(model="m", messages=[USER])
    plan = await splicer.prepare(memory, first, first)
    completion = await engine.chat(first, Sampling())
    ids = (completion.prompt_ids.tolist(), completion.response_ids.tolist())
    parent = make_call(0, *ids, messages=[USER], response=completion.message)
    parent.finish_reason = "stop"
    memory.remember(parent, plan)
    request = ChatRequest(model="m", messages=[USER, completion.message, *new])
    plan = await splicer.prepare(memory, request, Terms(engine).of(memory.engine_ids, request))
    completion = await engine.chat(plan.request, Sampling())
    return splicer.confirm(plan, completion.prompt_ids).continuation, plan.request, completion, splicer


async def test_the_ids_already_seen_are_sent_and_echoed() -> None:
    server = NemoRl(honours=True)
    async with started(server) as engine:
        continuation, request, completion, splicer = await second_turn(engine)
    seen = [*CHATML.prompt_ids([USER], []), *SAID, END]
    assert server.asked[-1]["required_prefix_token_ids"] == seen
    assert "kv_transfer_params" not in server.asked[-1]
    assert completion.prompt_ids[: len(seen)].tolist() == seen != CHATML.prompt_ids(request.messages, [])[: len(seen)]
    assert request.prompt_ids is not None
    assert np.array_equal(completion.prompt_ids, request.prompt_ids)
    assert (continuation, splicer.enabled) == ("spliced", True)


async def test_a_server_that_ignores_the_field_is_noticed() -> None:
    async with started(NemoRl(honours=False)) as engine:
        continuation, _, _, splicer = await second_turn(engine)
    assert (continuation, splicer.enabled) == ("canonical", False)


async def test_an_answer_among_the_new_messages_is_not_lost() -> None:
    """Guards against a context without what comes between the answer that is continued and the last one: the server
    puts the required ids in place of both. It happens where a harness rewrote what it had said in between."""
    server = NemoRl(honours=True)
    said: list[Message] = [{"role": "user", "content": "Rewritten."}, {"role": "assistant", "content": "Oh."}, USER]
    async with started(server) as engine:
        continuation, request, completion, splicer = await second_turn(engine, said)
    assert request.prompt_ids is None, "the plan knows before the engine is asked"
    assert completion.prompt_ids.tolist() == CHATML.prompt_ids(request.messages, [])
    assert (continuation, splicer.enabled) == ("canonical", True)


async def test_what_the_server_does_not_say_is_asked_for(tmp_path: Path) -> None:
    async with started(NemoRl(honours=True)) as engine:
        assert (engine.info.model, engine.info.max_model_len, engine.info.path) == ("m", 4096, "chat")
    for option, words in ({"model": None}, "engine.model: "), ({"tokenizer": str(tmp_path)}, "engine.tokenizer="):
        with pytest.raises(EngineError, match=words):
            async with started(NemoRl(honours=True), **option):
                pass
