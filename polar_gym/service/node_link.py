"""How the server speaks to nodes: the contract's requests, with the node key."""

from __future__ import annotations

import asyncio
from typing import Protocol

import aiohttp
from pydantic import ValidationError

from polar_gym.http.no_answer import reason
from polar_gym.protocol import Dispatch, ErrorAnswer, Generation, GenerationAnswer, Weights

TIMEOUT_SECONDS = 20.0


class NodeUnreachableError(Exception):
    """No answer, or one that makes no sense; whether the node acted on the request is not known."""


class NodeFailedError(NodeUnreachableError):
    """An answer, and it is an error of the node's own."""


class NodeBusyError(Exception):
    """The node does not take the session: it is full, draining or starting."""


class RequestRefusedError(Exception):
    """No node can run this request; the message says why."""


class NodeLink(Protocol):
    async def dispatch(self, url: str, order: Dispatch) -> None:
        """The node holds the session when this returns. Raises one of the errors above."""
        ...

    async def cancel(self, url: str, session_id: str, attempt: int) -> None: ...

    async def generation(self, url: str, order: Generation) -> GenerationAnswer: ...

    async def weights(self, url: str, order: Weights) -> GenerationAnswer: ...


class HttpNodeLink:
    """`async with HttpNodeLink(key)`. Every method raises `NodeUnreachableError`."""

    def __init__(self, key: str | None) -> None:
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http: aiohttp.ClientSession

    async def __aenter__(self) -> HttpNodeLink:
        self._http = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=32),
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.close()

    async def dispatch(self, url: str, order: Dispatch) -> None:
        body = await asyncio.to_thread(order.to_json)
        status, answer = await self._ask("PUT", f"{url}/v1/sessions/{order.session_id}/{order.attempt}", body)
        if status in (400, 413, 422):
            raise RequestRefusedError(_error(answer))
        if status in (409, 429, 503):
            raise NodeBusyError(_error(answer))
        _expect_success(status, answer)

    async def cancel(self, url: str, session_id: str, attempt: int) -> None:
        status, answer = await self._ask("DELETE", f"{url}/v1/sessions/{session_id}/{attempt}")
        if status != 404:
            _expect_success(status, answer)

    async def generation(self, url: str, order: Generation) -> GenerationAnswer:
        timeout = aiohttp.ClientTimeout(total=order.timeout_seconds + TIMEOUT_SECONDS)
        status, answer = await self._ask("POST", f"{url}/v1/generation", order.to_json(), timeout)
        return _acknowledgement(status, answer)

    async def weights(self, url: str, order: Weights) -> GenerationAnswer:
        status, answer = await self._ask("POST", f"{url}/v1/weights", order.to_json())
        return _acknowledgement(status, answer)

    async def _ask(
        self, method: str, url: str, body: bytes | None = None, timeout: aiohttp.ClientTimeout | None = None
    ) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            async with self._http.request(
                method, url, data=body, headers=headers, timeout=timeout or self._http.timeout, allow_redirects=False
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NodeUnreachableError(f"{url}: {reason(error)}") from error


def _expect_success(status: int, answer: bytes) -> None:
    if not 200 <= status < 300:
        raise NodeFailedError(f"HTTP {status}: {_error(answer)}")


def _acknowledgement(status: int, answer: bytes) -> GenerationAnswer:
    _expect_success(status, answer)
    try:
        return GenerationAnswer.from_json(answer)
    except (ValidationError, ValueError) as error:
        raise NodeUnreachableError(f"not a GenerationAnswer: {error}") from error


def _error(answer: bytes) -> str:
    try:
        return ErrorAnswer.from_json(answer).error
    except (ValidationError, ValueError):
        return answer[:500].decode(errors="replace")
