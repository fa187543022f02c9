"""A stand-in for a NeMo Gym resources server, which counts in sessions that a cookie names.

It speaks as NeMo Gym's `example_session_state_mgmt` does, and answers what a test wants instead.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

TOOLS = [
    {
        "type": "function",
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    },
    {"type": "function", "name": "total", "description": "", "parameters": None},
]


def row(expected: int, **fields: Any) -> dict[str, Any]:
    """Return a task: to count up to `expected`, from 3."""
    params = {"input": [{"role": "user", "content": f"Count up to {expected}."}], "tools": TOOLS}
    return {"responses_create_params": params, "initial": 3, "expected": expected, **fields}


class Counting:
    def __init__(self) -> None:
        self.url = ""
        self.totals: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        """The bodies that `/verify` got."""
        self.broken: dict[str, tuple[int, Any]] = {}
        """Path -> the status and body of every answer there, instead of the true one."""
        self.slow: str | None = None
        """The path whose answers never come."""
        self.dropped: str | None = None
        """The path whose next connection is closed without an answer."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        session = request.cookies.get("session") or uuid.uuid4().hex
        if request.path == self.slow:
            await asyncio.Event().wait()
        if request.path == self.dropped and request.transport is not None:
            self.dropped = None
            request.transport.abort()
            return web.Response()
        status, answer = self.broken.get(request.path) or self._answer(request.path, session, body)
        whole = isinstance(answer, bytes)
        given = web.Response(body=answer, status=status) if whole else web.json_response(answer, status=status)
        given.set_cookie("session", session)
        return given

    def _answer(self, path: str, session: str, body: Any) -> tuple[int, Any]:
        match path:
            case "/seed_session":
                self.totals[session] = body["initial"]
                return 200, {}
            case "/add":
                if not isinstance(body.get("count"), int):
                    return 422, {"detail": "count: an integer is needed"}
                self.totals[session] += body["count"]
                return 200, {"success": True}
            case "/total":
                return 200, {"total": self.totals[session]}
            case "/verify":
                self.verified.append(body)
                items = body["response"]["output"]
                if any("count" not in item["arguments"] for item in items if item.get("name") == "add"):
                    return 500, "KeyError('count')"
                return 200, {**body, "reward": float(self.totals[session] == body["expected"]), "exact": True}
        return 404, {}


@asynccontextmanager
async def counting() -> AsyncIterator[Counting]:
    server = Counting()
    application = web.Application()
    application.router.add_post("/{path}", server.handle)
    async with TestServer(application, handler_cancellation=True) as serving:
        server.url = str(serving.make_url("")).rstrip("/")
        yield server
