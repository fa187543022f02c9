"""The gateway as an Anthropic client sees it: the paths that it shares with others, and those that record nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from polar_gym.gateway.node.node import Node
from tests.support.sessions import listing_engine, running_session
from tests.support.tools import ASK


def client(node: Node, key: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=node.url, api_key=key, max_retries=0)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_is_captured_once_and_counted_alike(tmp_path: Path, stream: bool) -> None:
    async with running_session(listing_engine(), tmp_path) as (node, capture), client(node, capture.key) as sdk:
        counted = await sdk.messages.count_tokens(model="policy", messages=ASK)
        assert capture.calls == []
        if stream:
            async with sdk.messages.stream(model="policy", max_tokens=99, messages=ASK) as events:
                message = await events.get_final_message()
        else:
            message = await sdk.messages.create(model="policy", max_tokens=99, messages=ASK)
        (call,) = capture.calls
    assert (call.provider, call.outcome) == ("anthropic", "delivered")
    assert message.usage.input_tokens == counted.input_tokens == len(call.prompt_ids)
    assert message.usage.output_tokens == len(call.response_ids) > 0
    assert message.id == f"msg_{call.call_id}_0"


async def test_a_stop_sequence_of_the_engine_is_named(tmp_path: Path) -> None:
    async with running_session(listing_engine(), tmp_path) as (node, capture), client(node, capture.key) as sdk:
        message = await sdk.messages.create(model="policy", max_tokens=99, messages=ASK, stop_sequences=["x", "one"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "one")
    assert [block.text for block in message.content if block.type == "text"] == ["D"]


async def test_each_client_gets_its_own_model_listing(tmp_path: Path) -> None:
    async with running_session(listing_engine(), tmp_path) as (node, capture):
        async with client(node, capture.key) as sdk:
            theirs = [model async for model in sdk.models.list()]
        async with openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key=capture.key) as other:
            others = [model async for model in other.models.list()]
    assert [(model.type, model.id) for model in theirs] == [("model", "policy")]
    assert [(model.object, model.id) for model in others] == [("model", "policy")]


async def test_a_context_that_is_full_says_so_in_anthropics_words(tmp_path: Path) -> None:
    async with running_session(listing_engine(), tmp_path) as (node, capture), client(node, capture.key) as sdk:
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 65536 maximum"):
            await sdk.messages.create(
                model="policy", max_tokens=9, messages=[{"role": "user", "content": "x " * 140_000}]
            )


async def test_an_image_that_the_model_cannot_see_is_mentioned(tmp_path: Path) -> None:
    """Guards against a session that fails as the engine's fault whenever the policy opens an image: harnesses then send
    it, and a model of text refuses."""
    tool: Any = {"name": "bash", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}
    source: Any = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    async with running_session(listing_engine(), tmp_path) as (node, capture), client(node, capture.key) as sdk:
        first = await sdk.messages.create(model="policy", max_tokens=99, messages=ASK, tools=[tool])
        (used,) = (block for block in first.content if block.type == "tool_use")
        shown: Any = [{"type": "text", "text": "logo.png:"}, {"type": "image", "source": source}]
        result: Any = {"type": "tool_result", "tool_use_id": used.id, "content": shown}
        turn: Any = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        await sdk.messages.create(model="policy", max_tokens=99, messages=turn, tools=[tool])
        call = capture.calls[1]
    assert call.messages[-1]["content"] == [
        {"type": "text", "text": "logo.png:"},
        {"type": "text", "text": "[image left out: this model reads text only]"},
    ]
    assert (call.outcome, call.continuation) == ("delivered", "spliced")


@pytest.mark.parametrize("method", ["HEAD", "GET"])
async def test_whoever_looks_whether_anyone_is_there_is_told_so(tmp_path: Path, method: str) -> None:
    """Claude Code asks before its first call, and without a key."""
    async with running_session(listing_engine(), tmp_path) as (node, capture), aiohttp.ClientSession() as http:
        async with http.request(method, node.url) as response:
            assert response.status == 200
        assert capture.calls == []
