"""The recording proxy between a gateway and an engine: it forwards byte by byte, writes everything down, and can fail.

A line of the recording is JSON: a request, the status of its answer, a piece of the answer, or its end. Bytes are
written as Latin-1 text, one character for each. A request that carries a marker of `faults` meets that fault, once.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
from aiohttp import web

MARKER = re.compile(rb"fault-([0-9a-z-]+?)[^0-9a-z-]")
"""A fault's name in a request's text. The last one in the body counts: earlier ones belong to the history."""
HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server", "host"})

Fails = Literal["cut", "reset", "refuse", "error", "hang", "none"]
ERROR = b'data: {"error": {"message": "the auditor breaks off", "type": "InternalServerError", "code": 500}}\n\n'
"""How vLLM tells of an error in mid-stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a request meets on its way.

    `cut` closes the gateway's connection after a part of the answer; `reset` aborts that connection. `refuse` answers
    with `status` and does not ask the engine. `error` sends a part and then an event that tells of an error. `hang`
    sends a part and then nothing, until the gateway leaves. `none` only waits or rewrites.
    """

    kind: Fails = "none"
    path: str = "/v1/chat/completions"
    """The end of the paths that meet the fault."""
    events: int | None = None
    """After how many whole events of a stream; None: `size` counts."""
    size: int = 0
    """After how many bytes of the answer."""
    status: int = 503
    ask: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Changes the body of the request on its way to the engine."""
    rewrite: Callable[[bytes], bytes] | None = None
    """Changes each piece of the answer on its way to the gateway."""
    held: asyncio.Event | None = None
    """Set when the rest of the answer, or with `until` the request, is held back."""
    until: asyncio.Event | None = None
    """Keeps the request from the engine until the event is set."""


class Recorder:
    """Forwards to `engine`; `url` is known after `start`."""

    def __init__(self, engine: str, recording: Path) -> None:
        self.engine = engine
        self.recording = recording
        self.faults: dict[str, Fault] = {}
        """Marker -> fault. A name that begins with `*` meets the next request with the fault's path."""
        self.kind = False
        """Whether faults wait, and no request meets one."""
        self.url = ""
        self._file = recording.open("a", encoding="utf-8")
        self._count = 0

    async def start(self) -> None:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        await self._runner.cleanup()
        await self._http.close()
        self._file.close()

    def note(self, **fields: Any) -> None:
        """Write a line about the whole audit, such as the death of the gateway."""
        self._write({"note": fields})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps({"t": round(time.time(), 4), **line}) + "\n")
        self._file.flush()

    def _fault(self, path: str, body: bytes) -> Fault:
        found = MARKER.findall(body)
        for name in ([found[-1].decode()] if found else []) + [name for name in self.faults if name.startswith("*")]:
            fault = self.faults.get(name)
            if fault is not None and not self.kind and path.endswith(fault.path):
                return self.faults.pop(name)
        return Fault()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self._count += 1
        number, body = self._count, await request.read()
        fault = self._fault(request.path, body)
        self._write({"n": number, "method": request.method, "path": request.path, "body": body.decode("latin-1")})
        if fault.kind == "refuse":
            self._write({"n": number, "status": fault.status, "kind": "refused"})
            self._write({"n": number, "end": "not asked"})
            return web.json_response({"error": {"message": "the auditor refuses"}}, status=fault.status)
        if fault.until is not None:
            if fault.held is not None:
                fault.held.set()
            await fault.until.wait()
        if fault.ask is not None:
            body = json.dumps(fault.ask(json.loads(body))).encode()
        exchange = _Exchange(self, number, request, fault)
        try:
            return await exchange.forward(body)
        except (asyncio.CancelledError, ConnectionError) as error:
            self._write({"n": number, "end": exchange.ending or "client gone"})
            raise asyncio.CancelledError from error  # aiohttp logs every other exception
        except aiohttp.ClientError as error:
            self._write({"n": number, "end": "engine gone", "why": repr(error)})
            if request.transport is not None:
                request.transport.close()
            raise asyncio.CancelledError from error


class _Exchange:
    """One request on its way, after the engine was asked."""

    def __init__(self, recorder: Recorder, number: int, request: web.Request, fault: Fault) -> None:
        self._recorder = recorder
        self._number = number
        self._request = request
        self._fault = fault
        self._sent = 0
        self._events = 0
        self.ending = ""
        """How the exchange ended, where the auditor ended it."""

    async def forward(self, body: bytes) -> web.StreamResponse:
        recorder, request, number = self._recorder, self._request, self._number
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        url = recorder.engine + request.path_qs
        async with recorder._http.request(request.method, url, data=body or None, headers=headers) as upstream:
            kind = upstream.headers.get("Content-Type", "")
            recorder._write({"n": number, "status": upstream.status, "kind": kind})
            kept = {name: value for name, value in upstream.headers.items() if name.lower() not in HOP}
            response = web.StreamResponse(status=upstream.status, headers=kept)
            if self._fault.rewrite is None:
                response.content_length = upstream.content_length
            await response.prepare(request)
            async for piece in upstream.content.iter_any():
                await self._pass_on(response, piece)
            await response.write_eof()
        recorder._write({"n": number, "end": "whole"})
        return response

    async def _pass_on(self, response: web.StreamResponse, piece: bytes) -> None:
        shown = self._fault.rewrite(piece) if self._fault.rewrite is not None else piece
        allowed = self._allowed(shown)
        part = shown if allowed is None else shown[:allowed]
        line = {"n": self._number, "got": piece.decode("latin-1"), "sent": len(part)}
        if part:
            await response.write(part)
        self._recorder._write(line | ({"shown": part.decode("latin-1")} if shown is not piece else {}))
        self._sent += len(part)
        self._events += part.count(b"\n\n")
        if allowed is not None:
            await self._fail(response)

    def _allowed(self, piece: bytes) -> int | None:
        """Return how many bytes of this piece may pass, or None where all of them may and the fault is not reached."""
        if self._fault.kind in ("none", "refuse"):
            return None
        if self._fault.events is None:
            left = self._fault.size - self._sent
            return None if left > len(piece) else max(0, left)
        place = 0
        for _ in range(self._fault.events - self._events):
            end = piece.find(b"\n\n", place)
            if end < 0:
                return None
            place = end + 2
        return place

    async def _fail(self, response: web.StreamResponse) -> None:
        self.ending = self._fault.kind
        if self._fault.held is not None:
            self._fault.held.set()
        if self._fault.kind == "hang":
            await asyncio.Event().wait()
        if self._fault.kind == "error":
            await response.write(ERROR)
            await response.write_eof()
        transport = self._request.transport
        if transport is not None:
            transport.abort() if self._fault.kind == "reset" else transport.close()
        raise asyncio.CancelledError
