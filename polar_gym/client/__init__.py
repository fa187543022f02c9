"""Uses the rollout service from Python: `RolloutClient` for asyncio, `SyncRolloutClient` for code without asyncio.

    async with RolloutClient("http://127.0.0.1:8700") as client:
        await client.submit(request)
        async for episode in client.episodes(request.task_id):
            ...

Every request may be repeated without harm. The client repeats requests while the server cannot be reached or restarts.
A stream of episodes then goes on after the last episode that was received.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import aiohttp
import orjson
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from polar_gym.background_loop import BackgroundLoop
from polar_gym.http import server_routes as routes
from polar_gym.http.failures import error_text, reason
from polar_gym.http.keys import SERVICE_KEY, read_key
from polar_gym.http.route import Route
from polar_gym.http.urls import is_http_url
from polar_gym.protocol import (
    Event,
    Generation,
    GenerationState,
    NodeState,
    TaskPage,
    TaskState,
    TaskStatus,
    Weights,
)
from polar_gym.record import Record
from polar_gym.schema import Episode, TaskRequest

R = TypeVar("R", bound=Record)
T = TypeVar("T")
P = ParamSpec("P")

DEFAULT_URL = "http://127.0.0.1:8700"
SILENT_SECONDS = 60.0
"""A connection that was silent for this time is dead. On a stream of events the server sends a comment sooner."""
PAUSE_SECONDS = 0.2
"""The pause before a stream that broke off is asked for again."""


class RolloutServiceError(Exception):
    """The service refused a request: `status` is the HTTP status, and the message is that of the service."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class UnreachableError(Exception):
    """The service did not answer within the time for which the client keeps trying."""


class _TryAgainError(Exception):
    """The service did not answer, or answered with an error that may not come again."""


class RolloutClient:
    """A client of one rollout server, for asyncio: `async with RolloutClient(url)`."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        key: str | None = None,
        *,
        keep_trying_seconds: float = 120.0,
        wait_seconds: float | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        """`key` None: the key in POLAR_GYM_SERVICE_KEY, or in the file that POLAR_GYM_SERVICE_KEY_FILE names.
        `keep_trying_seconds`: how long the server may be away. `wait_seconds`: how long the server may take to answer
        for the first time; None: as long. `notice` is called with a message when the server is away, and when it is
        back.

        Raises `ValueError` for a bad URL, and `polar_gym.errors.ConfigError` for a bad key."""
        if not is_http_url(url):
            raise ValueError(f"server={url!r}: expected a URL, e.g. {DEFAULT_URL}")
        self.url = url.rstrip("/")
        self._notice = notice or (lambda line: None)
        self._away = False
        key = key or read_key(SERVICE_KEY)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._keep_trying = keep_trying_seconds
        self._patience = keep_trying_seconds if wait_seconds is None else wait_seconds
        self._http: aiohttp.ClientSession

    async def __aenter__(self) -> RolloutClient:
        connector = aiohttp.TCPConnector(limit=0)  # an order must not wait for the end of a hundred streams
        self._http = aiohttp.ClientSession(
            headers=self._headers, timeout=_timeout(), read_bufsize=2**20, connector=connector
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.close()

    async def submit(self, request: TaskRequest) -> TaskState:
        """Submit a task. Raises `RolloutServiceError` (409) when the task id was used for another request."""
        return await self._ask(routes.SUBMIT, request)

    async def task(self, task_id: str) -> TaskState:
        """Return the state of a task."""
        return await self._ask(routes.TASK, task_id=task_id)

    async def tasks(self, limit: int = 50, after: str | None = None, status: TaskStatus | None = None) -> TaskPage:
        """Return tasks, newest first: those after the task `after`, and only those with this status."""
        query = {"limit": str(limit), **({"after": after} if after else {}), **({"status": status} if status else {})}
        return await self._ask(routes.TASKS, query=query)

    async def cancel(self, task_id: str) -> TaskState:
        """Cancel a task, and return its state."""
        return await self._ask(routes.CANCEL, task_id=task_id)

    async def wait(self, task_id: str) -> TaskState:
        """Wait until a task has ended, and return its state."""
        async for _ in self.events(task_id):
            pass
        return await self.task(task_id)

    async def episodes(self, task_id: str, *, excluded: bool = False) -> AsyncGenerator[Episode]:
        """Yield each accepted episode once, as it arrives, until the task has ended. `excluded`: the others too."""
        seen: set[tuple[str, int]] = set()
        after: str | None = None
        query = {"follow": "true", "excluded": str(excluded).lower()}
        while True:
            started = {"after": after} if after is not None and not excluded else {}
            try:
                async for line in self._lines(routes.EPISODES, task_id, {**query, **started}, {}):
                    episode = await asyncio.to_thread(Episode.from_json, line)
                    session = episode.session
                    if (session.session_id, session.attempt) not in seen:
                        seen.add((session.session_id, session.attempt))
                        after = session.session_id
                        yield episode
                return
            except _TryAgainError:
                await asyncio.sleep(PAUSE_SECONDS)

    async def episode(self, session_id: str, attempt: int | None = None) -> Episode:
        """Return the accepted episode of a session, or the episode of an attempt.

        Raises `RolloutServiceError` (404, or 410 when the episode was evicted).
        """
        query = {"attempt": str(attempt)} if attempt is not None else {}
        return await self._ask(routes.EPISODE, query=query, session_id=session_id)

    async def events(self, task_id: str, after: int = 0) -> AsyncGenerator[Event]:
        """Yield the events of a task, from the first one (or the one after event `after`) until the task has ended."""
        while True:
            try:
                async for line in self._lines(routes.EVENTS, task_id, {}, {"Last-Event-ID": str(after)}):
                    if line.startswith(b"data: "):
                        event = Event.from_json(line.removeprefix(b"data: "))
                        after = event.id
                        yield event
                return
            except _TryAgainError:
                await asyncio.sleep(PAUSE_SECONDS)

    async def nodes(self) -> list[NodeState]:
        """Return the states of the living nodes."""
        body = await self._body(routes.NODES)
        return [NodeState.model_validate(state) for state in orjson.loads(body)]

    async def pause(
        self, running: Literal["finish", "keep"] = "finish", timeout_seconds: float = 60.0
    ) -> GenerationState:
        """Let new model calls wait. Check `settled` before you change the weights."""
        return await self._generation(Generation(paused=True, running=running, timeout_seconds=timeout_seconds))

    async def resume(self) -> GenerationState:
        """Let model calls through again."""
        return await self._generation(Generation(paused=False))

    async def set_weights(self, version: str, engine: str | None = None) -> GenerationState:
        """Tell all nodes that the engine's weights were updated, or those of the one server at the URL `engine`."""
        return await self._ask(routes.WEIGHTS, Weights(version=version, engine=engine))

    async def _generation(self, order: Generation) -> GenerationState:
        timeout = _timeout(order.timeout_seconds)
        return await self._ask(routes.GENERATION, order, timeout=timeout)

    async def _ask(
        self,
        route: Route[R],
        body: Record | None = None,
        query: dict[str, str] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
        **parts: str,
    ) -> R:
        assert route.gives is not None
        answer = await self._body(route, body, query, timeout, **parts)
        return await asyncio.to_thread(route.gives.from_json, answer)

    async def _body(
        self,
        route: Route[Any],
        body: Record | None = None,
        query: dict[str, str] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
        **parts: str,
    ) -> bytes:
        async def once() -> bytes:
            headers = {"Content-Type": "application/json"} if body else {}
            data = body.to_json() if body else None
            try:
                async with self._http.request(
                    route.method,
                    route.url(self.url, **parts),
                    data=data,
                    params=query or {},
                    headers=headers,
                    timeout=timeout or _timeout(),
                ) as response:
                    answer = await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise self._unanswered(error) from error
            return _checked(response.status, answer)

        return await self._again(once)

    async def _again(self, once: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what `once` returns, and repeat it after each `_TryAgainError`. Raises `UnreachableError`."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_TryAgainError),
            wait=wait_random_exponential(0.2, max=5.0),
            stop=stop_after_delay(self._patience),
            before_sleep=lambda state: self._note(state.outcome.exception() if state.outcome else None),
            reraise=True,
        )
        try:
            answer = await retrying(once)
        except _TryAgainError as error:
            raise UnreachableError(
                f"{error} (tried for {self._patience:g} s)" if self._patience else str(error)
            ) from error
        self._note(None)
        self._patience = self._keep_trying
        return answer

    def _note(self, problem: BaseException | None) -> None:
        """Tell the caller that the server is away (`problem`), or back (None), once for each change."""
        if problem is not None and not self._away:
            self._notice(f"{problem}; trying again for {self._patience:g} s")
        elif problem is None and self._away:
            self._notice(f"{self.url} answers again")
        self._away = problem is not None

    def _unanswered(self, error: Exception) -> _TryAgainError:
        return _TryAgainError(f"{self.url}: {reason(error)}; is `polar-gym serve` running there?")

    async def _lines(
        self, route: Route[Any], task_id: str, query: dict[str, str], headers: dict[str, str]
    ) -> AsyncGenerator[bytes]:
        """Yield the lines of a stream, which the server may take some time to begin. Raises `_TryAgainError` where the
        stream breaks off, and `UnreachableError` where it does not begin."""

        async def begun() -> aiohttp.ClientResponse:
            try:
                response = await self._http.get(route.url(self.url, task_id=task_id), params=query, headers=headers)
                if response.status != 200:
                    _checked(response.status, await response.read())
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise self._unanswered(error) from error
            return response

        async with await self._again(begun) as response:
            try:
                async for line in _split(response.content):
                    yield line
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise self._unanswered(error) from error


def _timeout(patience_seconds: float = 0.0) -> aiohttp.ClientTimeout:
    """Return the timeout of a request that the server may answer `patience_seconds` late."""
    return aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENT_SECONDS + patience_seconds)


async def _split(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Yield the lines of a stream, of any length: aiohttp's own reader limits their length."""
    parts: list[bytes] = []
    async for chunk in content.iter_any():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line = b"".join([*parts, end])
            parts = []
            if line:
                yield line
        if rest:
            parts.append(rest)


def _checked(status: int, answer: bytes) -> bytes:
    """Return the body of a successful answer. Raises `_TryAgainError` or `RolloutServiceError` for another answer."""
    if 200 <= status < 300:
        return answer
    said = error_text(answer)
    if status in (429, 502, 503, 504):
        raise _TryAgainError(f"HTTP {status}: {said}")
    if status == 401:
        said += f" (set {SERVICE_KEY}, or {SERVICE_KEY}_FILE)"
    raise RolloutServiceError(status, said)


def _blocking(
    method: Callable[Concatenate[RolloutClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncRolloutClient, P], T]:
    """Return a method of the client for callers without asyncio."""

    @functools.wraps(method)
    def blocking(self: SyncRolloutClient, *arguments: P.args, **named: P.kwargs) -> T:
        return self._loop.run(method(self._client, *arguments, **named))

    return blocking


class SyncRolloutClient:
    """The client for callers without asyncio; its own thread does the work. Close the client, or use `with`."""

    def __init__(self, url: str = DEFAULT_URL, key: str | None = None, *, keep_trying_seconds: float = 120.0) -> None:
        self._client = RolloutClient(url, key, keep_trying_seconds=keep_trying_seconds)
        self._loop = BackgroundLoop()
        self._loop.run(self._client.__aenter__())

    def __enter__(self) -> SyncRolloutClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._loop.run(self._client.__aexit__())
        self._loop.close()

    submit = _blocking(RolloutClient.submit)
    task = _blocking(RolloutClient.task)
    tasks = _blocking(RolloutClient.tasks)
    cancel = _blocking(RolloutClient.cancel)
    wait = _blocking(RolloutClient.wait)
    episode = _blocking(RolloutClient.episode)
    nodes = _blocking(RolloutClient.nodes)
    pause = _blocking(RolloutClient.pause)
    resume = _blocking(RolloutClient.resume)
    set_weights = _blocking(RolloutClient.set_weights)

    def episodes(self, task_id: str, *, excluded: bool = False) -> Iterator[Episode]:
        return self._iterate(self._client.episodes(task_id, excluded=excluded))

    def events(self, task_id: str, after: int = 0) -> Iterator[Event]:
        return self._iterate(self._client.events(task_id, after))

    def _iterate(self, items: AsyncGenerator[T]) -> Iterator[T]:
        async def following() -> T | None:
            return await anext(items, None)

        try:
            while (item := self._loop.run(following())) is not None:
                yield item
        finally:
            self._loop.run(items.aclose())
