"""The server's edge: what comes in is checked here, and what is wrong is said in one way.

Every error is an `ErrorAnswer` that names the field, its value and the fix; no error repeats a key or a body. A client
that is slow on purpose is cut off: the head of its first request, and every body, must be there in time.
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import TypeVar

import orjson
from aiohttp import web
from pydantic import ValidationError

from polar_gym.errors import explain
from polar_gym.http.silence import SilentConnections
from polar_gym.record import Record

R = TypeVar("R", bound=Record)

IDENTIFIER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
"""Task ids, session ids and names of nodes: they become paths and lines of logs."""

HEAD_SECONDS = 15.0
BODY_SECONDS = 60.0


class AnswerError(Exception):
    """Ends a request with this status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_identifier(field: str, value: str) -> str:
    if not IDENTIFIER.fullmatch(value):
        raise AnswerError(
            400,
            f"{field}={value[:200]!r}: use 1 to 128 letters, digits, '_', '.' and '-', not beginning with '.' or '-'",
        )
    return value


async def read_record(request: web.Request, record: type[R], on_thread: bool = False) -> R:
    """The checked body. `on_thread`: it may be large. Raises `AnswerError`."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await request.read()
    except TimeoutError:
        raise AnswerError(408, f"the body was not there within {BODY_SECONDS:g} seconds") from None
    try:
        return await asyncio.to_thread(record.from_json, body) if on_thread else record.from_json(body)
    except ValidationError as error:
        raise AnswerError(422, _short(explain(error, record))) from error
    except orjson.JSONDecodeError as error:
        raise AnswerError(400, f"the body is not JSON: {error}") from error


def whole_number(field: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and int(text) <= most):
        raise AnswerError(400, f"{field}={text[:50]!r}: expected a number from 0 to {most}")
    return int(text)


def query_number(request: web.Request, name: str, default: float, least: float, most: float) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise AnswerError(400, f"{name}={text[:50]!r}: expected a number from {least:g} to {most:g}")
    return value


def query_flag(request: web.Request, name: str) -> bool:
    text = request.query.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise AnswerError(400, f"{name}={text[:50]!r}: expected true or false")
    return text in ("true", "1")


def answer(record: Record, status: int = 200) -> web.Response:
    return web.Response(body=record.to_json(), status=status, content_type="application/json")


class Listener:
    """An application on a port, with a limit on the time that a connection may take for its first request's head:
    aiohttp limits only the pause between requests. `async with Listener(...)`; `port` is the one that was bound.

    Handlers are not cancelled when their client hangs up: what was begun for it (a task, a delivery) is done whole."""

    def __init__(self, app: web.Application, host: str, port: int) -> None:
        self._host, self.port = host, port
        self._silent = SilentConnections(HEAD_SECONDS)
        app.middlewares.insert(0, self._silent.middleware)  # type: ignore[union-attr]
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=75.0, shutdown_timeout=2.0)

    async def __aenter__(self) -> Listener:
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        server = self._runner.server
        assert server is not None
        self._server = await loop.create_server(self._silent.watched(server), self._host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        await self._runner.cleanup()


def _short(text: str) -> str:
    return text if len(text) <= 2000 else f"{text[:2000]}..."
