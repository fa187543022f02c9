"""A chat endpoint that judges by a script: a real HTTP server, in the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

GOOD = {"criteria": {"small": 1.0, "clear": 0.5}, "calls": []}


@dataclass(frozen=True)
class Whole:
    """The body of a whole response, which need be no completion."""

    body: Any
    status: int = 200


class Judge:
    """Gives its answers in turn, the last one for ever, and keeps the requests."""

    def __init__(self, *answers: Any) -> None:
        """Take answers: objects to give as JSON, texts, or `Whole`."""
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.usage: dict[str, int] | None = {"total_tokens": 100}
        self.url = ""
        self.busy: str | None = None
        """A request with this text is answered only at the end of the test."""
        self.ended = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(orjson.loads(await request.read()))
        self.headers.append(request.headers.get("Authorization"))
        if self.busy is not None and self.busy in str(self.asked[-1]["messages"]):
            await self.ended.wait()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Whole):
            return web.json_response(answer.body, status=answer.status)
        text = answer if isinstance(answer, str | None) else orjson.dumps(answer).decode()
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], **({"usage": self.usage} if self.usage else {})})


@asynccontextmanager
async def judging(*answers: Any) -> AsyncIterator[Judge]:
    judge = Judge(*answers)
    application = web.Application()
    application.router.add_post("/v1/chat/completions", judge.handle)
    async with TestServer(application) as server:
        judge.url = str(server.make_url("/v1"))
        try:
            yield judge
        finally:
            judge.ended.set()
