"""Reads the body of a request, or refuses the request, before a call begins."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from polar_gym.chat import LONG
from polar_gym.http.careful import compression
from polar_gym.providers import Provider
from polar_gym.providers.json_text import request_body

RETRY_AFTER_SECONDS = 5
"""Sent with every 429: some clients do not retry without a Retry-After header."""
MAX_BODY_BYTES = 256 * 1024 * 1024
BODY_SECONDS = 120.0
"""How long a request's body may take to come."""


class CallRefusedError(Exception):
    """A request is refused, with an error in the provider's format."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message


async def read_json(http: web.BaseRequest) -> dict[str, Any]:
    """Return the body of a request. Raises `CallRefusedError` and `BadRequestError`."""
    if problem := compression(http):
        raise CallRefusedError(415, "invalid_request", problem)
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in http.content.iter_any():
                raw += chunk
                if len(raw) > MAX_BODY_BYTES:
                    raise CallRefusedError(413, "invalid_request", f"the body is over {MAX_BODY_BYTES} bytes")
    except TimeoutError as error:
        raise CallRefusedError(
            408, "invalid_request", f"the body did not come within {BODY_SECONDS:g} seconds"
        ) from error
    return request_body(raw) if len(raw) <= LONG else await asyncio.to_thread(request_body, raw)


def error_answer(provider: Provider, status: int, kind: str, message: str) -> web.Response:
    """Return an error in the provider's format."""
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status == 429 else {}
    return web.json_response(provider.error(status, kind, message), status=status, headers=headers)
