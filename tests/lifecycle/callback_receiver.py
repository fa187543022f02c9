"""A receiver of callbacks as a trainer would write one: it verifies, and counts each idempotency key once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from polar_gym.service.callbacks import KEY_HEADER, ForgedCallbackError, verify
from tests.support.listening import listen, stop_listening


class Receiver:
    """`async with Receiver(key)`. `broken` says of each request whether the receiver fails before it has stored it."""

    def __init__(self, key: str, broken: Callable[[int], bool] = lambda number: False) -> None:
        self._key = key
        self._broken = broken
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.results: dict[str, dict[str, Any]] = {}
        self.received = Counter[str]()
        self.forged = 0
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> Receiver:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/results", self._receive)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._listening = await listen(self._runner)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/results"
        return self

    async def __aexit__(self, *exception: object) -> None:
        await stop_listening(self._runner, self._listening)

    async def _receive(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.requests.append((dict(request.headers), body))
        if self._broken(len(self.requests)):
            return web.Response(status=500)
        try:
            key = verify(self._key, request.headers, body)
        except ForgedCallbackError:
            self.forged += 1
            return web.Response(status=401)
        assert key == request.headers[KEY_HEADER]
        async with self._changed:
            self.received[key] += 1
            self.results.setdefault(key, orjson.loads(body))
            self._changed.notify_all()
        return web.Response()

    async def wait_for(self, count: int, seconds: float = 30) -> None:
        """Until there are so many results."""
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: len(self.results) >= count)
