"""Serves the rollout service over HTTP: the handlers parse a request, call the service, and answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from polar_gym.errors import ConfigError
from polar_gym.gateway.node.admission import Allowed, check_request
from polar_gym.gateway.node.state import MAX_ATTEMPT
from polar_gym.http import server_routes as routes
from polar_gym.http.application import Served, application
from polar_gym.http.edge import (
    AnswerError,
    answer,
    answer_list,
    answer_metrics,
    check_identifier,
    query_flag,
    query_number,
    read_record,
    whole_number,
)
from polar_gym.http.keys import Keys
from polar_gym.http.urls import engine_url
from polar_gym.protocol import Delivery, Generation, Heartbeat, Journals, TaskPage, TaskStatus, Weights
from polar_gym.schema import Episode, TaskRequest
from polar_gym.service.addresses import CallbackAddresses
from polar_gym.service.bounds import OPEN_SAMPLES, OverloadedError
from polar_gym.service.callbacks import check_url
from polar_gym.service.episode_files import DamagedError
from polar_gym.service.fleet import ReplacedError
from polar_gym.service.metrics import ServiceMetrics
from polar_gym.service.openapi import openapi_document
from polar_gym.service.service import ConflictError, RolloutService, UnknownNodeError, UnknownTaskError
from polar_gym.service.store import EpisodeRow, StoreError
from polar_gym.view.page import head

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 * 2**20
"""The size of the largest task; a SWE-bench task has a few hundred KB."""
MAX_EPISODE_BYTES = 2 * 2**30
"""The size of the largest delivery."""
LARGE_DELIVERIES_AT_ONCE = 8
"""How many large deliveries are in memory at once. The bodies of the others wait with their nodes."""
SMALL_DELIVERY_BYTES = 2**20
"""Up to this size a delivery waits for no other: each waits for the disk, and many together share its syncs."""
KEEP_ALIVE_SECONDS = 15.0
"""How often the server sends a comment on a silent event stream, so that a dead connection is noticed."""

MAX_EVENT_ID = 2**63 - 1
"""SQLite's largest number."""


def make_app(
    service: RolloutService,
    keys: Keys,
    allowed: Allowed,
    addresses: CallbackAddresses,
    watch: Callable[[], AsyncIterator[bytes]],
    url: str | None = None,
) -> web.Application:
    """Return the rollout server's application. `watch` begins to tell the live page what the service does. `url`: where
    nodes reach the server, if that is not where it listens."""
    statuses = {
        ConfigError: 422,
        UnknownTaskError: 404,
        UnknownNodeError: 404,
        ConflictError: 409,
        ReplacedError: 409,
        OverloadedError: 503,
        StoreError: 503,
    }
    served = _served(_Handlers(service, keys, allowed, addresses, watch))
    return application(
        served, {"service": keys.service, "node": keys.node}, statuses, max_bytes=MAX_REQUEST_BYTES, url=url
    )


def _served(handlers: _Handlers) -> Served:
    async def openapi(http: web.Request) -> web.Response:
        return web.Response(body=openapi_document(tuple(served)), content_type="application/json")

    served: Served = {
        routes.SUBMIT: handlers.submit,
        routes.TASKS: handlers.list_tasks,
        routes.TASK: handlers.get_task,
        routes.CANCEL: handlers.cancel_task,
        routes.EVENTS: handlers.events,
        routes.EPISODES: handlers.episodes,
        routes.EPISODE: handlers.episode,
        routes.NODES: handlers.nodes,
        routes.GENERATION: handlers.generation,
        routes.WEIGHTS: handlers.weights,
        routes.HEARTBEAT: handlers.heartbeat,
        routes.DELIVER: handlers.deliver,
        routes.JOURNALS: handlers.journals,
        routes.DRAIN: handlers.drain,
        routes.NODE_DIED: handlers.node_died,
        routes.PAGE: handlers.page,
        routes.LIVE: handlers.live,
        routes.HEALTHZ: handlers.healthz,
        routes.READYZ: handlers.readyz,
        routes.METRICS: handlers.metrics,
        routes.OPENAPI: openapi,
    }
    return served


class _Handlers:
    def __init__(
        self,
        service: RolloutService,
        keys: Keys,
        allowed: Allowed,
        addresses: CallbackAddresses,
        watch: Callable[[], AsyncIterator[bytes]],
    ) -> None:
        self._service = service
        self._keys = keys
        self._allowed = allowed
        self._addresses = addresses
        self._metrics = ServiceMetrics(service.book)
        self._watch = watch
        self._large = asyncio.Semaphore(LARGE_DELIVERIES_AT_ONCE)
        self._page = head(follows=True, name="live") + b"</body></html>\n"

    # Tasks ------------------------------------------------------------------------------------------------------------

    async def submit(self, http: web.Request) -> web.Response:
        request = await read_record(http, TaskRequest)
        check_identifier("task_id", request.task_id)
        if request.num_samples > OPEN_SAMPLES:
            raise AnswerError(422, f"num_samples={request.num_samples}: the server takes at most {OPEN_SAMPLES}")
        if request.callback_url is not None:
            if problem := check_url(request.callback_url) or await self._addresses.refuse_url(request.callback_url):
                raise AnswerError(422, f"callback_url: {problem}")
            if self._keys.signing is None:
                raise AnswerError(
                    422, "callback_url: the server has no key to sign callbacks with; set POLAR_GYM_CALLBACK_KEY there"
                )
        await asyncio.to_thread(check_request, request, self._allowed)
        state, new = await self._service.submit(request)
        return answer(state, 201 if new else 200)

    async def list_tasks(self, http: web.Request) -> web.Response:
        limit = int(query_number(http, "limit", 50, 1, 500))
        after, status = http.query.get("after"), http.query.get("status")
        if status is not None and status not in list(TaskStatus):
            raise AnswerError(400, f"status={status[:50]!r}: expected one of {', '.join(TaskStatus)}")
        if after is not None and await self._service.book.find(after) is None:
            raise AnswerError(404, f"after={after[:200]!r}: there is no such task, or it was evicted")
        found = await self._service.store.list_tasks(limit + 1, after, status)
        page = TaskPage(tasks=[], next=found[limit - 1] if len(found) > limit else None)
        for task_id in found[:limit]:
            if (task := await self._service.book.find(task_id)) is not None:
                page.tasks.append(task.state())
        return answer(page)

    async def get_task(self, http: web.Request) -> web.Response:
        return answer(await self._service.task(_task_id(http)))

    async def cancel_task(self, http: web.Request) -> web.Response:
        return answer(await self._service.cancel(_task_id(http)))

    async def events(self, http: web.Request) -> web.StreamResponse:
        """Stream the events of a task until its last one."""
        task_id = _task_id(http)
        await self._service.task(task_id)
        last = whole_number("Last-Event-ID", http.headers.get("Last-Event-ID", "0"), MAX_EVENT_ID)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(http)
        while True:
            news = self._service.book.news(task_id)
            live = task_id in self._service.book.live
            events = await self._service.store.events(task_id, last)
            for event in events:
                said = (event.id, event.kind.encode(), event.to_json())
                await response.write(b"id: %d\nevent: %s\ndata: %s\n\n" % said)
                last = event.id
            if events:
                continue
            if not live:
                break
            if not await _set_within(news, KEEP_ALIVE_SECONDS):
                await response.write(b": still here\n\n")
        await response.write_eof()
        return response

    # Episodes ---------------------------------------------------------------------------------------------------------

    async def episodes(self, http: web.Request) -> web.StreamResponse:
        """Stream the episodes of a task, one a line. Where one cannot be read now, the stream breaks off; where that is
        the first one, the answer is 503 and says why.

        `wait`: how many seconds to wait for the first one. `follow`: stream until the task has ended.
        """
        task_id = _task_id(http)
        await self._service.task(task_id)
        wait = query_number(http, "wait", 0, 0, 3600)
        follow, excluded = query_flag(http, "follow"), query_flag(http, "excluded")
        after = await self._number_of(http.query.get("after"))
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        deadline = asyncio.get_running_loop().time() + wait
        while True:
            news = self._service.book.news(task_id)
            live = task_id in self._service.book.live
            rows = await self._service.store.episodes(task_id, after, 16, excluded)
            fetched, readable = list[int](), True
            for row in rows:
                try:
                    line = await self._line(row)
                except AnswerError:
                    if not response.prepared:
                        await self._service.store.mark_fetched(fetched)
                        raise
                    readable = False
                    break
                if line:
                    await response.prepare(http)  # once
                    await response.write(line)
                after = row.number
                fetched.append(row.number)
            await self._service.store.mark_fetched(fetched)
            if not readable:
                if http.transport is not None:
                    http.transport.close()  # without the mark of the stream's end: the client goes on with another
                return response
            if rows:
                deadline = 0.0  # one is sent: send the others that there are, and do not wait for more
                continue
            await response.prepare(http)
            left = KEEP_ALIVE_SECONDS if follow else deadline - asyncio.get_running_loop().time()
            gone = http.transport is None or http.transport.is_closing()
            if not live or left <= 0 or gone:
                break
            await _set_within(news, min(left, KEEP_ALIVE_SECONDS))
        await response.write_eof()
        return response

    async def _number_of(self, session_id: str | None) -> int:
        """Return the number of the accepted episode of a session in the order of arrival; 0 without a session."""
        if session_id is None:
            return 0
        row = await self._service.store.find_episode(check_identifier("after", session_id))
        if row is None:
            raise AnswerError(404, f"after={session_id!r}: there is no accepted episode of this session")
        return row.number

    async def episode(self, http: web.Request) -> web.Response:
        session_id = check_identifier("session_id", http.match_info["session_id"])
        text = http.query.get("attempt")
        attempt = whole_number("attempt", text, MAX_ATTEMPT) if text is not None else None
        row = await self._service.store.find_episode(session_id, attempt)
        if row is None:
            raise AnswerError(404, f"session_id={session_id!r}: there is no such episode")
        if row.evicted:
            raise AnswerError(410, f"session_id={session_id!r}: the episode was evicted")
        line = await self._line(row)
        await self._service.store.mark_fetched([row.number])
        if not line:
            raise AnswerError(410, f"session_id={session_id!r}: the episode cannot be read; the server's log says why")
        return web.Response(body=line, content_type="application/json")

    async def _line(self, row: EpisodeRow) -> bytes:
        """Return an episode as a line, one that is not accepted without its rewards. The line is empty for an evicted
        or damaged episode: the stream goes on without it. Raise `AnswerError` (503) where the episode cannot be read
        now."""
        try:
            line = await asyncio.to_thread(self._service.store.files.read, row.session_id, row.attempt)
            if not row.accepted:
                line = await asyncio.to_thread(lambda: Episode.from_json(line).unscored().to_json())
            return line + b"\n"
        except DamagedError as error:
            if not row.evicted:
                log.error("episode %s.%d cannot be read: %s", row.session_id, row.attempt, error)
            return b""
        except OSError as error:
            log.error("episode %s.%d cannot be read now: %s", row.session_id, row.attempt, error)
            why = f"episode {row.session_id}.{row.attempt} cannot be read now: {error.strerror or error}"
            raise AnswerError(503, f"{why}; ask again, or see the server's log for the file") from error

    # Nodes ------------------------------------------------------------------------------------------------------------

    async def nodes(self, http: web.Request) -> web.Response:
        return answer_list(self._service.node_states())

    async def generation(self, http: web.Request) -> web.Response:
        return answer(await self._service.set_generation(await read_record(http, Generation)))

    async def weights(self, http: web.Request) -> web.Response:
        order = await read_record(http, Weights)
        state = await self._service.set_weights(order)
        known = {url for node in state.nodes.values() for url in node.engines}
        if order.engine is not None and not state.unreached and engine_url(order.engine) not in known:
            told = ", ".join(sorted(known)) or "none"
            raise AnswerError(400, f"engine={order.engine[:200]!r}: no node has this server; the nodes have: {told}")
        return answer(state)

    async def heartbeat(self, http: web.Request) -> web.Response:
        with self._service.fleet.reading(_node(http)):
            heartbeat = await read_record(http, Heartbeat)
        if heartbeat.node != _node(http):
            raise AnswerError(422, f"node={heartbeat.node[:200]!r}: the path says {_node(http)!r}")
        return answer(await self._service.heartbeat(heartbeat))

    async def deliver(self, http: web.Request) -> web.Response:
        node, size = _node(http), http.content_length
        small = size is not None and size <= SMALL_DELIVERY_BYTES
        async with contextlib.nullcontext() if small else self._large:
            delivery = await read_record(http.clone(client_max_size=MAX_EPISODE_BYTES), Delivery)
            check_identifier("episode.session.session_id", delivery.episode.session.session_id)
            check_identifier("episode.session.task_id", delivery.episode.session.task_id)
            return answer(await self._service.deliver(node, delivery))

    async def journals(self, http: web.Request) -> web.Response:
        return answer(await self._service.journals(_node(http), await read_record(http, Journals)))

    async def drain(self, http: web.Request) -> web.Response:
        return answer(self._service.drain(_node(http)))

    async def node_died(self, http: web.Request) -> web.Response:
        await self._service.node_died(_node(http), http.query.get("incarnation"))
        return web.Response(status=204)

    # About the server -------------------------------------------------------------------------------------------------

    async def page(self, http: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": "frame-ancestors 'none'", "Cache-Control": "no-store"}
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=headers)

    async def live(self, http: web.Request) -> web.StreamResponse:
        """Tell what the service does, and with `follow` what changes, every second until the client goes."""
        follow = query_flag(http, "follow")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await response.prepare(http)
        async for line in self._watch():
            await response.write(line)
            if not follow or http.transport is None or http.transport.is_closing():
                break
        await response.write_eof()
        return response

    async def healthz(self, http: web.Request) -> web.Response:
        if self._service.book.failed.done():
            raise AnswerError(503, "the store failed")
        return web.Response(text="ok\n")

    async def readyz(self, http: web.Request) -> web.Response:
        """Answer 200 where a task that is submitted now would begin."""
        await self.healthz(http)
        if not self._service.fleet.members:
            raise AnswerError(503, "no gateway node has registered")
        return web.Response(text="ok\n")

    async def metrics(self, http: web.Request) -> web.Response:
        return answer_metrics(self._metrics)


def _task_id(http: web.Request) -> str:
    return check_identifier("task_id", http.match_info["task_id"])


def _node(http: web.Request) -> str:
    return check_identifier("node", http.match_info["node"])


async def _set_within(news: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await news.wait()
    except TimeoutError:
        return False
    return True
