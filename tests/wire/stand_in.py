"""A gateway's outside without its inside: a real HTTP server that answers from a script through the real providers."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from polar_gym.chat import ChatRequest, Completion
from polar_gym.providers import BadRequestError, Provider, Route, routes, whole_answer
from polar_gym.schema import Message


@dataclass(frozen=True)
class Refusal:
    """A scripted error, before the status line or (`in_stream`) after it."""

    status: int
    kind: str
    message: str
    in_stream: bool = False


def completion(message: Message, finish_reason: str | None = None, prompt: int = 7, answer: int = 3) -> Completion:
    return Completion(
        message=message,
        finish_reason=finish_reason or ("tool_calls" if message.get("tool_calls") else "stop"),
        prompt_ids=np.arange(prompt, dtype=np.int32),
        response_ids=np.arange(answer, dtype=np.int32),
        logprobs=np.full(answer, -0.5, dtype=np.float32),
        sampling={},
    )


def tool_call(name: str, arguments: str) -> dict[str, Any]:
    """A tool call as an engine makes it, with an id that must never leave."""
    return {"id": "engine-own", "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: str | None = None, reasoning: str | None = None, *calls: dict[str, Any]) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


Answer = Completion | Refusal | Callable[[ChatRequest], Completion]


@dataclass
class StandIn:
    """What was asked, in order; `script` is what is answered, in order, and `afterwards` whatever comes then."""

    providers: Sequence[Provider]
    script: list[Answer]
    keep_alive: bytes | None = None
    afterwards: Answer = Refusal(400, "invalid_request", "the script has ended")
    base_url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    requests: list[ChatRequest] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    unknown_paths: list[str] = field(default_factory=list)
    key: str = "the-key"

    async def handle(self, http: web.Request) -> web.StreamResponse:
        if http.path == "/":
            return web.Response()
        for provider, route in routes(self.providers):
            if route.matches(http.method, http.path, http.headers):
                key = provider.session_key(http.headers) or http.query.get(provider.key_parameter or "")
                if key != self.key:
                    return _refused(provider, Refusal(401, "authentication", "the API key opens no session"))
                if route.operation == "models":
                    return web.json_response(provider.models("policy", 4096))
                return await self._call(http, provider, route)
        self.unknown_paths.append(f"{http.method} {http.path}")
        return web.Response(status=404)

    async def _call(self, http: web.Request, provider: Provider, route: Route) -> web.StreamResponse:
        body = orjson.loads(await http.read()) | route.said(http.path, http.query)
        counting = route.operation == "count_tokens"
        parse = provider.parse_countable if counting and provider.parse_countable else provider.parse
        try:
            request = parse(body)
        except BadRequestError as error:
            return _refused(provider, Refusal(400, error.code, str(error)))
        if counting:
            assert provider.token_count is not None
            return web.json_response(provider.token_count(11))
        self.bodies.append(body)
        self.headers.append(dict(http.headers))
        self.requests.append(request)
        answer = self.script.pop(0) if self.script else self.afterwards
        if isinstance(answer, Refusal) and not answer.in_stream:
            return _refused(provider, answer)
        call_id = uuid.uuid4().hex
        self.call_ids.append(call_id)
        if callable(answer):
            answer = answer(request)
        if request.stream:
            return await self._stream(http, provider, request, answer, call_id)
        assert isinstance(answer, Completion)
        return web.json_response(body=orjson.dumps(provider.render(request, answer, call_id)))

    async def _stream(
        self, http: web.Request, provider: Provider, request: ChatRequest, answer: Any, call_id: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(self.keep_alive or provider.keep_alive)
        if isinstance(answer, Refusal):
            await response.write(provider.error_event(answer.kind, answer.message))
        else:
            await response.write(whole_answer(provider.stream(request, call_id), answer))
        await response.write_eof()
        return response


def _refused(provider: Provider, refusal: Refusal) -> web.Response:
    return web.json_response(provider.error(refusal.status, refusal.kind, refusal.message), status=refusal.status)


@asynccontextmanager
async def serving(
    providers: Sequence[Provider], script: Sequence[Answer], *, keep_alive: bytes | None = None
) -> AsyncIterator[StandIn]:
    """A stand-in on a free loopback port. Leaving with a script that was not used up fails the test."""
    stand_in = StandIn(providers, list(script), keep_alive)
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", stand_in.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stand_in.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield stand_in
    finally:
        await runner.cleanup()
    assert not stand_in.script, f"{len(stand_in.script)} scripted answers were never asked for"
