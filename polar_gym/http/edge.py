"""Reads and checks the parts of a request, and makes answers from records.

A bad part raises `AnswerError`, whose message names the field, its value and the fix; no error repeats a key or a body.
Every body must come in a time that grows with its size, so that a client cannot hold a handler by sending slowly.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterable
from typing import TypeVar

import orjson
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.registry import Collector
from pydantic import ValidationError

from polar_gym.errors import explain
from polar_gym.http.careful import compression
from polar_gym.record import Record

R = TypeVar("R", bound=Record)

IDENTIFIER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
"""The form of task ids, session ids and names of nodes, which become parts of paths and of log lines."""

BODY_SECONDS = 60.0
"""How long a small body, and any next piece of a large one, may take to come."""
LEAST_BYTES_A_SECOND = 2**18
"""How fast a large body must come: each of so many bytes gives the whole body a second more."""
LARGE_BYTES = 2**16
"""A body above this size is parsed on a thread."""


class AnswerError(Exception):
    """An exception that ends a request with this status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_identifier(field: str, value: str) -> str:
    """Return `value` where it is an identifier. Raises `AnswerError`."""
    if not IDENTIFIER.fullmatch(value):
        raise AnswerError(
            400,
            f"{field}={value[:200]!r}: use 1 to 128 letters, digits, '_', '.' and '-', not beginning with '.' or '-'",
        )
    return value


async def read_record(request: web.Request, record: type[R], *, empty: bytes = b"", invalid: int = 422) -> R:
    """Return the checked body of a request. Raises `AnswerError`.

    `empty`: the text that an empty body stands for. `invalid`: the status of a body that is not such a record. A large
    body is parsed on a thread, so that other requests do not wait.
    """
    if problem := compression(request):
        raise AnswerError(415, problem)
    try:
        body = await read_body(request) or empty
    except TimeoutError:
        slow = f"the body did not come within {BODY_SECONDS:g} seconds, or {LEAST_BYTES_A_SECOND} bytes a second"
        raise AnswerError(408, slow) from None
    try:
        large = len(body) > LARGE_BYTES
        return await asyncio.to_thread(record.from_json, body) if large else record.from_json(body)
    except ValidationError as error:
        raise AnswerError(invalid, _short(explain(error, record))) from error
    except orjson.JSONDecodeError as error:
        raise AnswerError(400, f"the body is not JSON: {error}") from error


async def read_body(request: web.Request) -> bytes:
    """Return the body of a request. Raises `TimeoutError` where it comes too slowly."""
    body, clock = bytearray(), asyncio.get_running_loop().time
    begun = clock()
    async with asyncio.timeout(BODY_SECONDS) as limit:
        async for piece in request.content.iter_any():
            body += piece
            if len(body) > request.client_max_size:
                raise web.HTTPRequestEntityTooLarge(request.client_max_size, len(body))
            limit.reschedule(min(clock(), begun + len(body) / LEAST_BYTES_A_SECOND) + BODY_SECONDS)
    return bytes(body)


def whole_number(field: str, text: str, most: int) -> int:
    """Return the number that a text of ASCII digits spells, from 0 to `most`. Raises `AnswerError`."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and int(text) <= most):
        raise AnswerError(400, f"{field}={text[:50]!r}: expected a number from 0 to {most}")
    return int(text)


def query_number(request: web.Request, name: str, default: float, least: float, most: float) -> float:
    """Return a number of the query, from `least` to `most`; `default` without one. Raises `AnswerError`."""
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
    """Return a flag of the query; false without one. Raises `AnswerError`."""
    text = request.query.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise AnswerError(400, f"{name}={text[:50]!r}: expected true or false")
    return text in ("true", "1")


def answer(record: Record, status: int = 200) -> web.Response:
    """Return a record as the answer to a request."""
    return web.Response(body=record.to_json(), status=status, content_type="application/json")


def answer_list(records: Iterable[Record]) -> web.Response:
    """Return several records as the answer to a request."""
    body = b"[" + b",".join(record.to_json() for record in records) + b"]"
    return web.Response(body=body, content_type="application/json")


def answer_metrics(metrics: Collector) -> web.Response:
    """Return metrics in the text format of Prometheus as the answer to a request."""
    return web.Response(body=generate_latest(metrics), headers={"Content-Type": "text/plain; version=0.0.4"})


def _short(text: str) -> str:
    return text if len(text) <= 2000 else f"{text[:2000]}..."
