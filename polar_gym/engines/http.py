"""Asking an engine over HTTP: one client session, patience while nothing was answered, refusals as `EngineError`.

A call waits for an engine that is away for a while (restarted, its weights swapped): a session costs too much to fail
for that. The caller may cancel a call at any time, and the end of a session does. A cancelled call closes its
connection early, which stops the engine's work on it.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import orjson
import tenacity

from polar_gym.chat import LONG
from polar_gym.engines import UNREACHABLE, EngineError
from polar_gym.http.failures import reason
from polar_gym.http.urls import engine_url

PATIENCE_SECONDS = 120.0
"""How long a call waits, by default, for an engine that cannot be reached or that answers that it is busy."""

START_PATIENCE_SECONDS = 4.0
"""How long a call waits for an engine that was never reached: its URL may be wrong."""

LONGEST_WAIT_SECONDS = 8.0

SMALL_SECONDS = 60.0
"""How long a server may take to answer a request that loads no weights and samples at most one token."""

LONG_SECONDS = 3600.0
"""How long a server may take to load weights, or to give a whole answer as one piece."""

KEEPALIVE_SECONDS = 4.0
"""Less than the 5 s after which engines' HTTP servers close an idle connection, so that none is reused as it closes."""

SILENCE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 90_000}
"""The options by which the system ends a connection 90 s after the other host has fallen silent, for instance without
power. A host whose engine samples for long is not silent: it acknowledges the system's own questions."""

AWAY = (408, 429, 502, 503, 504)
"""Statuses of a busy engine, or of a router before it. All become 503, because some harnesses give up on a 429."""

GIVEN_UP = (502, 504)
"""Statuses of a router that gave up a request that it may have passed on."""

DIED = re.compile(r"EngineCore|EngineDead")
"""Words of a server, with status 500, whose engine has died. Such a server is about to be restarted."""

BEGAN = re.compile(r"^process_start_time_seconds (\S+)$", re.MULTILINE)
"""The line of Prometheus' client for Python that tells one process from the next."""

SWITCHED_OFF = "--enable-scale-out"
"""The flag that vLLM names, with status 403, for a route that needs the flag. The API key is not the cause then."""

Body = dict[str, Any]
T = TypeVar("T")


class _GivenUpError(EngineError):
    """A router gave up a request that it may have passed on. A stream would have begun by then; a whole answer may have
    been sampled."""


class Http:
    """The client of one engine's server, between `open` and `close`."""

    def __init__(self, name: str, url: str, api_key: str | None, patience_seconds: float) -> None:
        if not url:
            example = f"engine.url=http://127.0.0.1:{8000 if name == 'vLLM' else 30000}"
            raise EngineError(503, f"engine={name.lower()} needs engine.url, e.g. {example}", kind="server")
        self.name = name
        """The name of the engine in messages."""
        self.waits_for_connections = True
        """Whether a call waits for a server that cannot be connected to. Not where other servers can take the call."""
        self.url = engine_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._patience = patience_seconds
        self._reached = False
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Open the client session. An open session stays as it is, because closing it would hang its calls."""
        if self._session is not None:
            return
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEPALIVE_SECONDS, socket_factory=_watched_socket
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str) -> Body:
        return self._parsed(path, await self.patiently(lambda: self._read("GET", path, None)))

    async def post(self, path: str, body: Body, *, long: bool = False) -> Body:
        return self._parsed(path, await self.post_raw(path, body, long=long))

    async def post_raw(self, path: str, body: Body, *, long: bool = False) -> bytes:
        """Return the answer's bytes. `body` may hold arrays. `long`: the server may take `LONG_SECONDS`."""
        return await self.patiently(lambda: self._read("POST", path, body, long=long))

    async def sample(self, path: str, body: Body) -> Body:
        """Return an answer that comes as one piece. After the server has taken the request, no failure leads to another
        try."""
        return self._parsed(path, await self.patiently(lambda: self._sample_once(path, body)))

    async def _sample_once(self, path: str, body: Body) -> bytes:
        try:
            return await self._read("POST", path, body, long=True)
        except EngineError as error:
            cause = error.__cause__
            if isinstance(error, _GivenUpError):
                why = error.message
            elif isinstance(cause, Exception) and error.kind != UNREACHABLE:
                why = reason(cause)
            else:  # a refusal, or no connection
                raise
            told = f"{self.name} at {self.url} took a request and gave no whole answer ({why})"
            raise EngineError(502, told, kind="server", sampled=True) from error

    def _parsed(self, path: str, raw: bytes) -> Body:
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            problem = f"{self.url}{path} answered with text that is not JSON ({error}): {raw[:200]!r}"
            raise EngineError(
                502, f"{problem}; does {self.name} listen there? Check engine.url", kind="server"
            ) from error

    async def patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try again, as long as patience lasts, where the engine did not answer."""
        try:
            return await attempt()
        except EngineError as error:
            if not self._passes(error):
                raise
        trying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(self._passes),
            wait=tenacity.wait_random_exponential(multiplier=0.5, max=LONGEST_WAIT_SECONDS),
            stop=tenacity.stop_after_delay(self._patience if self._reached else START_PATIENCE_SECONDS),
            reraise=True,
        )
        async for one in trying:
            with one:
                return await attempt()
        raise AssertionError("it ends by an answer, or by raising")

    def _passes(self, error: BaseException) -> bool:
        """Return whether an error may be gone at the next try."""
        if not isinstance(error, EngineError) or error.status != 503:
            return False
        return self.waits_for_connections or error.kind != UNREACHABLE

    async def began(self) -> str | None:
        """Return when the server's process began, as its metrics say; None where they do not, or are withheld. Raises
        `EngineError` where the server does not answer."""
        try:
            metrics = (await self._read("GET", "/metrics", None)).decode(errors="replace")
        except EngineError as error:
            if error.__cause__ is not None:  # no answer came, or not all of it
                raise
            return None
        found = BEGAN.search(metrics)
        return None if found is None else found[1]

    @asynccontextmanager
    async def response(
        self, method: str, path: str, body: Body | None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response to one request, with status 200. Leaving the context before the response's end closes the
        connection."""
        assert self._session is not None, "call start() first"
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        if data is not None and len(data) > LONG:
            await asyncio.sleep(0)  # aiohttp copies the body in one go
        sent = {"Content-Type": "application/json", **(headers or {})}
        try:
            async with self._session.request(method, self.url + path, data=data, headers=sent) as response:
                self._reached = True
                if response.status != 200:
                    raise _refusal(self.url + path, response.status, await response.read())
                yield response
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            unconnected = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            raise EngineError(
                503,
                f"{self.name} at {self.url} cannot be reached ({reason(error)}); is it running there?",
                kind=UNREACHABLE if unconnected else "overloaded",
            ) from error
        except aiohttp.ClientError as error:
            raise self.broken_off(repr(error)) from error

    def broken_off(self, why: str) -> EngineError:
        return EngineError(502, f"{self.name} at {self.url} broke off its answer: {why}", kind="server")

    async def _read(self, method: str, path: str, body: Body | None, *, long: bool = False) -> bytes:
        async with self.within(LONG_SECONDS if long else SMALL_SECONDS), self.response(method, path, body) as response:
            return await response.read()

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Raise `EngineError` where the context lasts longer: the server may never answer, and hold the connection."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            told = f"{self.name} at {self.url} did not answer within {seconds:g} s"
            raise EngineError(503, told, kind="overloaded") from error


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket whose connection ends where the other host is gone; without options that the system lacks."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in SILENCE.items():
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def _refusal(url: str, status: int, payload: bytes) -> EngineError:
    message = _error_message(payload)
    if status == 400 and "context length" in message:  # in these words vLLM and SGLang agree
        return EngineError(400, message, kind="context_length")
    if status == 403 and SWITCHED_OFF in message:
        return EngineError(404, message, kind="not_found")
    if status in (401, 403):
        return EngineError(502, f"{url} answered {status}: {message}; check its api_key", kind="server")
    if status in AWAY or (status == 500 and DIED.search(message)):
        made = _GivenUpError if status in GIVEN_UP else EngineError
        return made(503, f"{url} answered {status}: {message}", kind="overloaded")
    if status >= 500:
        return EngineError(502, f"{url} answered {status}: {message}", kind="server")
    kind = "not_found" if status in (404, 405) else "invalid_request"
    return EngineError(status, message, kind=kind)


def _error_message(payload: bytes) -> str:
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return payload[:2000].decode("utf-8", "replace")
    error = body.get("error", body) if isinstance(body, dict) else body
    return error.get("message", str(error)) if isinstance(error, dict) else str(error)
