"""Makes the application of an HTTP port: it serves routes, asks for their keys, and answers every error in one form."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from polar_gym.http.edge import AnswerError
from polar_gym.http.guard import REFUSED, from_a_page
from polar_gym.http.keys import bearer_is
from polar_gym.http.route import Route
from polar_gym.protocol import ErrorAnswer

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Served = Mapping[Route[Any], Handler]
"""The routes of a port and their handlers."""

LOGGED = (401, 403, 408, 413)
"""Refusals that are not the mistake of a well-meaning client."""


def application(
    served: Served,
    keys: Mapping[str, str | None],
    statuses: Mapping[type[Exception], int],
    *,
    max_bytes: int,
    url: str | None,
) -> web.Application:
    """Return the application of a port.

    `keys`: the keys by the names that the routes use; with None, the port does not ask for that key. `statuses`: the
    status that answers each exception of a handler. `max_bytes`: the size of the largest body. `url`: the URL of the
    port for clients, if that is not the address where the port listens.
    """
    app = web.Application(client_max_size=max_bytes, middlewares=[_refusals(statuses), _authorise(served, keys, url)])
    app.add_routes([web.route(route.method, route.path, handler) for route, handler in served.items()])
    return app


def _authorise(served: Served, keys: Mapping[str, str | None], url: str | None) -> Middleware:
    """Return a middleware that asks each request for a key of its route; a path without a route takes any key.

    A port without keys asks for none: `polar_gym.http.keys.check_exposure` made sure that only this machine reaches the
    port, and `polar_gym.http.guard` keeps out web pages that are shown on this machine.
    """
    routes = {handler: route for route, handler in served.items()}

    @web.middleware
    async def authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = routes.get(request.match_info.handler)
        names = tuple(keys) if route is None else route.keys
        if not names:
            return await handler(request)
        if allowed := [key for name in names if (key := keys[name]) is not None]:
            if not bearer_is(request.headers.get("Authorization"), allowed):
                raise AnswerError(401, f"this needs the {' or '.join(names)} key: send 'Authorization: Bearer ...'")
        elif from_a_page(request, [url]):
            raise AnswerError(403, REFUSED)
        return await handler(request)

    return authorise


def _refusals(statuses: Mapping[type[Exception], int]) -> Middleware:
    """Return a middleware that turns exceptions into `ErrorAnswer`s. An unexpected one is logged and answered as 500,
    without its message, which may hold secrets."""

    @web.middleware
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except AnswerError as error:
            status, said = error.status, str(error)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            why = error.text if isinstance(error, web.HTTPRequestEntityTooLarge) else error.reason
            status, said = error.status, f"{request.method} {request.path[:200]}: {why}"
        except tuple(statuses) as error:
            status, said = next(code for kind, code in statuses.items() if isinstance(error, kind)), str(error)
        except ConnectionError:
            # The client disconnected. Return a response that nobody reads: aiohttp logs an exception as a server error.
            return web.Response(status=499)
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            status, said = 500, "internal error; the log of this process says why"
        if status in LOGGED:
            log.warning("%s %s from %s refused: %s", request.method, request.path[:200], request.remote, said)
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        body = ErrorAnswer(error=said).to_json()
        return web.Response(body=body, status=status, content_type="application/json", headers=headers)

    return refuse
