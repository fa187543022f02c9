"""An answer on its way to the harness: as the provider's events, or as one JSON object."""

from __future__ import annotations

import asyncio
import time

import orjson
from aiohttp import web

from polar_gym.chat import Completion
from polar_gym.engines import UNREACHABLE, EngineError
from polar_gym.gateway.proxy.exchange import Exchange
from polar_gym.providers import whole_answer
from polar_gym.schema import ModelCall

HOLD_SECONDS = 45.0
"""How long the status line waits for the engine: clients give up after 60 s or more without headers."""
KEEP_ALIVE_SECONDS = 15.0
TRANSIENT = ("overloaded", "server")
"""Kinds of errors after which the same request may succeed."""


async def send_stream(exchange: Exchange, sampling: asyncio.Future[tuple[Completion, ModelCall]]) -> web.StreamResponse:
    """Send the answer as the provider's events: each delta as it comes, or the whole answer where the engine gives no
    deltas. The status line waits for the first bytes to send. The last event leaves after the call is recorded."""
    provider, deltas = exchange.provider, exchange.deltas
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **provider.stream_headers}
    response = web.StreamResponse(headers=headers)
    events = provider.stream(exchange.request, exchange.call_id)
    sampling.add_done_callback(lambda _: deltas.put_nowait(None))
    silent_until = time.monotonic() + HOLD_SECONDS
    try:
        while True:
            try:
                async with asyncio.timeout(silent_until - time.monotonic()):
                    delta = await deltas.get()
            except TimeoutError:
                data = exchange.capture.harness.keep_alive or provider.keep_alive
            else:
                if delta is None:
                    break
                data = b"" if delta.prompt_ids is None else events.begin(len(delta.prompt_ids))
                data += events.feed(delta)
            if data:
                await _write(exchange, response, data)
                silent_until = time.monotonic() + KEEP_ALIVE_SECONDS
        completion = exchange.for_harness((await sampling)[0])
        await _write(exchange, response, events.end(completion) if exchange.live else whole_answer(events, completion))
    except EngineError as error:
        if not response.prepared:
            raise
        kind = error_kind(error)
        if kind not in TRANSIENT or exchange.capture.harness.broken_stream == "error":
            await response.write(provider.error_event(kind, error.message))
    await response.write_eof()
    return response


async def send_whole(exchange: Exchange, sampling: asyncio.Future[tuple[Completion, ModelCall]]) -> web.StreamResponse:
    """Send the answer as one JSON object. It is sent here, and not by aiohttp, to find out when a harness leaves early.

    The status line waits for the answer, or until clients would give up. From then on blanks, which may stand before
    any JSON, keep them waiting. An error after that breaks the connection."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    silence = HOLD_SECONDS
    while not (await asyncio.wait({sampling}, timeout=silence))[0]:
        await _write(exchange, response, b" ")
        silence = KEEP_ALIVE_SECONDS
    try:
        completion = exchange.for_harness(sampling.result()[0])
    except EngineError as error:
        if not response.prepared:
            raise
        raise _broken(exchange, error) from error
    answer = orjson.dumps(exchange.provider.render(exchange.request, completion, exchange.call_id))
    if response.prepared:
        await response.write(answer)
    else:
        response = web.Response(body=answer, content_type="application/json")
        await response.prepare(exchange.http)  # its head goes with its body, in one piece
    await response.write_eof()
    return response


def _broken(exchange: Exchange, error: EngineError) -> ConnectionError:
    """Break the connection, so that the client does not take a part for the whole answer. Return the error to raise."""
    if exchange.http.transport is not None:
        exchange.http.transport.abort()
    return ConnectionResetError(error.message)


async def _write(exchange: Exchange, response: web.StreamResponse, data: bytes) -> None:
    if not response.prepared:
        await response.prepare(exchange.http)
    await response.write(data)


def error_kind(error: EngineError) -> str:
    if error.kind not in ("engine_error", UNREACHABLE):
        return error.kind
    if error.status == 429 or error.status == 503:
        return "overloaded"
    return "invalid_request" if 400 <= error.status < 500 else "server"
