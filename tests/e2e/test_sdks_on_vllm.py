"""The official SDKs as clients of the gateway, over a real vLLM, in both ways of streaming.

The model is random, so that nothing is asserted of what it says: only that the client has, whole or streamed, what the
record has. Where a tool or a schema is forced, vLLM's grammar makes the answer a valid one; where a test needs words
that end by themselves, a grammar says them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from google import genai
from google.genai import types
from pydantic import BaseModel

from polar_gym.chat import ChatRequest
from polar_gym.engines.vllm import VllmEngine, VllmOptions
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.proxy.capture import SessionCapture
from polar_gym.gateway.proxy.proxy import Streaming
from polar_gym.schema import HarnessSpec, ModelCall, RuntimeSpec, TaskRequest
from tests.e2e.guided_engine import OneSeed
from tests.e2e.vllm_server import VllmServer

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string", "enum": ["ls", "ls -a"]}},
    "required": ["command"],
    "additionalProperties": False,
}
COMMANDS = ({"command": "ls"}, {"command": "ls -a"})
CHAT_TOOL: Any = {"type": "function", "function": {"name": "bash", "parameters": PARAMETERS, "strict": True}}
RESPONSES_TOOL: Any = {"type": "function", "name": "bash", "parameters": PARAMETERS, "strict": True}
ANTHROPIC_TOOL: Any = {"name": "bash", "input_schema": PARAMETERS, "strict": True}
GOOGLE_TOOL = types.Tool(
    function_declarations=[types.FunctionDeclaration(name="bash", parameters_json_schema=PARAMETERS)]
)
SAYS = "List the files."
ASK: Any = [{"role": "user", "content": SAYS}]
MAX_TOKENS = 24
ROOM = 400
"""For an answer that a grammar ends."""


class Verdict(BaseModel):
    passed: bool
    files: Literal["none", "one", "many"]


class NotThinkingEngine(VllmEngine):
    """A grammar waits for the end of the thinking, which a random model does not find."""

    says: str | None = None

    def _chat_body(self, request: ChatRequest, fields: dict[str, Any]) -> dict[str, Any]:
        guided = {"structured_outputs": {"choice": [self.says]}} if self.says else {}
        return super()._chat_body(request, fields) | guided | {"chat_template_kwargs": {"enable_thinking": False}}


class WordsEngine(NotThinkingEngine):
    says = "Just words."


class CallingEngine(NotThinkingEngine):
    says = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -a"}}\n</tool_call>'


Gateway = Callable[..., Any]


@pytest.fixture(params=["synthetic", "real"])
def gateway(request: pytest.FixtureRequest, vllm_server: VllmServer, tmp_path: Path) -> Gateway:
    """Opens a node with one session whose harness is the test."""
    streaming: Streaming = request.param
    task = TaskRequest(
        task_id="t",
        instruction="x",
        runtime=RuntimeSpec(name="bubblewrap"),
        agent=HarnessSpec(name="pi"),
    )

    @asynccontextmanager
    async def opened(kind: type[VllmEngine] = VllmEngine) -> AsyncIterator[tuple[Node, SessionCapture]]:
        engine: VllmEngine = type(kind.__name__, (OneSeed, kind), {})(VllmOptions(url=vllm_server.url))
        node = Node(engine, cache=tmp_path / "cache", state=tmp_path / "state", streaming=streaming)
        async with node, node.session(task) as life:
            life.capture.running = True
            yield node, life.capture

    return opened


def openai_client(node: Node, capture: SessionCapture) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key=capture.key, max_retries=0)


def recorded(capture: SessionCapture, number: int, said: tuple[str, str], usage: tuple[int, int] | None) -> ModelCall:
    """The one new call, number `number`: it has what the client has, (reasoning, content) and token counts."""
    assert len(capture.calls) == number
    call = capture.calls[-1]
    assert call.response is not None
    assert (call.response.get("reasoning") or "", call.response["content"] or "") == said
    assert usage in (None, (len(call.prompt_ids), len(call.response_ids)))
    assert len(call.logprobs) == len(call.response_ids) > 0
    assert call.outcome == "delivered"
    return call


def called(call: ModelCall, arguments: list[Any]) -> None:
    """The forced call of `bash` that the client has is the one that was sampled, and is not trained on."""
    assert call.response is not None
    assert [json.loads(each["function"]["arguments"]) for each in call.response["tool_calls"]] == arguments
    assert arguments[0] in COMMANDS
    assert call.sampling_mismatch == ["tool_choice", "tools.strict"]


def streamed_as_recorded(call: ModelCall, arguments: list[str], whole: str) -> None:
    """With one seed the streamed call is the whole answer's, but that vLLM streams the model's own spelling of it."""
    assert call.response is not None
    assert [each["function"]["arguments"] for each in call.response["tool_calls"]] == arguments
    assert [json.loads(text) for text in arguments] == [json.loads(whole)]


def of_chat(answer: Any) -> tuple[tuple[str, str], tuple[int, int]]:
    message, usage = answer.choices[0].message, answer.usage
    said = (getattr(message, "reasoning_content", None) or "", message.content or "")
    return said, (usage.prompt_tokens, usage.completion_tokens)


async def test_openai_chat(gateway: Gateway) -> None:
    async with gateway() as (node, capture), openai_client(node, capture) as sdk:
        chat = sdk.chat.completions
        answer = await chat.create(model="m", messages=ASK, max_tokens=MAX_TOKENS)
        call = recorded(capture, 1, *of_chat(answer))
        assert answer.choices[0].finish_reason == call.finish_reason
        pieces = ["", ""]
        usage: Any = None
        async for chunk in await chat.create(
            model="m", messages=ASK, max_tokens=MAX_TOKENS, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                pieces[0] += getattr(choice.delta, "reasoning_content", None) or ""
                pieces[1] += choice.delta.content or ""
        said = (pieces[0], pieces[1])
        assert said == of_chat(answer)[0], "with one seed"
        recorded(capture, 2, said, (usage.prompt_tokens, usage.completion_tokens))


async def test_openai_chats_stream_helper(gateway: Gateway) -> None:
    async with gateway(WordsEngine) as (node, capture), openai_client(node, capture) as sdk:
        async with sdk.chat.completions.stream(
            model="m", messages=ASK, stream_options={"include_usage": True}
        ) as stream:
            deltas = [event.delta async for event in stream if event.type == "content.delta"]
            answer = await stream.get_final_completion()
        recorded(capture, 1, *of_chat(answer))
    assert "".join(deltas) == answer.choices[0].message.content == WordsEngine.says


async def test_openai_chat_tools(gateway: Gateway) -> None:
    choice: Any = {"type": "function", "function": {"name": "bash"}}
    async with gateway(NotThinkingEngine) as (node, capture), openai_client(node, capture) as sdk:
        forced: Any = {"model": "m", "max_tokens": ROOM, "tools": [CHAT_TOOL], "tool_choice": choice}
        answer = await sdk.chat.completions.create(messages=ASK, **forced)
        made: Any = answer.choices[0].message.tool_calls
        called(recorded(capture, 1, *of_chat(answer)), [json.loads(each.function.arguments) for each in made])
        async with sdk.chat.completions.stream(messages=ASK, **forced) as stream:
            streamed: Any = (await stream.get_final_completion()).choices[0].message.tool_calls
        streamed_as_recorded(
            capture.calls[1], [each.function.arguments for each in streamed], made[0].function.arguments
        )
        result: Any = {"role": "tool", "tool_call_id": made[0].id, "content": "README.md"}
        history = [*ASK, answer.choices[0].message, result]
        await sdk.chat.completions.create(model="m", messages=history, tools=[CHAT_TOOL], max_tokens=MAX_TOKENS)
    assert capture.calls[2].parent_id == capture.calls[0].call_id


def of_response(response: Any) -> tuple[tuple[str, str], tuple[int, int]]:
    thoughts = [item.summary[0].text for item in response.output if item.type == "reasoning"]
    said = ("".join(thoughts), response.output_text)
    return said, (response.usage.input_tokens, response.usage.output_tokens)


async def test_openai_responses(gateway: Gateway) -> None:
    async with gateway() as (node, capture), openai_client(node, capture) as sdk:
        response = await sdk.responses.create(model="m", input=SAYS, max_output_tokens=MAX_TOKENS)
        recorded(capture, 1, *of_response(response))
        assert response.status == ("incomplete" if capture.calls[0].finish_reason == "length" else "completed")
        stream = await sdk.responses.create(model="m", input=SAYS, max_output_tokens=MAX_TOKENS, stream=True)
        last: Any = [event async for event in stream][-1]
        assert last.type == f"response.{response.status}"
        assert of_response(last.response) == of_response(response)
        recorded(capture, 2, *of_response(last.response))


async def test_openai_responses_tools(gateway: Gateway) -> None:
    async with gateway(NotThinkingEngine) as (node, capture), openai_client(node, capture) as sdk:
        choice: Any = {"type": "function", "name": "bash"}
        forced: Any = {"model": "m", "max_output_tokens": ROOM, "tools": [RESPONSES_TOOL], "tool_choice": choice}
        response: Any = await sdk.responses.create(input=SAYS, **forced)
        called(recorded(capture, 1, *of_response(response)), [json.loads(response.output[-1].arguments)])
        async with sdk.responses.stream(input=SAYS, **forced) as events:
            streamed: Any = await events.get_final_response()
        streamed_as_recorded(capture.calls[1], [streamed.output[-1].arguments], response.output[-1].arguments)
        call = response.output[-1]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "README.md"}
        history: Any = [*ASK, *response.output, result]
        await sdk.responses.create(model="m", input=history, tools=[RESPONSES_TOOL], max_output_tokens=MAX_TOKENS)
    assert capture.calls[2].parent_id == capture.calls[0].call_id


async def test_openai_parses_what_a_schema_made(gateway: Gateway) -> None:
    """Each is sampled under a grammar, and the record says so."""
    async with gateway(NotThinkingEngine) as (node, capture), openai_client(node, capture) as sdk:
        chat: Any = {"model": "m", "messages": ASK, "max_tokens": ROOM, "response_format": Verdict}
        text: Any = {"model": "m", "input": SAYS, "max_output_tokens": ROOM, "text_format": Verdict}
        verdicts = [(await sdk.chat.completions.parse(**chat)).choices[0].message.parsed]
        async with sdk.chat.completions.stream(**chat) as stream:
            verdicts.append((await stream.get_final_completion()).choices[0].message.parsed)
        verdicts.append((await sdk.responses.parse(**text)).output_parsed)
        async with sdk.responses.stream(**text) as events:
            verdicts.append((await events.get_final_response()).output_parsed)
    for call, verdict in zip(capture.calls, verdicts, strict=True):
        assert call.response is not None
        assert Verdict.model_validate_json(call.response["content"]) == verdict
        assert call.sampling_mismatch == ["response_format"]


async def test_openai_without_asyncio(gateway: Gateway) -> None:
    def ask(url: str, key: str) -> list[Any]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as sdk:
            whole = sdk.chat.completions.create(model="m", messages=ASK, max_tokens=MAX_TOKENS)
            with sdk.chat.completions.stream(model="m", messages=ASK, stream_options={"include_usage": True}) as stream:
                streamed = stream.get_final_completion()
            response = sdk.responses.create(model="m", input=SAYS, max_output_tokens=MAX_TOKENS)
            with sdk.responses.stream(model="m", input=SAYS, max_output_tokens=MAX_TOKENS) as events:
                last = list(events)[-1]
        return [whole, streamed, response, last]

    async with gateway(WordsEngine) as (node, capture):
        whole, streamed, response, last = await asyncio.to_thread(ask, node.url, capture.key)
    assert len(capture.calls) == 4
    assert of_chat(whole)[1] == of_chat(streamed)[1]
    assert whole.choices[0].message.content == streamed.choices[0].message.content
    assert of_response(response) == of_response(last.response)
    counts = [(len(call.prompt_ids), len(call.response_ids)) for call in capture.calls]
    assert counts == [of_chat(whole)[1]] * 2 + [of_response(response)[1]] * 2


def of_message(message: Any) -> tuple[tuple[str, str], tuple[int, int]]:
    thoughts = "".join(block.thinking for block in message.content if block.type == "thinking")
    text = "".join(block.text for block in message.content if block.type == "text")
    return (thoughts, text), (message.usage.input_tokens, message.usage.output_tokens)


def anthropic_client(node: Node, capture: SessionCapture) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=node.url, api_key=capture.key, max_retries=0)


async def test_anthropic_messages_and_thinking(gateway: Gateway) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    asked: Any = {"model": "m", "messages": ASK, "max_tokens": MAX_TOKENS, "thinking": thinking}
    async with gateway() as (node, capture), anthropic_client(node, capture) as sdk:
        message = await sdk.messages.create(**asked)
        call = recorded(capture, 1, *of_message(message))
        assert message.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[str(call.finish_reason)]
        async with sdk.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        recorded(capture, 2, *of_message(streamed))
        assert of_message(streamed) == of_message(message)
        for each in (message, streamed):
            assert all(block.signature for block in each.content if block.type == "thinking")
        history = [*ASK, {"role": "assistant", "content": streamed.content}, {"role": "user", "content": "Go on."}]
        counted = await sdk.messages.count_tokens(model="m", messages=history)
        assert len(capture.calls) == 2
        again = await sdk.messages.create(**{**asked, "messages": history})
        assert again.usage.input_tokens == counted.input_tokens == len(capture.calls[2].prompt_ids)


async def test_anthropic_tools(gateway: Gateway) -> None:
    async with gateway(NotThinkingEngine) as (node, capture), anthropic_client(node, capture) as sdk:
        offered: Any = {"model": "m", "max_tokens": ROOM, "tools": [ANTHROPIC_TOOL]}
        choice: Any = {"type": "tool", "name": "bash"}
        message: Any = await sdk.messages.create(messages=ASK, tool_choice=choice, **offered)
        used = message.content[-1]
        assert message.stop_reason == "tool_use"
        called(recorded(capture, 1, *of_message(message)), [used.input])
        async with sdk.messages.stream(messages=ASK, tool_choice=choice, **offered) as stream:
            streamed: Any = await stream.get_final_message()
        assert streamed.content[-1].input == used.input
        result: Any = {"type": "tool_result", "tool_use_id": used.id, "content": "README.md"}
        history = [*ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        await sdk.messages.create(messages=history, **{**offered, "max_tokens": MAX_TOKENS})
    assert capture.calls[2].parent_id == capture.calls[0].call_id


def of_chunks(chunks: list[Any]) -> tuple[tuple[str, str], tuple[int, int]]:
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts if part.text]
    thoughts = "".join(part.text for part in parts if part.thought)
    text = "".join(part.text for part in parts if not part.thought)
    usage = chunks[-1].usage_metadata
    return (thoughts, text), (usage.prompt_token_count, usage.candidates_token_count)


@asynccontextmanager
async def google_client(node: Node, capture: SessionCapture) -> AsyncIterator[Any]:
    sdk = genai.Client(api_key=capture.key, http_options=types.HttpOptions(base_url=node.url))
    async with sdk.aio as asynchronous:
        yield asynchronous


async def test_google_generate(gateway: Gateway) -> None:
    config = types.GenerateContentConfig(max_output_tokens=MAX_TOKENS)
    async with gateway() as (node, capture), google_client(node, capture) as sdk:
        counted = await sdk.models.count_tokens(model="m", contents=SAYS)
        assert capture.calls == []
        answer = await sdk.models.generate_content(model="m", contents=SAYS, config=config)
        call = recorded(capture, 1, *of_chunks([answer]))
        assert counted.total_tokens == len(call.prompt_ids)
        reason = {"length": types.FinishReason.MAX_TOKENS, "stop": types.FinishReason.STOP}[str(call.finish_reason)]
        assert answer.candidates[0].finish_reason == reason
        chunks = [c async for c in await sdk.models.generate_content_stream(model="m", contents=SAYS, config=config)]
        recorded(capture, 2, *of_chunks(chunks))
        assert of_chunks(chunks) == of_chunks([answer])


async def test_google_chats(gateway: Gateway) -> None:
    async with gateway(WordsEngine) as (node, capture), google_client(node, capture) as sdk:
        chat = sdk.chats.create(model="m")
        recorded(capture, 1, *of_chunks([await chat.send_message(SAYS)]))
        recorded(capture, 2, *of_chunks([chunk async for chunk in await chat.send_message_stream("Go on.")]))
    assert [message["role"] for message in capture.calls[1].messages] == ["user", "assistant", "user"]
    assert capture.calls[1].parent_id == capture.calls[0].call_id


async def test_google_functions(gateway: Gateway) -> None:
    config = types.GenerateContentConfig(tools=[GOOGLE_TOOL])
    async with gateway(CallingEngine) as (node, capture), google_client(node, capture) as sdk:
        chat = sdk.chats.create(model="m", config=config)
        answer = await chat.send_message(SAYS)
        recorded(capture, 1, *of_chunks([answer]))
        result = types.Part.from_function_response(name="bash", response={"output": "README.md"})
        chunks = [chunk async for chunk in await chat.send_message_stream(result)]
        recorded(capture, 2, *of_chunks(chunks))
    for call, (made,) in zip(capture.calls, (answer.function_calls, chunks[-1].function_calls), strict=True):
        assert call.response is not None
        (sampled,) = call.response["tool_calls"]
        assert json.loads(sampled["function"]["arguments"]) == made.args == {"command": "ls -a"}
    assert capture.calls[1].parent_id == capture.calls[0].call_id
