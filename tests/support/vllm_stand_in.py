"""A stand-in for vLLM's HTTP port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from typing import Any, Literal

import orjson
import pytest
from aiohttp import web

from polar_gym.chat import ChatRequest
from polar_gym.engines.vllm import VllmEngine, VllmOptions
from polar_gym.splicing.terms import Terms
from tests.support.listening import listen, stop_listening

MODELS = {
    "object": "list",
    "data": [
        {"id": "m", "max_model_len": 4096, "root": "/weights/m"},
        {"id": "adapter", "max_model_len": 4096, "root": "/weights/adapter", "parent": "m"},
    ],
}

REQUEST = ChatRequest(model="x", messages=[{"role": "user", "content": "hi"}], tool_choice="auto")

Handler = Callable[[dict[str, Any]], web.Response]


def without_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gateways ask no engine which messages its template takes: a stand-in has no template."""

    async def nothing_to_ask(self: Terms) -> None:
        pass

    monkeypatch.setattr(Terms, Terms.probe.__name__, nothing_to_ask)


def answer(ids: list[int] | None, logprobs: int, **message: Any) -> web.Response:
    entry = {"token": "a", "logprob": -0.5, "top_logprobs": [{"logprob": -0.5}, {"logprob": -1.5}]}
    choice = {
        "message": {"role": "assistant", "content": "a", "refusal": None, "tool_calls": [], **message},
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": [entry] * logprobs},
    }
    return web.json_response({"choices": [choice], "prompt_token_ids": None if ids is None else [1, 2]})


def as_asked(body: dict[str, Any], whole: web.Response) -> web.Response:
    """Return a whole answer, or the same as a stream where the request asks for one."""
    return streamed(whole) if body.get("stream") else whole


def streamed(answered: web.Response) -> web.Response:
    """Return a whole answer as vLLM streams it: the prompt's ids, the rest of the answer, and its count of tokens."""
    assert isinstance(answered.body, bytes)
    whole = orjson.loads(answered.body)
    (choice,) = whole["choices"]
    message = choice.pop("message")
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or [])]
    chunks = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": whole["prompt_token_ids"]},
        {"choices": [{**choice, "delta": {**message, "tool_calls": calls}}]},
        {"choices": [], "usage": {"completion_tokens": len(choice.get("token_ids") or [])}},
    ]
    lines = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
    return web.Response(body=b"".join([*lines, b"data: [DONE]\n\n"]), content_type="text/event-stream")


@asynccontextmanager
async def started(handle: Handler, **options: Any) -> AsyncIterator[VllmEngine]:
    async with server(handle) as url:
        engine = VllmEngine(VllmOptions(url=url, **options))
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()


@asynccontextmanager
async def server(handle: Handler) -> AsyncIterator[str]:
    async def models(request: web.Request) -> web.Response:
        return web.json_response(MODELS)

    async def chat(request: web.Request) -> web.Response:
        body = {**await request.json(loads=orjson.loads), "headers": request.headers}
        answered = handle(body)
        whole = answered.status == 200 and answered.content_type == "application/json"
        return as_asked(body, answered) if whole else answered

    application = web.Application()
    application.router.add_get("/v1/models", models)
    application.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class LeavingServer:
    """A server that looks like vLLM, and can be away."""

    def __init__(self, model: str = "m") -> None:
        self.port = 0
        self.model = model
        self.began: float | None = 1.0
        """When its process began; None: it has no metrics."""
        self.asked = asyncio.Event()
        self.chats: list[dict[str, Any]] = []
        """The requests for answers, with their headers."""
        self.orders: list[tuple[str, dict[str, Any]]] = []
        """Requests that bring new weights."""
        self.says_of_caches = b""
        """The answer to `/reset_prefix_cache`."""
        self.die_on_the_next = False
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": 4096, "root": "/weights/m"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.began is None:
            return web.Response(status=404)
        return web.Response(text=f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {self.began}\n")

    async def _order(self, request: web.Request) -> web.Response:
        self.orders.append((request.path, await request.json()))
        return web.Response(body=self.says_of_caches if request.path == "/reset_prefix_cache" else b"")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.set()
        self.chats.append({**body, "headers": dict(request.headers)})
        if self.die_on_the_next:
            self.die_on_the_next = False
            message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
            return web.json_response({"error": {"message": message}}, status=500)
        return as_asked(body, answer([5, 6], 2))

    async def up(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/chat/completions", self._chat)
        for path in ("/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"):
            app.router.add_post(path, self._order)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        self._listening = await listen(self._runner, self.port)
        self.port = self._listening.getsockname()[1]

    async def down(self) -> None:
        assert self._runner is not None
        await stop_listening(self._runner, self._listening)


CUDA_ERROR = {"error": {"message": "CUDA error: an illegal memory access was encountered"}}


class SickServer(LeavingServer):
    """A server whose engine fails while its HTTP port goes on. A `slow` one answers requests of no session. A `dying`
    one fails in the middle of an answer, and is silent afterwards."""

    def __init__(self, how: Literal["at once", "in the middle", "silent", "slow", "dying"] = "at once") -> None:
        super().__init__()
        self.how = how
        self.healthy_calls: float = inf
        """How many calls of sessions are answered. After them, requests for answers fail."""
        self.failed = 0
        """How many requests for answers have failed."""
        self.hangs = asyncio.Event()
        """Set when it has a request that it leaves unanswered."""
        self._calls = 0
        self._gone = asyncio.Event()

    async def down(self) -> None:
        self._gone.set()
        await super().down()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        of_session = "X-Session-ID" in request.headers
        if self._calls < self.healthy_calls or (self.how == "slow" and not of_session):
            self._calls += of_session
            return await super()._chat(request)
        self.failed += 1
        if self.how in ("silent", "slow") or (self.how == "dying" and self.failed > 1):
            self.hangs.set()
            await self._gone.wait()
        if self.how == "at once":
            return web.json_response(CUDA_ERROR, status=500)
        whole = streamed(answer([5, 6], 2)).body
        assert isinstance(whole, bytes)
        begun = whole.split(b"\n\n", 1)[0]
        return web.Response(
            body=begun + b"\n\ndata: " + orjson.dumps(CUDA_ERROR) + b"\n\n", content_type="text/event-stream"
        )
