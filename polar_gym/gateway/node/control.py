"""The node's control port: it passes the requests of the rollout server and of operators on to the service.

The port is never served inside a sandbox.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from aiohttp import web

from polar_gym.errors import ConfigError
from polar_gym.gateway.node.metrics import NodeMetrics
from polar_gym.gateway.node.service import DrainingError, NodeService
from polar_gym.gateway.node.state import MAX_ATTEMPT, Key
from polar_gym.http import node_routes as routes
from polar_gym.http.application import Served, application
from polar_gym.http.edge import AnswerError, answer, answer_list, answer_metrics, read_record, whole_number
from polar_gym.protocol import Dispatch, Generation, Weights

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024
"""The size of the largest order."""

_body = partial(read_record, empty=b"{}", invalid=400)
"""Reads the checked body of an order. An empty body stands for the defaults of the record."""


def control_app(service: NodeService, metrics: NodeMetrics, key: str | None) -> web.Application:
    """Return the application of a node's control port. `key`: None lets in every program of this machine."""
    handlers = _Handlers(service, metrics)
    served: Served = {
        routes.DISPATCH: handlers.put_session,
        routes.CANCEL: handlers.delete_session,
        routes.GENERATION: handlers.post_generation,
        routes.WEIGHTS: handlers.post_weights,
        routes.DRAIN: handlers.post_drain,
        routes.HEALTHZ: handlers.healthz,
        routes.READYZ: handlers.readyz,
        routes.TRANSCRIPTS: handlers.get_transcripts,
        routes.METRICS: handlers.get_metrics,
        routes.SESSIONS: handlers.list_sessions,
        routes.SESSION: handlers.get_session,
        routes.EPISODE: handlers.get_episode,
    }
    statuses = {ValueError: 400, DrainingError: 503}
    return application(served, {"node": key}, statuses, max_bytes=MAX_BODY_BYTES, url=service.settings.url)


class _Handlers:
    def __init__(self, service: NodeService, metrics: NodeMetrics) -> None:
        self._service = service
        self._metrics = metrics

    async def put_session(self, http: web.Request) -> web.Response:
        key, order = _key(http), await _body(http, Dispatch)
        if key != Key(order.session_id, order.attempt):
            raise ValueError(f"the path names session {key}, the body {order.session_id}.{order.attempt}")
        try:
            session, new = await self._service.accept(order)
        except ConfigError as error:
            raise AnswerError(422, f"the request cannot be run: {error}") from error
        except OSError as error:
            log.exception("session %s could not be taken", key)
            raise AnswerError(503, f"the session could not be written to the disk: {error.strerror}") from error
        return answer(session, 201 if new else 200)

    async def delete_session(self, http: web.Request) -> web.Response:
        self._service.cancel(_key(http))
        return web.Response(status=204)

    async def get_session(self, http: web.Request) -> web.Response:
        session = self._service.session(_key(http))
        if session is None:
            raise AnswerError(404, f"this node does not hold session {_key(http)}")
        return answer(session)

    async def list_sessions(self, http: web.Request) -> web.Response:
        return answer_list(self._service.sessions)

    async def get_episode(self, http: web.Request) -> web.StreamResponse:
        path = self._service.state.files(_key(http)).episode
        if not await asyncio.to_thread(path.is_file):
            raise AnswerError(404, f"there is no episode of session {_key(http)} on this node")
        return web.FileResponse(path, headers={"Content-Type": "application/json"})

    async def post_generation(self, http: web.Request) -> web.Response:
        order = await _body(http, Generation)
        self._service.orders += 1
        return answer(await self._service.set_generation(order))

    async def post_weights(self, http: web.Request) -> web.Response:
        order = await _body(http, Weights)
        self._service.orders += 1
        return answer(self._service.set_weights(order.version, order.engine))

    async def post_drain(self, http: web.Request) -> web.Response:
        self._service.drain()
        return web.Response(status=204)

    async def healthz(self, http: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(self, http: web.Request) -> web.Response:
        if self._service.draining:
            raise AnswerError(503, "draining")
        return web.Response(text="ready\n")

    async def get_transcripts(self, http: web.Request) -> web.Response:
        return answer_list(self._service.transcripts())

    async def get_metrics(self, http: web.Request) -> web.Response:
        return answer_metrics(self._metrics)


def _key(http: web.Request) -> Key:
    """Return the session and attempt that the path names. Raises `ValueError` for anything else."""
    attempt = whole_number("attempt", http.match_info["attempt"], MAX_ATTEMPT)
    return Key(http.match_info["session_id"], attempt)
