"""The capture of one running session: its key, its limits, and the calls that it has made."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from polar_gym.chat import ChatRequest
from polar_gym.engines import Engine
from polar_gym.evaluators import Environment
from polar_gym.gateway.proxy.journal import Journal
from polar_gym.gateway.proxy.scoring import Scoring
from polar_gym.harnesses import Harness
from polar_gym.schema import Budget, ModelCall, Replayed, Sampling, Score
from polar_gym.splicing.handles import Handles
from polar_gym.splicing.plan import SessionMemory
from polar_gym.splicing.recording import Recording

MAX_TOOL_CALLS = 64
"""How many requests to the tools of its environment a session may have at once."""


class CaptureError(Exception):
    """A call could not be recorded."""


@dataclass(kw_only=True, eq=False, repr=False)
class SessionCapture:
    """The model calls of one session, recorded as they happen.

    Invariant: a call is in the journal before it is in `calls`, and in `calls` before its answer leaves.
    """

    session_id: str
    model_name: str
    """The name by which the harness knows the policy."""
    harness: Harness
    journal: Journal
    task_id: str
    sample_index: int
    sampling: Sampling
    budget: Budget
    scoring: Scoring
    key: str = field(init=False, default_factory=lambda: f"pg-{secrets.token_urlsafe(32)}")
    """The session's API key: a capability that opens the model calls of this session and nothing else."""
    environment: Environment | None = None
    """Whose tools the harness may call."""
    running: bool = False
    """The proxy answers only while this is true."""
    time_is_up: bool = False
    """The agent's time has ended: a call that is cut off now is so for that."""
    calls: list[ModelCall] = field(default_factory=list)
    memory: SessionMemory = field(default_factory=SessionMemory)
    recording: Recording | None = None
    """The record that the first calls are answered from; None: the engine answers all calls."""
    handles: Handles = field(default_factory=Handles)
    """Those of the record, and of the harness in their place."""
    clock: Callable[[], float] | None = None
    """Returns the agent's seconds so far, with those of its earlier attempts; None: the agent's time has not begun."""
    heard: float = 0.0
    """The agent's seconds when an engine sent the last part of an answer."""
    caught_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the record was given out, or when the engine was asked for a call."""
    fell_behind: bool = False
    """A resumed session ended in the middle of its record: before its harness had asked for the whole record, or for
    anything new. Calls beside the work (`auxiliary`) do not count."""
    exhausted: asyncio.Future[Literal["calls", "tokens"]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done when the harness asked for more than its budget holds. Raises `CaptureError` when a call could not be
    recorded, because then the session must end too."""
    admitted: int = 0
    """How many calls were let in, with those that the record has and does not give out."""
    refused_fields: set[str] = field(default_factory=set)
    """The fields, without indices, for which a request was refused that cannot be translated."""
    _kept: set[str] = field(default_factory=set)
    """The ids of the calls that are in the books and were not asked for."""
    _passes: set[asyncio.Task[None]] = field(default_factory=set)
    _given_back: int = 0
    """How many of the calls that were let in do not count against the budget."""
    _sampled_tokens: int = 0
    _door: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the call that is to be let in next."""
    _in_flight: dict[asyncio.Task[Any], int] = field(default_factory=dict)
    """The task that answers each call -> how many tokens of the budget the call may use, 0 for a tool."""

    @asynccontextmanager
    async def admit(self, request: ChatRequest, longest: int) -> AsyncIterator[tuple[int, ChatRequest] | None]:
        """Let a new call in, which is in flight as long as the context lasts. Yield its index, and its request with
        `max_tokens` cut to the tokens that are left. Yield None when the session has ended or its budget is used up.
        `longest`: the tokens that an answer may have where the request bounds none.

        Reserve tokens for calls in flight, so that parallel calls cannot exceed the budget. Where too few are free
        beside the reservations, wait until a call ends: a call is never cut by what others may sample. Calls are let in
        in the order in which they came.
        """
        task = asyncio.current_task()
        assert task is not None
        async with self._door:
            while (granted := self._grant(request, longest)) == 0:
                await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
            if granted is not None:
                self._in_flight[task] = granted
        if granted is None:
            yield None
            return
        if self.budget.max_sampled_tokens is not None:
            request = replace(request, max_tokens=granted)
        self.admitted += 1
        try:
            yield self.admitted - 1, request
        finally:
            del self._in_flight[task]

    @property
    def asked(self) -> list[ModelCall]:
        """Return the calls that the harness asked for: without the rest of the record of a session that goes on."""
        return [call for call in self.calls if call.call_id not in self._kept]

    @property
    def agent_seconds(self) -> float | None:
        return None if self.clock is None else self.clock()

    @property
    def offers_tools(self) -> bool:
        return self.environment is not None and bool(self.environment.tools)

    @asynccontextmanager
    async def tool_call(self) -> AsyncIterator[bool]:
        """Let a request to the environment's tools be cut off by the end of the session as long as the context lasts.

        Yield whether the request may be answered: False where it is one too many.
        """
        task = asyncio.current_task()
        assert task is not None
        self._in_flight[task] = 0
        try:
            yield sum(not granted for granted in self._in_flight.values()) <= MAX_TOOL_CALLS
        finally:
            del self._in_flight[task]

    def _grant(self, request: ChatRequest, longest: int) -> int | None:
        """Return how many tokens a new call may sample; 0: none for now; None: the session is over."""
        limits = self.budget
        if not self.running:
            return None
        if limits.max_calls is not None and self.admitted - self._given_back >= limits.max_calls:
            return self._refuse("calls")
        if limits.max_sampled_tokens is None:
            return 1
        left = limits.max_sampled_tokens - self._sampled_tokens
        if left <= 0:
            return self._refuse("tokens")
        wanted = min(left, longest if request.max_tokens is None else max(1, request.max_tokens))
        return wanted if wanted <= left - sum(self._in_flight.values()) else 0

    @property
    def cut_by_budget(self) -> bool:
        """Return whether the last answer of the main conversation ended because the token budget was used up."""
        limit = self.budget.max_sampled_tokens
        last = next((call.finish_reason for call in reversed(self.calls) if call.kind == "main"), None)
        return limit is not None and self._sampled_tokens >= limit and last == "length"

    async def end(self) -> None:
        """Let no more calls in, and cut off those in flight. When it returns, every call is recorded. May be called
        twice."""
        self.running = False
        if self.exhausted.done():
            self.exhausted.exception()  # retrieved here, or asyncio would log it: the session has ended anyway
        for task in list(self._in_flight):
            task.cancel()
        if self._in_flight:
            await asyncio.wait(self._in_flight)
        if self.recording is not None:
            left = list(self.recording.waiting.values())
            self.recording.waiting.clear()
            new = [call for call in self.calls if call.replayed is None]
            if self.recording.owned and _has_work(left) and not _has_work(new):
                self.fell_behind = True
            self._keep(left)

    def _refuse(self, reason: Literal["calls", "tokens"]) -> None:
        if not self.exhausted.done():
            self.exhausted.set_result(reason)

    def start_from(self, recording: Recording) -> None:
        """Answer the first calls from a record. The calls that the record has and does not give out count as made; a
        session that goes on with its own record has them in its books, too. Raises `CaptureError`, as `record` does."""
        self.recording, self.handles = recording, recording.handles
        self.admitted = sum(map(_is_spent, recording.left_out))
        if not recording.waiting:
            self.caught_up.set()
        self._keep(recording.left_out)

    def _keep(self, calls: Iterable[ModelCall]) -> None:
        """Take calls of the session's own record into its books that the harness did not ask for again."""
        if self.recording is None or not self.recording.owned:
            return
        for call in calls:
            outcome = "abandoned" if call.outcome == "delivered" else call.outcome
            how = Replayed(session_id=self.recording.session_id, owned=True)
            self._kept.add(call.call_id)
            changes = {"session_id": self.session_id, "outcome": outcome, "replayed": call.replayed or how}
            self.record(call.model_copy(update={**changes, "messages": list(call.messages)}))

    def stop(self, error: Exception) -> None:
        """End the session by an error."""
        if not self.exhausted.done():
            self.exhausted.set_exception(error)

    def begin(self, call: ModelCall) -> None:
        """Write a call whose answer has begun to the journal. Raises `CaptureError`, as `record` does."""
        try:
            self.journal.append(call)
        except OSError as error:
            raise self._unrecorded(call, error) from error

    def add(self, call: ModelCall, ids: list[int], logprobs: list[float]) -> None:
        """Write the next sampled tokens of a call that was begun. Raises `CaptureError`, as `record` does."""
        self._amend(call, response_ids=ids, logprobs=logprobs)

    def record(self, call: ModelCall) -> None:
        """Write a call, or the rest of a call that was begun, to the journal and count it. Raises `CaptureError` where
        the journal cannot be written: the call counts all the same, and its answer must not leave."""
        try:
            self.journal.append(call)
        except OSError as error:
            call.outcome = "failed"
            raise self._unrecorded(call, error) from error
        finally:
            self.calls.append(call)
            self._sampled_tokens += len(call.response_ids)
            self._given_back += call.replayed is None and not _is_spent(call)

    def mark_abandoned(self, call: ModelCall) -> None:
        """Mark a recorded call as abandoned: the harness hung up before it had the whole answer. Raises `CaptureError`
        where the journal cannot be written: the call counts as abandoned all the same."""
        call.outcome = "abandoned"
        self.memory.conversations.forget(call.call_id)
        self._amend(call, outcome="abandoned")

    def score(self, call: ModelCall, known: int, engine: Engine) -> None:
        """Begin to score a recorded call of an engine in the background where `Scoring.consider` chooses the call."""
        if (task := self.scoring.consider(call, known, engine, self._stamp)) is not None:
            self._passes.add(task)
            task.add_done_callback(self._passes.discard)

    async def end_passes(self, *, cancel: bool = False) -> None:
        """Wait until all calls that are being scored have their scores; with `cancel`, cut the passes off first."""
        for task in self._passes if cancel else ():
            task.cancel()
        await asyncio.gather(*self._passes, return_exceptions=True)

    def _stamp(self, call: ModelCall, scores: list[Score]) -> None:
        call.scores = scores
        self._amend(call, scores=[score.model_dump() for score in scores])

    def _amend(self, call: ModelCall, **fields: Any) -> None:
        try:
            self.journal.amend(call.call_id, **fields)
        except OSError as error:
            raise self._unrecorded(call, error) from error

    def _unrecorded(self, call: ModelCall, error: OSError) -> CaptureError:
        """Report the unwritten call to the code that runs the session and then ends it. Return the error to raise."""
        call.error = f"it could not be written to {self.journal.path}: {error}"
        self.stop(CaptureError(f"call {call.call_id}: {call.error}"))
        return CaptureError(call.error)


def _has_work(calls: Iterable[ModelCall]) -> bool:
    return any(call.kind != "auxiliary" for call in calls)


def _is_spent(call: ModelCall) -> bool:
    """Return whether a call counts against the budget of calls: not where the machinery failed it."""
    return call.outcome != "failed" or call.error_kind in ("invalid_request", "context_length")
