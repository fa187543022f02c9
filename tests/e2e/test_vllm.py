"""The vLLM engine against a real vLLM server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import numpy as np
import pytest

from polar_gym.chat import ChatRequest
from polar_gym.chat.received import Received
from polar_gym.engines import EngineError
from polar_gym.engines.embedded.chatml import ChatML
from polar_gym.engines.vllm import VllmEngine, VllmOptions
from polar_gym.schema import Message, Sampling, ToolDefinition
from tests.e2e.vllm_server import VllmServer
from tests.e2e.vllm_work import (
    ENDLESS,
    LONG_MESSAGE,
    EndlessEngine,
    running_requests,
    sampled_tokens,
    slow_engine,
    wait_until,
)

TOOL: ToolDefinition = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
CONVERSATION: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "List the files."},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "The tool lists files.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls é"}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "README.md"},
]


@pytest.fixture(params=["chat", "generate"])
async def engine(vllm_server: VllmServer, request: pytest.FixtureRequest) -> AsyncIterator[VllmEngine]:
    """By both paths: what is asked and what is answered must not depend on it."""
    made = VllmEngine(VllmOptions(url=vllm_server.url + "/v1", path=request.param))
    await made.start()
    assert made.info.path == request.param
    yield made
    await made.close()


def request(**fields: Any) -> ChatRequest:
    return ChatRequest(model="what the harness asked for", **{"messages": CONVERSATION, "max_tokens": 12, **fields})


async def test_start_learns_what_is_served(engine: VllmEngine, vllm_server: VllmServer) -> None:
    assert (engine.model, engine.max_model_len) == (vllm_server.model, vllm_server.max_model_len)
    assert engine.logprobs_mode == "processed"
    assert engine.info.own_grammar == "none"


async def test_ids_are_exact(engine: VllmEngine) -> None:
    """The prompt is the one that the template gives, and the text is the text of the sampled ids."""
    # Not every twelve tokens of a random model will do: vLLM's parsers take tags out, and an end makes them fewer.
    completion = await engine.chat(request(tools=[TOOL]), Sampling(seed=7))
    assert len(completion.prompt_ids) == len(await engine.template(request().messages, [TOOL]))
    # vLLM tokenises the rendered text as one string, the embedded engine in pieces: with ordinary text the ids agree.
    assert completion.prompt_ids.tolist() == ChatML().prompt_ids(CONVERSATION, [TOOL])
    assert len(completion.response_ids) == len(completion.logprobs) == 12
    said = (completion.message.get("reasoning") or "") + (completion.message["content"] or "")
    text = "".join(piece.text for piece in ChatML().pieces(completion.response_ids.tolist()))
    # Twelve random tokens may end within a character, and vLLM sends nothing of a character that has not ended.
    assert said.rstrip("\ufffd") == text.rstrip("\ufffd")
    assert completion.finish_reason == "length"
    assert (completion.logprobs < 0).all()


async def test_every_sampling_field_is_sent(engine: VllmEngine) -> None:
    completion = await engine.chat(request(stop=["\0"]), Sampling(seed=3))
    assert completion.sampling == Sampling(seed=3).model_dump() | {"max_tokens": 12, "stop": ["\0"]}


async def test_sampling_reaches_the_engine(engine: VllmEngine) -> None:
    first, again = [await engine.chat(request(), Sampling(seed=7)) for _ in range(2)]
    other = await engine.chat(request(), Sampling(seed=8))
    assert first.response_ids.tolist() == again.response_ids.tolist() != other.response_ids.tolist()
    greedy = [await engine.chat(request(), Sampling(top_k=1)) for _ in range(2)]
    assert greedy[0].response_ids.tolist() == greedy[1].response_ids.tolist()
    assert np.abs(greedy[0].logprobs).max() < 1e-3, "with one candidate left its processed logprob is 0"


async def test_more_tokens_than_the_context_means_all_the_room(engine: VllmEngine) -> None:
    """vLLM refuses `max_tokens` beyond its context length, which harnesses do not know, although the prompt fits."""
    wanted = request(max_tokens=1_000_000, stop=["e"])
    completion = await engine.chat(wanted, Sampling(seed=1))
    assert completion.finish_reason == "stop"
    assert "max_tokens" not in completion.sampling


@pytest.mark.parametrize("pairs", [16_380, 16_400, 3_000_000])
async def test_a_prompt_too_long_is_a_context_error(engine: VllmEngine, pairs: int) -> None:
    """Also one that fills the context exactly, of which vLLM says that `max_tokens` is 0."""
    wanted = request(messages=[{"role": "user", "content": "hi hi" + " hi hi" * (pairs - 1)}])
    if pairs == 16_380:
        assert len(await engine.template(wanted.messages, wanted.tools)) == engine.max_model_len
    with pytest.raises(
        EngineError, match=r"This model's maximum context length is 32768 tokens\. However, "
    ) as refusal:
        await engine.chat(wanted, Sampling())
    assert (refusal.value.status, refusal.value.kind) == (400, "context_length")


async def test_refusals_keep_vllms_words(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match="max_tokens must be at least 1, got 0") as refusal:
        await engine.chat(request(max_tokens=0), Sampling())
    assert (refusal.value.status, refusal.value.kind) == (400, "invalid_request")


@pytest.mark.parametrize("path", ["chat", "generate"])
async def test_cancelling_stops_the_engines_work(path: Literal["chat", "generate"], vllm_server: VllmServer) -> None:
    """Guards also against tokens that vLLM sampled and that the record of a call does not know."""
    engine = EndlessEngine(VllmOptions(url=vllm_server.url, path=path))
    await engine.start()
    url = vllm_server.url
    await engine.chat(request(messages=[LONG_MESSAGE], max_tokens=1), Sampling())  # a slow engine finds it in its cache
    before = await asyncio.to_thread(sampled_tokens, url)
    received = Received()
    with slow_engine(url):
        asked = request(messages=[LONG_MESSAGE], max_tokens=None)
        call = asyncio.create_task(engine.chat(asked, Sampling(), received.add))
        await asyncio.to_thread(wait_until, lambda: sampled_tokens(url) > before)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.to_thread(wait_until, lambda: running_requests(url) == 0)
    sampled = await asyncio.to_thread(sampled_tokens, url) - before
    assert received.engine_tokens == len(received.response_ids) == len(received.logprobs) == sampled < ENDLESS
    await engine.close()


async def test_an_unknown_model_is_refused_with_the_names_that_exist(vllm_server: VllmServer) -> None:
    made = VllmEngine(VllmOptions(url=vllm_server.url, model="other"))
    with pytest.raises(EngineError, match=r"engine\.model='other'; it serves: policy"):
        await made.start()
