"""Chat Completions as its own SDK speaks it."""

from __future__ import annotations

import openai
import pytest

from polar_gym.chat import ids
from polar_gym.providers.openai_chat import PROVIDER
from tests.wire.stand_in import Refusal, StandIn, assistant, completion, serving, tool_call

TEXT = "two lines\r\n and \u2028 é 🦊 "
ARGUMENTS = '{"cmd":  "echo \\u00e9"}'
MESSAGES = [{"role": "user", "content": "go"}]


def client(stand_in: StandIn, key: str = "the-key") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stand_in.base_url}/s/abc/v1", api_key=key, max_retries=0)


async def test_a_whole_answer():
    said = assistant(TEXT, "thinking", tool_call("run", ARGUMENTS), tool_call("run", "{}"))
    async with serving([PROVIDER], [completion(said)]) as stand_in, client(stand_in) as sdk:
        answer = await sdk.chat.completions.create(model="m/1", messages=MESSAGES)  # type: ignore[arg-type]
    call_id = stand_in.call_ids[0]
    message = answer.choices[0].message
    assert (answer.id, answer.model) == (f"chatcmpl-{call_id}", "m/1")
    assert (message.content, message.reasoning_content) == (TEXT, "thinking")  # type: ignore[attr-defined]
    assert message.tool_calls is not None
    assert [(call.id, call.function.arguments) for call in message.tool_calls] == [  # type: ignore[union-attr]
        (f"call_{call_id}_0", ARGUMENTS),
        (f"call_{call_id}_1", "{}"),
    ]
    assert {ids.call_of(id_) for id_ in (answer.id, *(call.id for call in message.tool_calls))} == {call_id}
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 3, 10)


@pytest.mark.parametrize("usage", [True, False])
async def test_a_streamed_answer(usage: bool):
    said = assistant(TEXT, "thinking", tool_call("run", ARGUMENTS), tool_call("look", "{}"))
    async with serving([PROVIDER], [completion(said)]) as stand_in, client(stand_in) as sdk:
        stream = await sdk.chat.completions.create(
            model="m",
            messages=MESSAGES,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": usage},
        )
        chunks = [chunk async for chunk in stream]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == TEXT
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "thinking"
    calls: dict[int, list[str]] = {}
    for part in (part for delta in deltas for part in delta.tool_calls or []):
        assert part.function is not None
        call = calls.setdefault(part.index, [part.id or "", part.function.name or "", ""])
        call[2] += part.function.arguments or ""
    minted = [ids.tool_call(stand_in.call_ids[0], index) for index in (0, 1)]
    assert calls == {0: [minted[0], "run", ARGUMENTS], 1: [minted[1], "look", "{}"]}
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert finishes == ["tool_calls"]
    assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == ([10] if usage else [])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_what_was_answered_can_be_sent_back():
    said = assistant(None, "thinking", tool_call("run", ARGUMENTS))
    async with (
        serving([PROVIDER], [completion(said), completion(assistant("done"))]) as stand_in,
        client(stand_in) as sdk,
    ):
        answer = await sdk.chat.completions.create(model="m", messages=MESSAGES)  # type: ignore[arg-type]
        message = answer.choices[0].message
        assert message.tool_calls is not None
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "ok"}
        history = [*MESSAGES, message.model_dump(), result]
        await sdk.chat.completions.create(model="m", messages=history)  # type: ignore[arg-type]
    minted = ids.tool_call(stand_in.call_ids[0], 0)
    assert stand_in.requests[1].messages[1:] == [
        {**said, "tool_calls": [{**tool_call("run", ARGUMENTS), "id": minted}]},
        {"role": "tool", "tool_call_id": minted, "content": "ok"},
    ]


async def test_the_model_listing():
    async with serving([PROVIDER], []) as stand_in, client(stand_in) as sdk:
        models = [model async for model in sdk.models.list()]
    assert [(model.id, model.max_model_len) for model in models] == [("policy", 4096)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("refusal", "error", "code"),
    [
        (Refusal(400, "context_length", "too long"), openai.BadRequestError, "context_length_exceeded"),
        (Refusal(400, "invalid_request", "no"), openai.BadRequestError, "invalid_value"),
        (Refusal(403, "permission", "no"), openai.PermissionDeniedError, "permission_denied"),
        (Refusal(404, "not_found", "no"), openai.NotFoundError, "not_found"),
        (Refusal(503, "overloaded", "busy"), openai.InternalServerError, "service_unavailable"),
        (Refusal(500, "server", "broken"), openai.InternalServerError, "server_error"),
        (Refusal(500, "server", "broken", in_stream=True), openai.APIError, "server_error"),
    ],
)
async def test_errors_become_the_sdks_own(refusal: Refusal, error: type[openai.APIError], code: str):
    async with serving([PROVIDER], [refusal]) as stand_in, client(stand_in) as sdk:
        with pytest.raises(error, match=refusal.message) as raised:
            async for _ in await sdk.chat.completions.create(model="m", messages=MESSAGES, stream=True):  # type: ignore[arg-type]
                pass
    assert raised.value.code == code


async def test_a_wrong_key_is_an_authentication_error():
    async with serving([PROVIDER], []) as stand_in, client(stand_in, key="other") as sdk:
        with pytest.raises(openai.AuthenticationError) as raised:
            await sdk.chat.completions.create(model="m", messages=MESSAGES)  # type: ignore[arg-type]
    assert raised.value.code == "invalid_api_key"


async def test_a_bad_request_names_the_field():
    async with serving([PROVIDER], []) as stand_in, client(stand_in) as sdk:
        with pytest.raises(openai.BadRequestError, match=r"n: 3 is not supported: .*; send 1"):
            await sdk.chat.completions.create(model="m", messages=MESSAGES, n=3)  # type: ignore[arg-type]
