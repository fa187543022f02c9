"""A relay in front of a real vLLM that keeps its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from tests.e2e.vllm_server import VllmServer

SHELL_CALLS = {
    "pi": '{"name": "bash", "arguments": {"command": "echo hello > hello.txt"}}',
    "codex": '{"name": "exec_command", "arguments": {"cmd": "echo hello > hello.txt"}}',
}


@asynccontextmanager
async def observed(server: VllmServer, says: list[str]) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Run a relay that keeps every chat answer as vLLM sent it, and give its URL and the answers.

    vLLM's own grammar makes a random model say `says`, one text a turn. vLLM still chooses the tokens.
    """
    answers: list[dict[str, Any]] = []

    async def relay(request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        from_harness = request.path == "/v1/chat/completions" and bool(body.get("tools"))
        if from_harness:
            turn = sum(message["role"] == "assistant" for message in body["messages"])
            body["structured_outputs"] = {"choice": [says[turn]]}
            body["chat_template_kwargs"] = {"enable_thinking": False}  # else the grammar waits for the thinking to end
        async with http.request(request.method, f"{server.url}{request.path}", json=body or None) as response:
            answer = await response.json()
            if from_harness and response.status == 200:
                answers.append(answer)
            return web.json_response(answer, status=response.status)

    app = web.Application(client_max_size=64 * 1024**2)
    app.router.add_route("*", "/{path:.*}", relay)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with aiohttp.ClientSession() as http:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", answers
    await runner.cleanup()
