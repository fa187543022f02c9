"""A server that is asked whether it holds calls to a grammar of its own. The forms are those of vLLM 0.32."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polar_gym.engines import EngineError
from polar_gym.engines.http import Http
from polar_gym.engines.vllm.own_grammar import own_grammar

PLAIN = {"temperature": 1.0, "stop": [], "max_tokens": 32619, "output_kind": 2}
TAG = PLAIN | {"structured_outputs": {"json": None, "grammar": None, "structural_tag": '{"type": "structural_tag"}'}}
LARK = PLAIN | {"structured_outputs": {"json": None, "grammar": "start: body", "structural_tag": None}}
SWITCHED_OFF = {
    "error": {
        "message": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
        "type": "PermissionDeniedError",
        "param": None,
        "code": 403,
    }
}


@asynccontextmanager
async def server(render: Callable[[dict[str, Any]], web.Response]) -> AsyncIterator[Http]:
    async def handle(request: web.Request) -> web.Response:
        return render(await request.json())

    application = web.Application()
    application.router.add_post("/v1/chat/completions/render", handle)
    async with TestServer(application) as front:
        http = Http("vLLM", str(front.make_url("/")), None, 0)
        http.open()
        try:
            yield http
        finally:
            await http.close()


@pytest.mark.parametrize(
    ("without_tools", "with_tools", "found"), [(PLAIN, PLAIN, "none"), (PLAIN, TAG, "tools"), (LARK, LARK, "all")]
)
async def test_a_rendered_request_shows_the_grammar(
    without_tools: dict[str, Any], with_tools: dict[str, Any], found: str
) -> None:
    """The last is the form of Mistral's tokenizers."""

    def render(body: dict[str, Any]) -> web.Response:
        return web.json_response(
            {"token_ids": [1], "sampling_params": with_tools if "tools" in body else without_tools}
        )

    async with server(render) as http:
        assert await own_grammar(http, "m") == found


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (403, SWITCHED_OFF, "Scale-out endpoints are disabled"),
        (404, {"detail": "Not Found"}, "Not Found"),
        (200, [[], []], "unknown form"),
        (200, {"sampling_params": None}, "unknown form"),
    ],
    ids=["switched off", "no such route", "a list", "no parameters"],
)
async def test_a_server_that_cannot_be_asked(status: int, answer: Any, words: str) -> None:
    """Guards against advice about the API key where only a flag is missing."""
    async with server(lambda body: web.json_response(answer, status=status)) as http:
        with pytest.raises(EngineError, match=words) as refusal:
            await own_grammar(http, "m")
    assert refusal.value.status == 404
    assert "api_key" not in refusal.value.message
