"""The model API that harnesses talk to: parse, sample, record, answer in the provider's own shape.

A thin aiohttp adapter: the wire formats are in `providers/`, the sampling is in `engines/`, the record is in `capture`.
Each sandbox reaches the proxy through a separate listening socket (`Proxy.server_for`). Clients outside a sandbox use
the node's loopback port and the session's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from aiohttp import web

from polar_gym.chat import ChatRequest, Completion, Delta, sampling_deviations
from polar_gym.chat.received import whole_delta
from polar_gym.engines import Engine, EngineError
from polar_gym.engines.context_length import check_space
from polar_gym.engines.probe import probe
from polar_gym.engines.replicas import Replicas, Seated
from polar_gym.engines.weights import spans
from polar_gym.gateway.proxy import mcp
from polar_gym.gateway.proxy.capture import MAX_TOOL_CALLS, SessionCapture
from polar_gym.gateway.proxy.exchange import Exchange
from polar_gym.gateway.proxy.generation import GenerationGate
from polar_gym.gateway.proxy.receiving import CallRefusedError, error_answer, read_json
from polar_gym.gateway.proxy.sending import error_kind, send_stream, send_whole
from polar_gym.http.careful import SERVER_OPTIONS
from polar_gym.http.crowd import at_most
from polar_gym.http.guard import REFUSED, from_a_page
from polar_gym.http.silence import SilentConnections
from polar_gym.providers import BadRequestError, Provider, Route, routes
from polar_gym.schema import TIME_UP, ModelCall, Sampling
from polar_gym.splicing.plan import Plan, Splicer
from polar_gym.splicing.prompt import Templater
from polar_gym.splicing.recording import DivergenceError
from polar_gym.splicing.terms import Terms

log = logging.getLogger(__name__)

Streaming = Literal["synthetic", "real"]
"""How a harness that asks for a stream is answered. `synthetic`: with the whole answer as one stream of events when the
engine is done. `real`: with each piece as the engine samples it. The record is the same, except for the message and the
finish reason of an answer with a broken tool call."""

JUDGE = "judge"
"""The kind of the calls of a program in the sandbox that asks for a model of this name."""
FINISHED = ("stop", "tool_calls", "length")
"""Finish reasons of an answer that came to its end."""
HEAD_SECONDS = 60.0
"""How long a connection may take for its first request's head."""
MAX_CONNECTIONS = 256
"""Connections of one sandbox at once; harnesses with sub-agents have some dozens."""
LOGGED = (401, 403, 408, 413)
"""Statuses of refusals that are logged, because a well-behaved client does not cause them."""


class Proxy:
    """Answers the model calls of all sessions of a node."""

    def __init__(
        self,
        engine: Engine,
        providers: list[Provider],
        *,
        splice: bool = True,
        keep_reasoning: bool = True,
        streaming: Streaming = "synthetic",
        frozen: Mapping[str, Engine] | None = None,
    ) -> None:
        """`frozen`: the engines of kinds of calls that the policy does not answer."""
        self.engine = engine
        self._frozen = frozen or {}
        self.streaming: Streaming = streaming
        self.splicer = Splicer(engine, enabled=splice, keep_reasoning=keep_reasoning)
        self._terms = {each: Terms(each) for each in (engine, *self._frozen.values())}
        self.providers = providers
        self._routes = routes(providers)
        self.generation = GenerationGate()
        self.calls: Counter[str] = Counter()
        """Calls of the engines by outcome, counted when their answer has left or failed to; `refused`: requests that
        could not be translated and are not recorded."""
        self.sampled_tokens = 0
        self._captures: dict[str, SessionCapture] = {}
        self._silent = SilentConnections(HEAD_SECONDS)

    async def probe(self) -> None:
        """Learn which messages the engines' templates take. Raises `EngineError`."""
        for terms in self._terms.values():
            await terms.probe()

    def add(self, capture: SessionCapture) -> None:
        self._captures[capture.key] = capture

    def remove(self, capture: SessionCapture) -> None:
        self._captures.pop(capture.key, None)
        for engine in (self.engine, *self._frozen.values()):
            if isinstance(engine, Replicas):
                engine.release(capture.session_id)

    def server_for(self, bound: SessionCapture | None) -> Callable[[], asyncio.BaseProtocol]:
        """Return a protocol factory for `loop.create_server`. `bound` is the only session whose key is accepted; with
        None, the keys of all sessions are."""

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            self._silent.heard(request.protocol)
            return await self._handle(request, bound)

        server = web.Server(handle, handler_cancellation=True, **SERVER_OPTIONS)  # pyright: ignore[reportArgumentType]
        connect = self._silent.watched(server)
        return connect if bound is None else at_most(MAX_CONNECTIONS, server, connect, f"session {bound.session_id}")

    async def _handle(self, http: web.BaseRequest, bound: SessionCapture | None) -> web.StreamResponse:
        if http.path == "/" and http.method in ("GET", "HEAD"):  # clients check that the port answers
            return web.Response()
        provider, route = self._route(http)
        capture: SessionCapture | None = None
        try:
            if from_a_page(http):
                raise CallRefusedError(403, "permission", REFUSED)
            capture = self._authenticate(http, provider, bound)
            if http.path == mcp.MCP_PATH and capture.environment is not None and capture.offers_tools:
                if http.method != "POST":
                    return web.Response(status=405, headers={"Allow": "POST"})
                async with capture.tool_call() as admitted:
                    if not admitted:
                        raise CallRefusedError(429, "overloaded", f"more than {MAX_TOOL_CALLS} tool calls at once")
                    message = await read_json(http)
                    self._authenticate(http, provider, bound)  # the session may have ended while the body came
                    return await mcp.answer(message, capture.environment)
            if route is None:
                log.warning("session %s: no such endpoint: %s %s", capture.session_id, http.method, http.path)
                raise CallRefusedError(404, "not_found", f"no such endpoint: {http.method} {http.path}")
            if route.operation == "models":
                return web.json_response(provider.models(capture.model_name, self.engine.info.max_model_len))
            body = await read_json(http) | route.said(http.path, http.query)
            if route.operation == "count_tokens":
                countable = (provider.parse_countable or provider.parse)(body)
                return await self._count_tokens(provider, capture, countable)
            request = provider.parse(body)
            async with capture.admit(request, self.engine.info.max_model_len) as admitted:
                if admitted is None:
                    # No line in the log: the episode names the budget.
                    return error_answer(provider, 403, "permission", "this session has ended, or its budget is used up")
                return await self._chat(http, provider, capture, *admitted, body)
        except BadRequestError as error:
            if capture is not None:
                self._note_refused(capture, http, error)
            return error_answer(provider, 400, error.code, str(error))
        except CallRefusedError as error:
            if error.status in LOGGED:
                log.warning("%s %s refused: %s", http.method, http.path[:200], error.message)
            return error_answer(provider, error.status, error.kind, error.message)
        except EngineError as error:
            return error_answer(provider, error.status, error_kind(error), error.message)
        except ConnectionError as gone:  # the client left; aiohttp logs all but a cancellation as a server error
            raise asyncio.CancelledError from gone
        except Exception:
            if http.writer.output_size:
                raise  # a part of an answer was sent: aiohttp closes the connection
            log.exception("%s %s", http.method, http.path)
            return error_answer(provider, 500, "server", "the gateway failed; its log says why")

    def _note_refused(self, capture: SessionCapture, http: web.BaseRequest, error: BadRequestError) -> None:
        """Count a request that cannot be translated, and log the first one of a session for each field."""
        self.calls["refused"] += 1
        name = re.sub(r"\d+", "", error.field)
        if name not in capture.refused_fields:
            capture.refused_fields.add(name)
            log.warning("session %s: %s %s refused: %s", capture.session_id, http.method, http.path[:200], error)

    async def engine_answers(self, call: ModelCall, sampling: Sampling) -> bool:
        """Return whether each engine samples one token now for a request of the proxy's own; of the replicas of an
        engine, the one that the call was sent to. While generation is paused, the requests wait."""
        async with self.generation.call():
            for engine in {self.engine, *self._frozen.values()}:
                if isinstance(engine, Replicas):
                    answered = await engine.answers(call.engine_url, sampling)
                else:
                    answered = await probe(engine, sampling) == "samples"
                if not answered:
                    return False
        return True

    def _route(self, http: web.BaseRequest) -> tuple[Provider, Route | None]:
        """Return the provider and the route of a path. For an unknown path, guess the provider from the key header. A
        bearer token counts last, and last of all for providers that also accept a key in the URL (Google)."""
        for provider, route in self._routes:
            if route.matches(http.method, http.path, http.headers):
                return provider, route
        likely = sorted(self.providers, key=lambda provider: provider.key_parameter is not None)
        own = {name: value for name, value in http.headers.items() if name.lower() != "authorization"}
        keyed = (each for headers in (own, http.headers) for each in likely if each.session_key(headers) is not None)
        return next(keyed, self.providers[0]), None

    def _authenticate(self, http: web.BaseRequest, provider: Provider, bound: SessionCapture | None) -> SessionCapture:
        key = provider.session_key(http.headers) or http.query.get(provider.key_parameter or "", "")
        capture = bound if bound is not None else self._captures.get(key)
        if capture is None or not hmac.compare_digest(key.encode(errors="replace"), capture.key.encode()):
            raise CallRefusedError(401, "authentication", "the API key opens no session on this gateway")
        if not capture.running:
            raise CallRefusedError(403, "permission", f"session {capture.session_id} is not running")
        return capture

    async def _count_tokens(self, provider: Provider, capture: SessionCapture, request: ChatRequest) -> web.Response:
        """Answer with the length of the prompt that the request would have as a call, spliced or not: harnesses decide
        by this length when to compact."""
        if provider.token_count is None:
            raise CallRefusedError(404, "not_found", "this API has no token counting")
        request = replace(request, messages=capture.handles.from_harness(request.messages))
        asked = self._terms[self.engine].of(capture.memory.engine_ids, request)
        templater = _templater(self.engine, capture.session_id)
        plan = await self.splicer.prepare(capture.memory, request, asked, capture.recording, templater)
        prompt_ids = plan.request.prompt_ids
        if prompt_ids is None:
            prompt_ids = await templater.template(asked.messages, asked.tools)
        return web.json_response(provider.token_count(len(prompt_ids)))

    async def _chat(
        self,
        http: web.BaseRequest,
        provider: Provider,
        capture: SessionCapture,
        index: int,
        request: ChatRequest,
        body: dict[str, Any],
    ) -> web.StreamResponse:
        if request.withheld_tools:
            log.info("session %s: withheld from the model: %s", capture.session_id, ", ".join(request.withheld_tools))
        hints = capture.harness.classify(http.headers, body)
        if request.model == JUDGE:
            hints = {**hints, "kind": JUDGE}
        frozen = self._frozen.get(hints.get("kind", ""))
        engine = frozen or self.engine
        request = replace(request, messages=capture.handles.from_harness(request.messages))
        exchange = Exchange(
            http=http,
            provider=provider,
            capture=capture,
            request=request,
            plan=Plan(request=request),
            hints=hints,
            engine=engine,
            server=engine,
            frozen=frozen is not None,
            sampling_mismatch=sampling_deviations(request, engine.info.own_grammar),
            call_id=uuid.uuid4().hex,
            index=index,
            started_at=time.time(),
            live=self.streaming == "real" and request.stream and not capture.handles.recorded,
        )
        sampling: asyncio.Future[tuple[Completion, ModelCall]]
        recorded = self._recorded(exchange)  # before the answer begins: it leaves with the recorded call's id
        if recorded is None:
            sampling = asyncio.create_task(self._sample(exchange))
        else:  # done at once: a failure to send it, however early, marks the call as abandoned
            sampling = asyncio.get_running_loop().create_future()
            sampling.set_result(recorded)
        try:
            if request.stream:
                return await send_stream(exchange, sampling)
            return await send_whole(exchange, sampling)
        except BaseException:  # the harness hung up, the call was cut off, or the provider could not form the answer
            if sampling.done() and not sampling.cancelled() and sampling.exception() is None:
                capture.mark_abandoned(sampling.result()[1])
            raise
        finally:
            sampling.cancel()
            while not sampling.done():  # also where this task is cancelled again, because the session ends
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({sampling})
            if recorded is None and exchange.call is not None:
                self.calls[exchange.call.outcome] += 1

    async def _sample(self, exchange: Exchange) -> tuple[Completion, ModelCall]:
        """Return the engine's answer and the record of the call, which is in the journal by then."""
        try:
            async with self.generation.call():
                asked = self._asked(exchange)
                exchange.plan = Plan(request=asked)  # for the record of a call that ends before the plan is made
                if isinstance(exchange.engine, Replicas):
                    exchange.server = exchange.engine.of(exchange.capture.session_id)  # for the same record
                if not exchange.frozen:
                    capture, templater = exchange.capture, _templater(exchange.engine, exchange.capture.session_id)
                    exchange.plan = await self.splicer.prepare(
                        capture.memory, exchange.request, asked, capture.recording, templater
                    )
                check_space(exchange.plan.request, exchange.engine.info.max_model_len)
                completion = await self._ask(exchange)
            if exchange.call is None:
                self._take(exchange, whole_delta(completion))
            if completion.finish_reason not in FINISHED:
                raise _given_up(completion.finish_reason)
        except asyncio.CancelledError:
            if exchange.capture.time_is_up:
                self._record_cut_off(exchange, "abandoned", "the session's time was up", TIME_UP)
            else:
                self._record_cut_off(exchange, "abandoned", "the harness hung up")
            raise
        except EngineError as error:
            self._record_cut_off(exchange, "failed", error.message, error.kind)
            raise
        except Exception as error:
            log.exception("session %s: the engine's answer could not be read", exchange.capture.session_id)
            self._record_cut_off(exchange, "failed", repr(error))
            raise EngineError(502, f"the engine's answer could not be read: {error!r}", kind="server") from error
        call = exchange.answered(completion)
        self._record(exchange, call)
        if not exchange.frozen:  # ids of another model continue nothing
            exchange.capture.memory.remember(call, exchange.plan)
            exchange.capture.score(call, exchange.plan.request.prefix_length, exchange.server)
        return completion, call

    def _asked(self, exchange: Exchange) -> ChatRequest:
        """Return the call's request in the terms of the engine that answers it."""
        return self._terms[exchange.engine].of(exchange.capture.memory.engine_ids, exchange.request)

    async def _ask(self, exchange: Exchange) -> Completion:
        """Ask the session's replica of the engine; where it is lost, the one that takes the session over."""
        session_id = exchange.capture.session_id
        asked = replace(exchange.plan.request, stream=exchange.live, session_id=session_id)
        while True:
            replicas = exchange.engine if isinstance(exchange.engine, Replicas) else None
            if replicas is not None:
                await replicas.ready()
            exchange.server = exchange.engine if replicas is None else replicas.of(session_id)
            exchange.weight_version = exchange.server.weight_version
            try:
                return await exchange.server.chat(asked, exchange.sampling, functools.partial(self._take, exchange))
            except EngineError as error:
                if replicas is None:
                    raise
                if exchange.call is not None or error.sampled:
                    replicas.suspect(exchange.server, error, exchange.sampling)
                    raise
                if not await replicas.moved(exchange.server, error, exchange.sampling):
                    raise

    def _recorded(self, exchange: Exchange) -> tuple[Completion, ModelCall] | None:
        """Answer a call from the record that its session starts from; None: the engine is to answer. Raises
        `CallRefusedError` where the request differs from the record; the session then ends."""
        capture, request = exchange.capture, exchange.request
        handles, began = len(capture.handles.recorded), time.monotonic()
        if capture.recording is None:
            return None
        asked = self._asked(exchange)
        known = capture.memory.conversations.continuation(request.messages, request.tools, request.origins)
        parent_id = None if exchange.frozen or known.parent is None else known.parent.call_id  # as it is recorded
        try:
            found = capture.recording.find(parent_id, asked.messages, asked.tools)
        except DivergenceError as error:
            capture.stop(error)
            raise CallRefusedError(400, "invalid_request", str(error)) from error
        if found is None or not capture.recording.waiting:
            capture.caught_up.set()
        if found is None:
            exchange.index = next(capture.recording.new_indices)
            return None
        if len(capture.handles.recorded) > handles:  # later requests have this one's messages with the recorded handles
            request = replace(request, messages=capture.handles.from_harness(request.messages))
            known = capture.memory.conversations.continuation(request.messages, request.tools, request.origins)
            exchange.live = False
        completion = exchange.replay(*found)
        assert exchange.call is not None
        found[1].seconds = time.monotonic() - began
        capture.record(exchange.call)
        if not exchange.call.frozen:
            capture.memory.remember(exchange.call, Plan(request=asked, history=known.history))
        return completion, exchange.call

    def _take(self, exchange: Exchange, delta: Delta) -> None:
        """Write a piece of an answer to the journal, and hand the piece on."""
        if isinstance(exchange.engine, Replicas):
            exchange.engine.heard(exchange.capture.session_id)
        exchange.take(delta)
        exchange.capture.heard = exchange.capture.agent_seconds or 0.0
        if exchange.call is None:
            assert delta.prompt_ids is not None
            exchange.plan = self.splicer.confirm(exchange.plan, delta.prompt_ids)
            exchange.capture.begin(exchange.begin())
        elif delta.response_ids:
            exchange.capture.add(exchange.call, delta.response_ids, delta.logprobs)

    def _record_cut_off(
        self, exchange: Exchange, outcome: Literal["abandoned", "failed"], error: str, kind: str | None = None
    ) -> None:
        self._record(exchange, exchange.cut_off(outcome, error, kind))

    def _record(self, exchange: Exchange, call: ModelCall) -> None:
        now, tokens = exchange.server.weight_version, len(call.response_ids)
        call.weight_versions = spans(call.weight_versions, exchange.weight_version, now, tokens)
        if isinstance(exchange.engine, Replicas):
            exchange.engine.note(call.session_id, len(call.prompt_ids) + tokens)
        self.sampled_tokens += len(call.response_ids)
        exchange.call = call
        exchange.capture.record(call)


def _templater(engine: Engine, session_id: str) -> Templater:
    return Seated(engine, session_id) if isinstance(engine, Replicas) else engine


def _given_up(reason: str) -> EngineError:
    """Return the error for an answer that the engine gave up. An engine that is paused for new weights may end its
    answers in the middle, as if they were complete."""
    return EngineError(
        503, f"the engine gave its answer up in the middle (finish reason {reason!r})", kind="overloaded"
    )
