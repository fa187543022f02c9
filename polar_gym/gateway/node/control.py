"""The node's control port: the contract's requests of the rollout server (`polar_gym.protocol`), as thin adapters.

It is never served inside a sandbox. Every error's body is an `ErrorAnswer`. Beside the contract:

    GET /v1/sessions                                  -> list of Session: all that the node holds
    GET /v1/sessions/{session_id}/{attempt}           -> Session
    GET /v1/sessions/{session_id}/{attempt}/episode   -> Episode, once there is one
"""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import ValidationError

from polar_gym.errors import ConfigError, explain
from polar_gym.gateway.node.metrics import NodeMetrics
from polar_gym.gateway.node.service import DrainingError, NodeService
from polar_gym.gateway.node.state import Key
from polar_gym.http.guard import REFUSED, from_a_page
from polar_gym.http.keys import bearer_is
from polar_gym.protocol import Dispatch, ErrorAnswer, Generation, Weights
from polar_gym.record import Record

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024
BODY_SECONDS = 60.0
"""How long a request's body may take to come."""
OPEN = ("/healthz", "/readyz", "/metrics")
"""Paths that need no key: they say nothing of any session."""

R = TypeVar("R", bound=Record)


def control_app(service: NodeService, metrics: NodeMetrics, key: str | None) -> web.Application:
    """The control API of one node; `key`: None lets every program of this machine in."""
    handlers = _Handlers(service, metrics)
    app = web.Application(middlewares=[_errors, _authorize(key, service.settings.url)], client_max_size=MAX_BODY_BYTES)
    session = "/v1/sessions/{session_id}/{attempt}"
    app.router.add_put(session, handlers.put_session)
    app.router.add_delete(session, handlers.delete_session)
    app.router.add_get(session, handlers.get_session)
    app.router.add_get(f"{session}/episode", handlers.get_episode)
    app.router.add_get("/v1/sessions", handlers.list_sessions)
    app.router.add_post("/v1/generation", handlers.post_generation)
    app.router.add_post("/v1/weights", handlers.post_weights)
    app.router.add_post("/v1/drain", handlers.post_drain)
    app.router.add_get("/healthz", handlers.healthz)
    app.router.add_get("/readyz", handlers.readyz)
    app.router.add_get("/metrics", handlers.get_metrics)
    return app


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
            raise _RefusedError(422, f"the request cannot be run: {error}") from error
        except DrainingError as error:
            raise _RefusedError(503, str(error)) from error
        except OSError as error:
            log.exception("session %s could not be taken", key)
            raise _RefusedError(503, f"the session could not be written to the disk: {error.strerror}") from error
        return _record(session, 201 if new else 200)

    async def delete_session(self, http: web.Request) -> web.Response:
        self._service.cancel(_key(http))
        return web.Response(status=204)

    async def get_session(self, http: web.Request) -> web.Response:
        session = self._service.session(_key(http))
        if session is None:
            raise _RefusedError(404, f"this node does not hold session {_key(http)}")
        return _record(session)

    async def list_sessions(self, http: web.Request) -> web.Response:
        return _json([session.model_dump(mode="json") for session in self._service.sessions])

    async def get_episode(self, http: web.Request) -> web.StreamResponse:
        path = self._service.state.files(_key(http)).episode
        if not await asyncio.to_thread(path.is_file):
            raise _RefusedError(404, f"there is no episode of session {_key(http)} on this node")
        return web.FileResponse(path, headers={"Content-Type": "application/json"})

    async def post_generation(self, http: web.Request) -> web.Response:
        order = await _body(http, Generation)
        self._service.orders += 1
        return _record(await self._service.set_generation(order))

    async def post_weights(self, http: web.Request) -> web.Response:
        order = await _body(http, Weights)
        self._service.orders += 1
        return _record(self._service.set_weights(order.version))

    async def post_drain(self, http: web.Request) -> web.Response:
        self._service.drain()
        return web.Response(status=204)

    async def healthz(self, http: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(self, http: web.Request) -> web.Response:
        if self._service.draining:
            raise _RefusedError(503, "draining")
        return web.Response(text="ready\n")

    async def get_metrics(self, http: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def _authorize(key: str | None, url: str | None) -> Middleware:
    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN:
            return await handler(request)
        if key is not None and not bearer_is(request.headers.get("Authorization"), [key]):
            log.warning("refused without the node key: %s %s from %s", request.method, request.path, request.remote)
            raise _RefusedError(401, "the Authorization header does not hold the node key")
        if key is None and from_a_page(request, [url]):
            log.warning("refused: %s %s from %s: %s", request.method, request.path, request.remote, REFUSED)
            raise _RefusedError(403, REFUSED)
        return await handler(request)

    return authorize


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except _RefusedError as error:
        return _error(error.status, error.message)
    except web.HTTPException as error:
        return _error(error.status, error.text or error.reason)
    except ValueError as error:
        return _error(400, str(error))
    except Exception:
        log.exception("%s %s", request.method, request.path)
        return _error(500, "the gateway failed; its log says why")


def _key(http: web.Request) -> Key:
    """Raises `ValueError` for anything that is not a plain id and a number."""
    attempt = http.match_info["attempt"]
    if not (attempt.isascii() and attempt.isdigit()):
        raise ValueError(f"attempt={attempt[:80]!r}: expected a number")
    return Key(http.match_info["session_id"], int(attempt[:20]))


async def _body(http: web.Request, kind: type[R]) -> R:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            raw = await http.read()
    except TimeoutError as error:
        raise _RefusedError(408, f"the body did not come within {BODY_SECONDS:g} seconds") from error
    try:
        return await asyncio.to_thread(kind.from_json, raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    except ValidationError as error:
        raise ValueError(explain(error, kind)) from error


def _record(record: Record, status: int = 200) -> web.Response:
    return web.Response(body=record.to_json(), status=status, content_type="application/json")


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _record(ErrorAnswer(error=message), status)
