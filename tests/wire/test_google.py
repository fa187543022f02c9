"""Google's own SDK as the client of the provider, over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from google import genai
from google.genai import errors, types

from polar_gym.chat import ids
from polar_gym.providers.google import PROVIDER
from tests.wire.stand_in import Refusal, StandIn, assistant, completion, serving, tool_call

SAID = assistant(
    "I shall.\n", "thinking\n\n", tool_call("run", '{"n": 1, "text": "é"}'), tool_call("run", '{"n": 2, "text": ""}')
)
TOOLS: Any = [
    types.Tool(
        function_declarations=[
            types.FunctionDeclaration(
                name="run",
                description="Runs.",
                parameters=types.Schema(
                    type=types.Type.OBJECT,
                    properties={
                        "n": types.Schema(type=types.Type.INTEGER, nullable=True),
                        "text": types.Schema(type=types.Type.STRING),
                    },
                    required=["text"],
                ),
            )
        ]
    )
]


@asynccontextmanager
async def client(stand_in: StandIn, *, key: str | None = None, vertex: bool = False) -> AsyncIterator[Any]:
    sdk = genai.Client(
        api_key=key or stand_in.key, vertexai=vertex, http_options=types.HttpOptions(base_url=stand_in.base_url)
    )
    async with sdk.aio as asynchronous:
        yield asynchronous


@pytest.mark.parametrize("vertex", [False, True])
async def test_a_whole_answer(vertex: bool):
    async with serving([PROVIDER], [completion(SAID)]) as stand_in, client(stand_in, vertex=vertex) as sdk:
        config = types.GenerateContentConfig(
            tools=TOOLS,
            system_instruction="be good",
            max_output_tokens=9,
            stop_sequences=["END"],
            temperature=0.3,
            thinking_config=types.ThinkingConfig(include_thoughts=True),
            tool_config=types.ToolConfig(
                function_calling_config=types.FunctionCallingConfig(
                    mode=types.FunctionCallingConfigMode.ANY, allowed_function_names=["run"]
                )
            ),
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        )
        answer = await sdk.models.generate_content(model="m", contents="go", config=config)
    (request,), (call_id,) = stand_in.requests, stand_in.call_ids
    assert request.messages == [{"role": "system", "content": "be good"}, {"role": "user", "content": "go"}]
    assert (request.model, request.max_tokens, request.stop, request.stream) == ("m", 9, ["END"], False)
    assert request.tool_choice == {"type": "function", "function": {"name": "run"}}
    assert request.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"n": {"type": ["integer", "null"]}, "text": {"type": "string"}},
        "required": ["text"],
    }
    thought, text, first, second = answer.candidates[0].content.parts
    assert (thought.text, thought.thought, text.text) == ("thinking\n\n", True, "I shall.\n")
    assert [call.id for call in answer.function_calls] == [ids.tool_call(call_id, 0), ids.tool_call(call_id, 1)]
    assert first.function_call.args == {"n": 1, "text": "é"}
    assert first.thought_signature is not None
    assert second.thought_signature is None
    assert (answer.candidates[0].finish_reason, answer.model_version) == (types.FinishReason.STOP, "m")
    usage = answer.usage_metadata
    assert (usage.prompt_token_count, usage.candidates_token_count, usage.total_token_count) == (7, 3, 10)
    assert ids.call_of(answer.response_id) == call_id


async def test_a_streamed_answer_after_a_keep_alive_is_the_whole_one():
    async with serving([PROVIDER], [completion(SAID)]) as stand_in, client(stand_in) as sdk:
        chunks = [chunk async for chunk in await sdk.models.generate_content_stream(model="m", contents="go")]
    (call_id,) = stand_in.call_ids
    assert stand_in.requests[0].stream
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
    assert [(part.text, part.thought) for part in parts[:2]] == [("thinking\n\n", True), ("I shall.\n", None)]
    assert [part.function_call.id for part in parts[2:]] == [ids.tool_call(call_id, 0), ids.tool_call(call_id, 1)]
    assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP
    assert chunks[-1].usage_metadata.total_token_count == 10


@pytest.mark.parametrize("streams", [False, True])
async def test_what_was_answered_comes_back_in_a_chat(streams: bool):
    """The SDK keeps each chunk as a content of its own, and throws a turn with an empty one away."""
    script = [completion(SAID), completion(assistant("done", "hm\n")), completion(assistant("bye"))]
    async with serving([PROVIDER], script) as stand_in, client(stand_in) as sdk:
        chat = sdk.chats.create(model="m", config=types.GenerateContentConfig(tools=TOOLS))

        async def say(message: Any) -> None:
            if streams:
                async for _ in await chat.send_message_stream(message):
                    pass
            else:
                await chat.send_message(message)

        await say("go")
        results = [{"output": "one\n"}, {"result": {"n": 2}}]
        await say([types.Part.from_function_response(name="run", response=response) for response in results])
        await say("thanks")
    minted = [ids.tool_call(stand_in.call_ids[0], index) for index in (0, 1)]
    calls = [{**call, "id": id_} for call, id_ in zip(SAID["tool_calls"], minted, strict=True)]
    assert stand_in.requests[2].messages == [
        {"role": "user", "content": "go"},
        {**SAID, "tool_calls": calls},
        {"role": "tool", "tool_call_id": minted[0], "content": "one\n"},
        {"role": "tool", "tool_call_id": minted[1], "content": '{"result": {"n": 2}}'},
        {"role": "assistant", "content": "done", "reasoning": "hm\n"},
        {"role": "user", "content": "thanks"},
    ]


async def test_the_sdk_calls_functions_by_itself():
    def run(n: int, text: str) -> str:
        return text * n

    script = [
        completion(assistant(None, None, tool_call("run", '{"n": 2, "text": "é"}'))),
        completion(assistant("done")),
    ]
    async with serving([PROVIDER], script) as stand_in, client(stand_in) as sdk:
        answer = await sdk.models.generate_content(
            model="m", contents="go", config=types.GenerateContentConfig(tools=[run])
        )
    assert answer.text == "done"
    made, result = stand_in.requests[1].messages[1:]
    assert result["tool_call_id"] == made["tool_calls"][0]["id"] == ids.tool_call(stand_in.call_ids[0], 0)
    assert result["content"] == '{"result": "éé"}'


async def test_an_image_and_a_json_answer():
    async with serving([PROVIDER], [completion(assistant('{"n": 3}'))]) as stand_in, client(stand_in) as sdk:
        image = types.Part.from_bytes(data=b"\xff\xfe\xfd\xfc", mime_type="image/png")
        schema = {"type": "OBJECT", "properties": {"n": {"type": "INTEGER"}}}
        config = types.GenerateContentConfig(response_mime_type="application/json", response_schema=schema)
        answer = await sdk.models.generate_content(model="m", contents=["what?", image], config=config)
    assert answer.text == '{"n": 3}'
    (request,) = stand_in.requests
    assert request.messages[0]["content"] == [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,//79/A=="}},
    ]
    wanted = {"name": "response", "schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    assert request.response_format == {"type": "json_schema", "json_schema": wanted}


async def test_a_cut_off_answer_says_so():
    async with serving([PROVIDER], [completion(assistant("so"), "length")]) as stand_in, client(stand_in) as sdk:
        answer = await sdk.models.generate_content(model="m", contents="go")
    assert (answer.text, answer.candidates[0].finish_reason) == ("so", types.FinishReason.MAX_TOKENS)


async def test_tokens_are_counted_and_models_are_listed():
    async with serving([PROVIDER], []) as stand_in, client(stand_in) as sdk:
        assert (await sdk.models.count_tokens(model="m", contents="go")).total_tokens == 11
        (model,) = [model async for model in await sdk.models.list(config={"query_base": True})]
    assert (model.name, model.input_token_limit) == ("models/policy", 4096)
    assert stand_in.requests == []


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("refusal", "error", "status"),
    [
        (Refusal(400, "invalid_request", "bad"), errors.ClientError, "INVALID_ARGUMENT"),
        (Refusal(429, "overloaded", "busy"), errors.ClientError, "RESOURCE_EXHAUSTED"),
        (Refusal(503, "overloaded", "busy"), errors.ServerError, "UNAVAILABLE"),
    ],
)
async def test_errors_become_the_sdks_own(refusal: Refusal, error: type[errors.APIError], status: str, streams: bool):
    async with serving([PROVIDER], [refusal]) as stand_in, client(stand_in) as sdk:

        async def ask() -> None:
            if streams:
                await anext(await sdk.models.generate_content_stream(model="m", contents="go"))
            else:
                await sdk.models.generate_content(model="m", contents="go")

        with pytest.raises(error, match=refusal.message) as raised:
            await ask()
    assert (raised.value.code, raised.value.status) == (refusal.status, status)


async def test_an_error_after_the_status_line_is_an_error_too():
    refusal = Refusal(503, "overloaded", "busy", in_stream=True)
    async with serving([PROVIDER], [refusal]) as stand_in, client(stand_in) as sdk:
        with pytest.raises(errors.ServerError, match="busy") as raised:
            async for _ in await sdk.models.generate_content_stream(model="m", contents="go"):
                pass
    assert (raised.value.code, raised.value.status) == (503, "UNAVAILABLE")


async def test_a_wrong_key_is_refused():
    async with serving([PROVIDER], []) as stand_in, client(stand_in, key="other") as sdk:
        with pytest.raises(errors.ClientError) as raised:
            await sdk.models.generate_content(model="m", contents="go")
    assert raised.value.status == "UNAUTHENTICATED"


async def test_the_key_may_be_in_the_url_and_a_stream_must_be_of_events():
    url = "v1beta/models/m:streamGenerateContent?key=the-key"
    body = {"contents": [{"parts": [{"text": "go"}]}]}
    async with serving([PROVIDER], [completion(assistant("done"))]) as stand_in, aiohttp.ClientSession() as http:
        async with http.post(f"{stand_in.base_url}/{url}&alt=sse", json=body) as response:
            assert "done" in await response.text()
        async with http.post(f"{stand_in.base_url}/{url}", json=body) as response:
            assert (response.status, "send `?alt=sse`" in await response.text()) == (400, True)
