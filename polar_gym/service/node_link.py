"""Sends the rollout server's requests to nodes, with the node key."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from pydantic import TypeAdapter

from polar_gym.http import node_routes as routes
from polar_gym.http.edge import LEAST_BYTES_A_SECOND
from polar_gym.http.failures import error_text, reason
from polar_gym.http.lookups import Lookups
from polar_gym.http.route import Route
from polar_gym.protocol import Dispatch, Generation, GenerationAnswer, Transcript, Weights

TIMEOUT_SECONDS = 20.0
TRANSCRIPT_SECONDS = 2.0
"""How long the live page waits for a node."""

_TRANSCRIPTS = TypeAdapter(list[Transcript])


class NodeUnreachableError(Exception):
    """A node did not answer, or its answer makes no sense. The server does not know whether the node acted on the
    request."""


class NodeFailedError(NodeUnreachableError):
    """A node answered that it failed."""


class NodeBusyError(Exception):
    """A node does not take a session, because it is full, draining or starting."""


class RequestRefusedError(Exception):
    """No node can run this request; the message says why."""


class NodeLink:
    """Sends orders to nodes over HTTP: `async with NodeLink(key)`. Every method raises `NodeUnreachableError`."""

    def __init__(self, key: str | None) -> None:
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http: aiohttp.ClientSession

    async def __aenter__(self) -> NodeLink:
        self._lookups = Lookups()
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=32, resolver=self._lookups)
        self._http = aiohttp.ClientSession(headers=self._headers, connector=connector)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.close()
        await self._lookups.close()

    async def dispatch(self, url: str, order: Dispatch) -> None:
        """Give a session to a node, which holds the session when this returns. Raises one of the errors above."""
        body = await asyncio.to_thread(order.to_json)
        seconds = TIMEOUT_SECONDS + len(body) / LEAST_BYTES_A_SECOND
        parts = {"session_id": order.session_id, "attempt": order.attempt}
        status, answer = await self._ask(routes.DISPATCH, url, body, seconds, **parts)
        if status in (400, 413, 422):
            raise RequestRefusedError(error_text(answer))
        if status in (409, 429, 503):
            raise NodeBusyError(error_text(answer))
        _expect_success(status, answer)

    async def cancel(self, url: str, session_id: str, attempt: int) -> None:
        status, answer = await self._ask(routes.CANCEL, url, session_id=session_id, attempt=attempt)
        if status != 404:
            _expect_success(status, answer)

    async def generation(self, url: str, order: Generation) -> GenerationAnswer:
        seconds = order.timeout_seconds + TIMEOUT_SECONDS
        return _acknowledgement(*await self._ask(routes.GENERATION, url, order.to_json(), seconds))

    async def weights(self, url: str, order: Weights) -> GenerationAnswer:
        return _acknowledgement(*await self._ask(routes.WEIGHTS, url, order.to_json()))

    async def transcripts(self, url: str) -> list[Transcript]:
        status, answer = await self._ask(routes.TRANSCRIPTS, url, seconds=TRANSCRIPT_SECONDS)
        _expect_success(status, answer)
        try:
            return _TRANSCRIPTS.validate_json(answer)
        except ValueError as error:
            raise NodeUnreachableError(f"not a list of Transcripts: {error}") from error

    async def _ask(
        self, route: Route[Any], base: str, body: bytes | None = None, seconds: float = TIMEOUT_SECONDS, **parts: object
    ) -> tuple[int, bytes]:
        url, timeout = route.url(base, **parts), aiohttp.ClientTimeout(total=seconds)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            async with self._http.request(
                route.method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a host that is no name
            raise NodeUnreachableError(f"{url}: {reason(error)}") from error


def _expect_success(status: int, answer: bytes) -> None:
    """Raise `NodeFailedError` for an answer that is an error."""
    if not 200 <= status < 300:
        raise NodeFailedError(f"HTTP {status}: {error_text(answer)}")


def _acknowledgement(status: int, answer: bytes) -> GenerationAnswer:
    """Return the answer to an order about generation. Raises `NodeUnreachableError`."""
    _expect_success(status, answer)
    try:
        return GenerationAnswer.from_json(answer)
    except ValueError as error:
        raise NodeUnreachableError(f"not a GenerationAnswer: {error}") from error
