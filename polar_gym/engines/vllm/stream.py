"""vLLM's streamed answers: the ids of the prompt in the first chunk, sampled ids with their logprobs in the others.

Every answer is asked for as a stream, so that the ids of an answer that is cut off are known up to the cut. A chunk may
hold ids and no text (a parser holds the text back), or many ids. The last chunk holds vLLM's own count of the tokens.

A cancelled call has vLLM abort its request by id, where the server has a route for that, and reads the answer to its
end. Then no sampled token is lost. Elsewhere the connection is closed, which stops vLLM's work within 0.1 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

import aiohttp
import msgspec
import numpy as np

from polar_gym.background_loop import cancel_all
from polar_gym.chat import Completion, Delta, OnDelta
from polar_gym.chat.received import Received, text_delta
from polar_gym.engines import EngineError
from polar_gym.engines.http import Body, Http
from polar_gym.engines.openai_form import (
    CHAT,
    as_ids,
    check_count,
    check_logprobs,
    check_whole,
    logprobs_of,
    stop_sequence,
)
from polar_gym.engines.vllm import prompt_echo
from polar_gym.engines.vllm.prompt_echo import Sent
from polar_gym.engines.vllm.replay import Choices
from polar_gym.schema import Message, ReplayRecord, WeightVersion

DONE = b"[DONE]"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}

ABORT_ROUTES = ("/inference/v1/abort_requests", "/abort_requests")
"""The first needs `--enable-scale-out`, the second a server in development mode."""
ABORT_SECONDS = 10.0
"""How long a cancelled call waits for the end of its aborted answer."""
GENERATE = "/inference/v1/generate"
REQUEST_PREFIX = {CHAT: "chatcmpl-", GENERATE: "generate-tokens-"}
"""The words that vLLM puts before the ids of requests, by route."""


class _Entry(msgspec.Struct):
    """The logprob of a sampled token. Its other fields (the token's text and bytes) are skipped and not parsed."""

    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None


class _Choice(TypedDict, total=False):
    """The fields of a choice that are read."""

    delta: Any
    logprobs: _Logprobs | None
    token_ids: list[int] | None
    finish_reason: Any
    stop_reason: Any
    matched_stop: Any
    weight_versions: Any
    routed_experts: Any
    sampling_mask: Any


class _Chunk(TypedDict, total=False):
    """The data of an event."""

    choices: list[_Choice]
    prompt_token_ids: Any
    usage: Any
    error: Any


_parse_event = cast("Callable[[bytes], Body]", msgspec.json.Decoder(_Chunk).decode)
"""Parse the data of an event. Fields that are not named above are skipped."""


async def abort_route(http: Http) -> str | None:
    """Return the server's route that aborts requests by id, or None where the server has none."""
    for route in ABORT_ROUTES:
        with contextlib.suppress(EngineError):
            await http.post_raw(route, {"request_ids": [uuid.uuid4().hex]})  # the id of no request
            return route
    return None


async def ask(
    http: Http,
    path: str,
    body: Body,
    answer: StreamedAnswer,
    abort: str | None,
    headers: Mapping[str, str],
    now: Callable[[], Body] = dict,
) -> None:
    """Ask for an answer in pieces, and give them to `answer`. After the first piece, no failure leads to another try.
    `abort` is the server's route that aborts requests. `now`: fields that each try has as they are then."""
    await http.patiently(lambda: _ask_once(http, path, body | STREAM | now(), answer, abort, headers))


async def _ask_once(
    http: Http, path: str, body: Body, answer: StreamedAnswer, abort: str | None, headers: Mapping[str, str]
) -> None:
    request_id = uuid.uuid4().hex
    async with http.response("POST", path, body, {**headers, "X-Request-Id": request_id}) as response:
        events = Events(response.content)
        try:
            await answer.read(events)
        except aiohttp.ClientError as error:
            if not answer.begun:
                raise
            raise http.broken_off(repr(error)) from error
        except asyncio.CancelledError:
            if abort is not None:
                # A busy server sends tokens before it answers the other request.
                body = {"request_ids": [REQUEST_PREFIX[path] + request_id]}
                aborting = asyncio.create_task(http.post_raw(abort, body))
                with contextlib.suppress(EngineError, aiohttp.ClientError, TimeoutError):
                    async with asyncio.timeout(ABORT_SECONDS):
                        await answer.read(events)
                await cancel_all([aborting])
            raise


class Events:
    """The data of a response's server-sent events, however the bytes were cut. A line may be long: a prompt's ids.
    After a cancelled `read`, the next `read` loses nothing."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content
        self._pending: list[bytes] = []
        """The parts of a line whose end has not come."""

    async def read(self) -> list[bytes] | None:
        """Return the data of the events that came, perhaps of none yet; None at the response's end."""
        chunk = await self._content.readany()
        if not chunk:
            return None
        whole, newline, rest = chunk.rpartition(b"\n")
        if not newline:
            self._pending.append(rest)
            return []
        lines = b"".join((*self._pending, whole)).split(b"\n")
        self._pending = [rest]
        return [line[len(b"data:") :].strip() for line in lines if line.startswith(b"data:")]


class StreamedAnswer:
    """Takes the data of vLLM's events and tells each addition to `on_delta`. Every `EngineError` is a failed answer."""

    def __init__(
        self, http: Http, on_delta: OnDelta, sent: Sent | None, records: Collection[ReplayRecord] = ()
    ) -> None:
        """Begin an answer. `sent`: the prompt, where it is sent as ids. `records`: those that a whole
        answer must hold."""
        self._http = http
        self._choices = Choices(http.url, records)
        self.sent = sent
        self._on_delta = on_delta
        self._received = Received()
        self._new: _New | None = None
        self._places: dict[int, int] = {}
        """The server's index of a tool call -> its place among the calls that have a name. Some of vLLM's parsers count
        calls, too, of which they then tell nothing."""
        self._late: tuple[str, str] = "", ""
        """Reasoning and content that came while a tool call was open. They are told before the next call, or at the
        end: vLLM may send text before the rest of a call's arguments, and wires would open the call a second time."""
        self._begun = False
        self.finish_reason: str | None = None
        self.stop_sequence: str | None = None
        self._weight_versions: list[WeightVersion] = []
        self._cached_tokens: int | None = None
        self._done = False

    @property
    def begun(self) -> bool:
        """Return whether `on_delta` was called."""
        return self._received.prompt_ids is not None

    @property
    def prompt_ids(self) -> np.ndarray | None:
        """Return the ids that the engine conditioned on; None before the first event."""
        return self._received.prompt_ids

    @property
    def response_ids(self) -> list[int]:
        return self._received.response_ids

    async def read(self, events: Events) -> None:
        """Take the events up to the end of the response."""
        while (read := await events.read()) is not None:
            self.take(read)

    def take(self, read: Sequence[bytes]) -> None:
        """Take the data of events that came together. Their additions are told as one delta where that keeps the order
        of the text."""
        try:
            for data in read:
                self._add(data)
        finally:
            self._tell_new()

    def _add(self, data: bytes) -> None:
        if data == DONE:
            self._tell_late()
            self._done = True
            return
        try:
            chunk = _parse_event(data) if self._begun else prompt_echo.loads(data, self.sent, _parse_event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            wrong = "not an event of vLLM's" if isinstance(error, msgspec.ValidationError) else "not JSON"
            raise self._http.broken_off(f"an event is {wrong} ({error}): {data[:200]!r}") from error
        if chunk.get("error"):
            error = chunk["error"]
            raise self._http.broken_off(str(error.get("message", error) if isinstance(error, dict) else error))
        for choice in chunk["choices"]:  # one, or none in the last chunk
            self._add_choice(chunk, choice)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.stop_sequence = stop_sequence(choice) or self.stop_sequence
            self._weight_versions = weight_versions(choice) or self._weight_versions
            self._choices.take(choice)
        if not chunk["choices"] and (usage := chunk.get("usage")):
            self._untold().engine_tokens = usage["completion_tokens"]
            self._cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def say(self, message: Message, finish_reason: str) -> None:
        """Tell the text of an answer whose events held ids alone."""
        self._tell(text_delta(message))
        self.finish_reason = finish_reason

    def completion(self, sampling: dict[str, Any]) -> Completion:
        """Return the whole answer, after all its events were added."""
        received = self._received
        if not self._done or self.finish_reason is None or received.prompt_ids is None:
            raise self._http.broken_off(f"the stream ended after {len(received.response_ids)} tokens")
        check_whole(self._http.url, received.engine_tokens, received.response_ids)
        sampled = len(received.response_ids)
        return Completion(
            message=received.message(),
            finish_reason=self.finish_reason,
            stop_sequence=self.stop_sequence,
            prompt_ids=received.prompt_ids,
            response_ids=as_ids(received.response_ids),
            routed_experts=self._choices.routed_experts(len(received.prompt_ids), sampled),
            sampling_mask=self._choices.sampling_mask(sampled, sampling),
            logprobs=np.asarray(received.logprobs, np.float32),
            sampling=sampling,
            weight_versions=self._weight_versions,
            engine_tokens=received.engine_tokens,
            cached_tokens=self._cached_tokens,
        )

    def _tell(self, delta: Delta) -> None:
        self._received.add(delta)
        self._on_delta(delta)

    def _tell_new(self) -> None:
        new, self._new = self._new, None
        if new is not None and self._begun:
            check_logprobs(self._http.url, new.logprobs)
            self._tell(new.delta())

    def _tell_late(self) -> None:
        (reasoning, content), self._late = self._late, ("", "")
        if reasoning or content:
            self._tell_new()
            new = self._untold()
            new.reasoning, new.content = reasoning, content

    def _untold(self) -> _New:
        if self._new is None:
            self._new = _New()
        return self._new

    def _add_choice(self, chunk: Body, choice: Body) -> None:
        said, ids, new = choice.get("delta") or {}, choice.get("token_ids"), self._untold()
        if self._begun and ids is None:  # only the first chunk may hold the role and no ids
            raise _without_ids(self._http.url)
        if not self._begun:
            new.prompt_ids = prompt_ids(self._http.url, chunk)
            self._begun = True
        if ids is not None:
            listed = choice.get("logprobs")
            logprobs = [entry.logprob for entry in (listed.content if listed is not None else None) or ()]
            check_count(self._http.url, logprobs, ids)
            new.response_ids += ids
            new.logprobs += logprobs
        reasoning, content = said.get("reasoning") or said.get("reasoning_content") or "", said.get("content") or ""
        if not isinstance(content, str) or not isinstance(reasoning, str):
            raise self._http.broken_off(f"the text of an event is not a string: {str(said)[:200]}")
        if self._places:
            self._late = self._late[0] + reasoning, self._late[1] + content
            reasoning = content = ""
        if reasoning and new.content:
            self._tell_new()
            new = self._untold()
        new.reasoning += reasoning
        new.content += content
        for fragment in said.get("tool_calls") or []:
            self._add_fragment(fragment)

    def _add_fragment(self, fragment: Body) -> None:
        function, index = dict(fragment.get("function") or {}), fragment["index"]
        if function.get("name") and index not in self._places:
            self._places[index] = len(self._places)
            self._tell_late()
        if (place := self._places.get(index)) is not None:  # else of a call that never had a name
            self._untold().add_fragment({**fragment, "index": place, "function": function})


@dataclass(slots=True)
class _New:
    """The additions to an answer that were not told yet, with the fields of `Delta`."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    prompt_ids: np.ndarray | None = None
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    engine_tokens: int | None = None

    def add_fragment(self, fragment: dict[str, Any]) -> None:
        """Add a fragment of a tool call, to the last one where that is of the same call."""
        if not self.tool_calls or self.tool_calls[-1]["index"] != fragment["index"]:
            self.tool_calls.append(fragment)
            return
        function = self.tool_calls[-1]["function"]
        function["arguments"] = (function.get("arguments") or "") + (fragment["function"].get("arguments") or "")

    def delta(self) -> Delta:
        return Delta(
            reasoning=self.reasoning,
            content=self.content,
            tool_calls=self.tool_calls,
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            logprobs=self.logprobs,
            engine_tokens=self.engine_tokens,
        )


def prompt_ids(url: str, answer: dict[str, Any]) -> np.ndarray:
    """Return the ids that the engine conditioned on. Raises `EngineError` when the answer names none."""
    ids = answer.get("prompt_token_ids")
    if ids is None:
        raise _without_ids(url)
    return as_ids(ids)


def weight_versions(choice: dict[str, Any]) -> list[WeightVersion]:
    """Return the spans that the engine names; none before vLLM 0.33, except from `generate`."""
    spans = choice.get("weight_versions") or []
    return [
        WeightVersion(
            version=span["version"],
            engine_version=span["version"],
            start=span["start"],
            end=span["end"],
            older_cache=span["version"] != spans[0]["version"],
        )
        for span in spans
    ]


def ids_and_logprobs(url: str, choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return the sampled ids and one logprob for each. Raises `EngineError` when ids or logprobs are missing."""
    ids = choice.get("token_ids")
    if ids is None:
        raise _without_ids(url)
    return ids, logprobs_of(url, choice, ids)


def _without_ids(url: str) -> EngineError:
    return EngineError(
        502,
        f"the engine at {url} answered without token ids: it does not know `return_token_ids`. "
        "Use vLLM 0.10.2 or later, and no router in between that drops fields",
    )
