"""Messages as its own SDK speaks it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from polar_gym.chat import ids
from polar_gym.providers.anthropic import PROVIDER
from polar_gym.providers.openai_chat import PROVIDER as CHAT
from tests.wire.stand_in import Refusal, StandIn, assistant, completion, serving, tool_call

TEXT = "two lines\r\n and \u2028 é 🦊 "
TOOLS: Any = [
    {"name": "run", "description": "Runs.", "input_schema": {"type": "object"}},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 2},
]
ASK: Any = [{"role": "user", "content": "go"}]
SAID = assistant(TEXT, " thinking\n", tool_call("run", '{"cmd":  "echo \\u00e9"}'), tool_call("bash", ""))


def client(stand_in: StandIn, key: str = "the-key") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=stand_in.base_url, api_key=key, max_retries=0)


def check_answer(message: Message, call_id: str) -> None:
    assert (message.id, message.type, message.role) == (f"msg_{call_id}_0", "message", "assistant")
    assert (message.model, message.stop_reason, message.stop_sequence) == ("m", "tool_use", None)
    blocks: list[Any] = list(message.content)
    assert [block.type for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, run, bash = blocks
    assert thinking.thinking == " thinking\n"
    assert ids.carried(thinking.signature) == (call_id, " thinking\n")
    assert text.text == TEXT
    assert (run.id, run.name, run.input) == (ids.tool_call(call_id, 0), "run", {"cmd": "echo é"})
    assert (bash.id, bash.name, bash.input) == (ids.tool_call(call_id, 1), "bash", {})
    assert (message.usage.input_tokens, message.usage.output_tokens) == (7, 3)


async def test_a_whole_answer():
    async with serving([PROVIDER], [completion(SAID)]) as stand_in, client(stand_in) as sdk:
        message = await sdk.messages.create(model="m", max_tokens=9, messages=ASK, tools=TOOLS)
    check_answer(message, stand_in.call_ids[0])
    assert stand_in.requests[0].withheld_tools == ["web_search_20250305"]
    assert stand_in.requests[0].max_tokens == 9


async def test_a_streamed_answer_is_the_same_as_a_whole_one():
    async with (
        serving([PROVIDER], [completion(SAID)]) as stand_in,
        client(stand_in) as sdk,
        sdk.messages.stream(model="m", max_tokens=9, messages=ASK, tools=TOOLS) as stream,
    ):
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    check_answer(message, stand_in.call_ids[0])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(message.content)
    assert "signature" in kinds


async def test_the_beta_namespace_is_the_same_endpoint():
    """It asks at `/v1/messages?beta=true`, as Claude Code does."""
    async with serving([PROVIDER], [completion(assistant("hello"))]) as stand_in, client(stand_in) as sdk:
        message = await sdk.beta.messages.create(model="m", max_tokens=9, messages=ASK, betas=["files-api-2025-04-14"])
    assert message.content[0].type == "text"


async def test_what_was_answered_can_be_sent_back():
    script = [completion(SAID), completion(assistant("done"))]
    async with serving([PROVIDER], script) as stand_in, client(stand_in) as sdk:
        first = await sdk.messages.create(model="m", max_tokens=9, messages=ASK, tools=TOOLS)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "ok"}
            for block in first.content
            if block.type == "tool_use"
        ]
        history: Any = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        await sdk.messages.create(model="m", max_tokens=9, messages=history, tools=TOOLS)
    minted = [ids.tool_call(stand_in.call_ids[0], index) for index in range(2)]
    asked, said, *results = stand_in.requests[1].messages
    assert asked == {"role": "user", "content": "go"}
    assert (said["content"], said["reasoning"]) == (TEXT, " thinking\n")
    arguments = ['{"cmd": "echo é"}', "{}"]
    assert [(call["id"], call["function"]["arguments"]) for call in said["tool_calls"]] == list(
        zip(minted, arguments, strict=True)
    )
    assert results == [{"role": "tool", "tool_call_id": id_, "content": "ok"} for id_ in minted]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cut_answer_says_so(stream: bool):
    async with serving([PROVIDER], [completion(assistant("half"), "length")]) as stand_in, client(stand_in) as sdk:
        if stream:
            async with sdk.messages.stream(model="m", max_tokens=3, messages=ASK) as events:
                message = await events.get_final_message()
        else:
            message = await sdk.messages.create(model="m", max_tokens=3, messages=ASK)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 3


async def test_a_stop_sequence_is_named():
    async with (
        serving([PROVIDER], [replace(completion(assistant("half")), stop_sequence="END")]) as stand_in,
        client(stand_in) as sdk,
        sdk.messages.stream(model="m", max_tokens=3, messages=ASK, stop_sequences=["END"]) as events,
    ):
        message = await events.get_final_message()
    assert stand_in.requests[0].stop == ["END"]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


async def test_an_empty_answer_has_no_blocks():
    async with (
        serving([PROVIDER], [completion(assistant(""))]) as stand_in,
        client(stand_in) as sdk,
        sdk.messages.stream(model="m", max_tokens=3, messages=ASK) as stream,
    ):
        message = await stream.get_final_message()
    assert (message.content, message.stop_reason) == ([], "end_turn")


async def test_tokens_are_counted_without_a_limit():
    async with serving([PROVIDER], []) as stand_in, client(stand_in) as sdk:
        counted = await sdk.messages.count_tokens(model="m", messages=ASK, tools=TOOLS, system="s")
    assert counted.input_tokens == 11


@pytest.mark.parametrize("providers", [[PROVIDER, CHAT], [CHAT, PROVIDER]])
async def test_the_model_listing_follows_the_client(providers: list[Any]):
    """Both APIs list models at the same path."""
    async with serving(providers, []) as stand_in, client(stand_in) as sdk:
        models = [model async for model in sdk.models.list()]
    assert [(model.id, model.display_name, model.max_input_tokens) for model in models] == [("policy", "policy", 4096)]


LONG = "This model's maximum context length is 4096 tokens. However, your prompt contains 5000 input tokens, which is."
ERRORS = [
    (Refusal(400, "context_length", LONG), anthropic.BadRequestError, "prompt is too long: 5000 tokens > 4096 maximum"),
    (Refusal(400, "invalid_request", "no"), anthropic.BadRequestError, "no"),
    (Refusal(403, "permission", "no"), anthropic.PermissionDeniedError, "no"),
    (Refusal(404, "not_found", "no"), anthropic.NotFoundError, "no"),
    (Refusal(413, "invalid_request", "big"), anthropic.RequestTooLargeError, "big"),
    (Refusal(429, "overloaded", "slow down"), anthropic.RateLimitError, "slow down"),
    (Refusal(529, "overloaded", "busy"), anthropic.OverloadedError, "busy"),
    (Refusal(500, "server", "broken"), anthropic.InternalServerError, "broken"),
    (Refusal(500, "server", "broken", in_stream=True), anthropic.APIStatusError, "broken"),
    (Refusal(503, "overloaded", "busy", in_stream=True), anthropic.APIStatusError, "busy"),
]
TYPES = {
    "context_length": "invalid_request_error",
    "invalid_request": "invalid_request_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "overloaded": "overloaded_error",
    "server": "api_error",
}


@pytest.mark.parametrize(("refusal", "error", "message"), ERRORS)
async def test_errors_become_the_sdks_own(refusal: Refusal, error: type[anthropic.APIStatusError], message: str):
    async with serving([PROVIDER], [refusal]) as stand_in, client(stand_in) as sdk:
        with pytest.raises(error) as raised:
            async for _ in await sdk.messages.create(model="m", max_tokens=9, messages=ASK, stream=True):
                pass
    body: Any = raised.value.body
    kind = {413: "request_too_large", 429: "rate_limit_error"}.get(refusal.status, TYPES[refusal.kind])
    assert body["error"] == {"type": kind, "message": message}


async def test_a_wrong_key_is_an_authentication_error():
    async with serving([PROVIDER], []) as stand_in, client(stand_in, key="other") as sdk:
        with pytest.raises(anthropic.AuthenticationError):
            await sdk.messages.create(model="m", max_tokens=9, messages=ASK)


async def test_a_bearer_key_opens_the_session_too():
    async with (
        serving([PROVIDER], [completion(assistant("hello"))]) as stand_in,
        anthropic.AsyncAnthropic(base_url=stand_in.base_url, auth_token="the-key") as sdk,
    ):
        await sdk.messages.create(model="m", max_tokens=9, messages=ASK)


async def test_a_bad_request_names_the_field():
    async with serving([PROVIDER], []) as stand_in, client(stand_in) as sdk:
        with pytest.raises(anthropic.BadRequestError, match=r"max_tokens: expected an integer above 0, got 0"):
            await sdk.messages.create(model="m", max_tokens=0, messages=ASK)
