"""Responses as its own SDK speaks it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from polar_gym.chat import ids
from polar_gym.harnesses.codex import HARNESS as CODEX
from polar_gym.providers.openai_chat import PROVIDER as CHAT
from polar_gym.providers.openai_responses import PROVIDER
from tests.wire.stand_in import Refusal, StandIn, assistant, completion, serving, tool_call

TEXT = "two lines\r\n and \u2028 é 🦊 "
ARGUMENTS = '{"cmd":  "echo \\u00e9"}'
PATCH = "*** Begin Patch\n*** Add File: a\n+é\n*** End Patch"
TOOLS: Any = [
    {"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}},
    {
        "type": "namespace",
        "name": "team",
        "description": "Others.",
        "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}],
    },
    {"type": "local_shell"},
    {"type": "web_search"},
]
SAID = assistant(
    TEXT,
    "thinking",
    tool_call("run", ARGUMENTS),
    tool_call("apply_patch", '{"input": "*** Begin Patch\\n*** Add File: a\\n+é\\n*** End Patch"}'),
    tool_call("team__spawn", "{}"),
    tool_call("local_shell", '{"command": ["ls", "-l"]}'),
)
KINDS = ["reasoning", "message", "function_call", "custom_tool_call", "function_call", "local_shell_call"]


def client(stand_in: StandIn, key: str = "the-key") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stand_in.base_url}/v1", api_key=key, max_retries=0)


def check_answer(response: Any, call_id: str) -> None:
    assert (response.id, response.model, response.status) == (f"resp_{call_id}", "m", "completed")
    assert response.output_text == TEXT
    assert [item.type for item in response.output] == KINDS
    reasoning, message, run, patch, spawn, shell = response.output
    assert reasoning.summary[0].text == "thinking"
    assert message.content[0].annotations == []
    assert (run.name, run.namespace, run.arguments) == ("run", None, ARGUMENTS)
    assert (patch.name, patch.input) == ("apply_patch", PATCH)
    assert (spawn.name, spawn.namespace, spawn.arguments) == ("spawn", "team", "{}")
    assert (shell.action.command, shell.action.env) == (["ls", "-l"], {})
    assert {ids.call_of(item.id) for item in response.output} == {call_id}
    assert [item.call_id for item in response.output[2:]] == [ids.tool_call(call_id, index) for index in range(4)]
    assert len({item.id for item in response.output}) == len(KINDS)
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 3, 10)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)


async def test_a_whole_answer():
    async with serving([PROVIDER], [completion(SAID)]) as stand_in, client(stand_in) as sdk:
        response = await sdk.responses.create(model="m", input="go", tools=TOOLS)
    check_answer(response, stand_in.call_ids[0])
    assert stand_in.requests[0].withheld_tools == ["web_search"]


async def test_a_streamed_answer_after_the_keep_alive_that_codex_needs():
    async with (
        serving([PROVIDER], [completion(SAID)], keep_alive=CODEX.keep_alive) as stand_in,
        client(stand_in) as sdk,
    ):
        stream = await sdk.responses.create(model="m", input="go", tools=TOOLS, stream=True)
        events: list[Any] = [event async for event in stream]
    assert events.pop(0).type == "keepalive"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in done] == KINDS
    deltas = {event.type: event.delta for event in events if event.type.endswith(".delta")}
    assert deltas["response.output_text.delta"] == TEXT
    assert deltas["response.reasoning_summary_text.delta"] == "thinking"
    assert deltas["response.custom_tool_call_input.delta"] == PATCH
    check_answer(events[-1].response, stand_in.call_ids[0])


async def test_the_sdks_own_accumulator_accepts_the_stream():
    """It insists that `response.created` is the first event: the provider's keep-alive must not be one."""
    async with (
        serving([PROVIDER], [completion(SAID)]) as stand_in,
        client(stand_in) as sdk,
        sdk.responses.stream(model="m", input="go", tools=TOOLS) as stream,
    ):
        async for _ in stream:
            pass
        response = await stream.get_final_response()
    check_answer(response, stand_in.call_ids[0])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cut_answer_is_incomplete(stream: bool):
    async with serving([PROVIDER], [completion(assistant("half"), "length")]) as stand_in, client(stand_in) as sdk:
        answer: Any = await sdk.responses.create(model="m", input="go", max_output_tokens=3, stream=stream)
        if stream:
            answer = [event async for event in answer][-1].response
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert stand_in.requests[0].max_tokens == 3


async def test_what_was_answered_can_be_sent_back():
    async with (
        serving([PROVIDER], [completion(SAID), completion(assistant("done"))]) as stand_in,
        client(stand_in) as sdk,
    ):
        first: Any = await sdk.responses.create(model="m", input="go", tools=TOOLS)
        outputs = [
            {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "1"},
            {"type": "custom_tool_call_output", "call_id": first.output[3].call_id, "output": "2"},
            {"type": "function_call_output", "call_id": first.output[4].call_id, "output": "3"},
            {"type": "local_shell_call_output", "id": first.output[5].call_id, "output": "4"},
        ]
        history = [{"role": "user", "content": "go"}, *(item.model_dump() for item in first.output), *outputs]
        await sdk.responses.create(model="m", input=history, tools=TOOLS)  # type: ignore[arg-type]
    minted = [ids.tool_call(stand_in.call_ids[0], index) for index in range(4)]
    calls = [{**call, "id": id_} for call, id_ in zip(SAID["tool_calls"], minted, strict=True)]
    assert stand_in.requests[1].messages == [
        {"role": "user", "content": "go"},
        {**SAID, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": id_, "content": str(n)} for n, id_ in enumerate(minted, 1)),
    ]


async def test_tokens_are_counted():
    async with serving([CHAT, PROVIDER], []) as stand_in, client(stand_in) as sdk:
        counted = await sdk.responses.input_tokens.count(model="m", input="go")
    assert counted.input_tokens == 11


@pytest.mark.parametrize(
    ("refusal", "error", "code"),
    [
        (Refusal(400, "context_length", "too long"), openai.BadRequestError, "context_length_exceeded"),
        (Refusal(503, "overloaded", "busy"), openai.InternalServerError, "service_unavailable"),
    ],
)
async def test_errors_become_the_sdks_own(refusal: Refusal, error: type[openai.APIError], code: str):
    async with serving([PROVIDER], [refusal]) as stand_in, client(stand_in) as sdk:
        with pytest.raises(error, match=refusal.message) as raised:
            await sdk.responses.create(model="m", input="go")
    assert raised.value.code == code


async def test_an_error_after_the_status_line_fails_the_response():
    async with (
        serving([PROVIDER], [Refusal(500, "server", "broken", in_stream=True)]) as stand_in,
        client(stand_in) as sdk,
    ):
        stream = await sdk.responses.create(model="m", input="go", stream=True)
        events: list[Any] = [event async for event in stream]
    assert [event.type for event in events] == ["response.failed"]
    assert (events[0].response.error.code, events[0].response.error.message) == ("server_error", "broken")


async def test_a_wrong_key_is_an_authentication_error():
    async with serving([PROVIDER], []) as stand_in, client(stand_in, key="other") as sdk:
        with pytest.raises(openai.AuthenticationError):
            await sdk.responses.create(model="m", input="go")


async def test_an_earlier_response_cannot_be_named():
    async with serving([PROVIDER], []) as stand_in, client(stand_in) as sdk:
        with pytest.raises(openai.BadRequestError, match="send the whole conversation") as raised:
            await sdk.responses.create(model="m", input="go", previous_response_id="resp_1")
    assert raised.value.code == "previous_response_not_found"
