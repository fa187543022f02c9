"""A relay in front of a real vLLM that keeps its answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from polar_gym.schema import ModelCall
from tests.e2e.vllm_server import VllmServer

SHELL_CALLS = {
    "pi": '{"name": "bash", "arguments": {"command": "echo hello > hello.txt"}}',
    "codex": '{"name": "exec_command", "arguments": {"cmd": "echo hello > hello.txt"}}',
}


def whole(stream: bytes) -> dict[str, Any]:
    """Return the ids and logprobs of a streamed answer, in the form of a whole answer."""
    lines = [line[len(b"data: ") :] for line in stream.splitlines() if line.startswith(b"data: {")]
    first, *chunks = [json.loads(line) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return {
        "prompt_token_ids": first["prompt_token_ids"],
        "choices": [
            {
                "token_ids": [token for choice in choices for token in choice["token_ids"]],
                "logprobs": {"content": [entry for choice in choices for entry in choice["logprobs"]["content"]]},
                "finish_reason": choices[-1]["finish_reason"],
            }
        ],
    }


@asynccontextmanager
async def observed(
    server: VllmServer, says: list[str], in_mid_call: Callable[[int], Awaitable[None]] | None = None
) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Run a relay that keeps every chat answer as vLLM sent it, and give its URL and the answers.

    vLLM's own grammar makes a random model say `says`, one text a turn. vLLM still chooses the tokens. `in_mid_call` is
    called with the number of the turn, after the first chunk of its answer.
    """
    answers: list[dict[str, Any]] = []

    async def relay(request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        from_harness = request.path == "/v1/chat/completions" and bool(body.get("tools"))
        turn = 0
        if from_harness:
            turn = sum(message["role"] == "assistant" for message in body["messages"])
            body["structured_outputs"] = {"choice": [says[turn]]}
            body["chat_template_kwargs"] = {"enable_thinking": False}  # else the grammar waits for the thinking to end
        async with http.request(request.method, f"{server.url}{request.path}", json=body or None) as response:
            raw = await response.content.readany()
            if from_harness and in_mid_call is not None:
                await in_mid_call(turn)
            raw += await response.read()
            if from_harness and response.status == 200:
                answers.append(whole(raw))
            return web.Response(body=raw, status=response.status, content_type=response.content_type)

    app = web.Application(client_max_size=64 * 1024**2)
    app.router.add_route("*", "/{path:.*}", relay)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with aiohttp.ClientSession() as http:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", answers
    await runner.cleanup()


def check_answered(calls: Sequence[ModelCall], answers: Sequence[Mapping[str, Any]]) -> None:
    """Check that the records of the calls hold the ids and logprobs of the engine's answers."""
    for call, answer in zip(calls, answers, strict=True):
        (choice,) = answer["choices"]
        assert call.prompt_ids.tolist() == answer["prompt_token_ids"]
        assert call.response_ids.tolist() == choice["token_ids"]
        assert call.logprobs.tolist() == pytest.approx([entry["logprob"] for entry in choice["logprobs"]["content"]])
