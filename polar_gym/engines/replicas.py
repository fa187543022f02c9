"""The servers of a policy as one engine. Each session stays with one replica, whose prefix cache knows it.

A new session goes to the replica with the least load: the tokens of the longest calls of its sessions, or those that a
session is expected to have, if these are more. A replica that cannot be connected to, or that fails a call and then a
request of one token, hands its sessions over to the others, and is asked again in the background. So does one of
several that is silent to such a request, and to all others meanwhile. It is taken back at once where its process is the
same as before and samples, else after the last update was repeated. Where a trainer updates the servers itself, a
replica that began anew waits until the trainer names its weights: they may be any. All but the silence holds for a
single server, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from polar_gym.background_loop import cancel_all
from polar_gym.chat import ChatRequest, Completion, OnDelta
from polar_gym.engines import UNREACHABLE, Engine, EngineError, Updating
from polar_gym.engines.addresses import addresses
from polar_gym.engines.http import Http
from polar_gym.engines.openai_form import ServerOptions
from polar_gym.engines.probe import Outcome, probe
from polar_gym.engines.weights import after_failure
from polar_gym.http.urls import engine_url
from polar_gym.schema import EngineInfo, Message, Sampling, ToolDefinition

log = logging.getLogger(__name__)

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 8.0
"""Between two tries to reach a replica that is away."""

T = TypeVar("T")


class Server(Engine, Protocol):
    """An engine behind one URL.

    `start` is called again where the server may have begun anew. A failed `start` leaves `http` open, because calls may
    be in flight.
    """

    http: Http


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(eq=False, slots=True)
class Replica:
    """One of the servers."""

    engine: Server
    began: str | None = None
    """When its process began; None: not known."""
    up: bool = True
    named: asyncio.Event = field(default_factory=_set)
    """Cleared when the replica began anew with unknown weights: it waits until a trainer names or sends weights."""
    sick: Sampling | None = None
    """The sampling with which it failed a call and then one token; None once it samples."""
    probe: asyncio.Task[Outcome] | None = None
    """The last request of one token."""
    heard: float = 0.0
    """When it last sent a part of an answer, by the monotonic clock."""
    updating: bool = False
    """Whether it is being given new weights."""
    problem: str = ""
    """The error of the last try to take it back."""


@dataclass(frozen=True, slots=True)
class Seated:
    """The server of a session, to template and to decode for it: a server that is slow holds up its own sessions."""

    replicas: Replicas
    session_id: str

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        return await self.replicas.ask(lambda engine: engine.template(messages, tools), self.session_id)

    async def decode(self, ids: Sequence[int]) -> str:
        return await self.replicas.ask(lambda engine: engine.decode(ids), self.session_id)


@dataclass(slots=True)
class Seat:
    """The place of a session."""

    replica: Replica
    tokens: float
    """Those of its longest call so far."""


class Replicas:
    """The servers that `engine.url` names, as one engine. A subclass names the options and the engine of one URL."""

    Options: ClassVar[type[ServerOptions]]
    make: ClassVar[Callable[[Any], Server]]

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        urls = [options.url] if isinstance(options.url, str) else options.url
        self.replicas = [self._replica(url) for url in urls]
        self._seats: dict[str, Seat] = {}
        self._ended, self._ended_tokens = 0, 0.0
        self._served: EngineInfo | None = None
        """The model that was served at the start, and how. None before."""
        self._version: str | None = None
        self._weights: Path | Mapping[str, Any] | None = None
        """The weights of `_version`, where `set_weights` brought them."""
        self._waiting: dict[Replica, asyncio.Task[None]] = {}
        self._back = asyncio.Event()
        self._suspected: set[asyncio.Task[bool]] = set()

    def _replica(self, url: str) -> Replica:
        return Replica(type(self).make(self._options.model_copy(update={"url": url})))

    # The engine -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every replica. Raises `EngineError` where one does not answer, or differs from the first one."""
        urls = [url for each in self.replicas for url in await addresses(each.engine.http.url)]
        if len(urls) > len(self.replicas):
            self.replicas = [self._replica(url) for url in urls]
        try:
            await asyncio.gather(*(each.engine.start() for each in self.replicas))
            self._served = self.replicas[0].engine.info
            for each in self.replicas:
                self._check_alike(each)
                each.began = await each.engine.http.began()
                each.engine.http.waits_for_connections = False
        except BaseException:
            await self.close()
            raise

    def _check_alike(self, replica: Replica) -> None:
        told, served = replica.engine.info.model_dump(), self.info.model_dump()
        for name in served:
            if told[name] != served[name]:
                url, first = replica.engine.http.url, self.replicas[0].engine.http.url
                raise EngineError(
                    400,
                    f"engine.url: {url} has {name}={told[name]!r} and {first} had {name}={served[name]!r} at first; "
                    "the servers of a list, and one that begins anew, must serve the same model with the same flags",
                )

    async def close(self) -> None:
        probes = [each.probe for each in self.replicas if each.probe is not None]
        await cancel_all([*self._waiting.values(), *self._suspected, *probes])
        await asyncio.gather(*(each.engine.close() for each in self.replicas))

    @property
    def info(self) -> EngineInfo:
        return self._served or self.replicas[0].engine.info

    @property
    def takes_prefix_only(self) -> bool:
        return self.replicas[0].engine.takes_prefix_only

    @property
    def weight_version(self) -> str | None:
        return self._version

    @weight_version.setter
    def weight_version(self, version: str | None) -> None:
        self.name_weights(version)

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        return await self.ask(lambda engine: engine.chat(request, sampling, on_delta))

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        return await self.ask(lambda engine: engine.template(messages, tools))

    async def decode(self, ids: Sequence[int]) -> str:
        return await self.ask(lambda engine: engine.decode(ids))

    async def score(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return await self.ask(lambda engine: engine.score(ids))

    async def ask(self, ask: Callable[[Server], Awaitable[T]], session_id: str | None = None) -> T:
        """Ask the replica of a session, else the one with the least load, and another one where that one is away."""
        while True:
            await self.ready()
            engine = self._least().engine if session_id is None else self.of(session_id)
            try:
                return await ask(engine)
            except EngineError as error:
                if not await self.moved(engine, error):
                    raise

    # Sessions ---------------------------------------------------------------------------------------------------------

    def of(self, session_id: str) -> Server:
        """Return the engine of a session, which gets a place if it has none."""
        seat = self._seats.get(session_id)
        if seat is None or not seat.replica.up:
            seat = self._seats[session_id] = Seat(self._least(), 0.0 if seat is None else seat.tokens)
        return seat.replica.engine

    def url_of(self, engine: Engine) -> str | None:
        """Return where a replica listens; None where there is only one."""
        several = self.replicas if len(self.replicas) > 1 else ()
        return next((each.engine.http.url for each in several if each.engine is engine), None)

    async def answers(self, url: str | None, sampling: Sampling) -> bool:
        """Return whether the replica that `url_of` names is up and samples now: one token, or parts of other answers
        meanwhile. One that does not is away then, unless it is silent and the only one. Where `url` names none of the
        replicas, the one with the least load counts."""
        asked = next((each for each in self.replicas if each.engine.http.url == url), None) or self._least()
        if not asked.up:
            return False
        outcome = await self._outcome(asked, sampling)
        if outcome == "samples":
            return True
        if outcome == "fails" or len(self.replicas) > 1:
            asked.sick = sampling
            self._take_away(asked, f"{asked.engine.http.url} does not sample")
        return False

    def heard(self, session_id: str) -> None:
        """Take notice of a part of an answer."""
        if (seat := self._seats.get(session_id)) is not None:
            seat.replica.heard = time.monotonic()

    def note(self, session_id: str, tokens: int) -> None:
        """Take notice of the tokens of a session's call, prompt and answer."""
        if (seat := self._seats.get(session_id)) is not None:
            seat.tokens = max(seat.tokens, tokens)

    def release(self, session_id: str) -> None:
        """Give back the place of a session that has ended."""
        if (seat := self._seats.pop(session_id, None)) is not None:
            self._ended, self._ended_tokens = self._ended + 1, self._ended_tokens + seat.tokens

    def _least(self) -> Replica:
        """Return the replica with the least load, the first one of several; of those that are up, if any is."""
        expected = self._ended_tokens / self._ended if self._ended else 1.0
        loads = {each: 0.0 for each in self.replicas if each.up} or dict.fromkeys(self.replicas, 0.0)
        for seat in self._seats.values() if len(loads) > 1 else ():
            if seat.replica in loads:
                loads[seat.replica] += max(seat.tokens, expected)
        return min(loads, key=lambda replica: loads[replica])

    async def lost(self, engine: Engine, error: EngineError, sampling: Sampling | None = None) -> bool:
        """Return whether a replica that failed is away: it cannot be connected to, or it failed a call with this
        `sampling` by itself, and now one token, too. Silence counts where there are others. Its sessions then go
        elsewhere."""
        failed = next(each for each in self.replicas if each.engine is engine)
        if error.kind == "server" and sampling is not None:
            outcome = await self._outcome(failed, sampling) if failed.up else "fails"
            if outcome == "samples" or (outcome == "silent" and len(self.replicas) == 1):
                return False  # the request is the cause, or a queue
            failed.sick = sampling
        elif error.kind != UNREACHABLE:
            return False
        self._take_away(failed, error.message)
        return True

    def suspect(self, engine: Engine, error: EngineError, sampling: Sampling) -> None:
        """Find out whether a replica is `lost` that broke an answer off. The call does not wait for that."""
        task = asyncio.create_task(self.lost(engine, error, sampling))
        self._suspected.add(task)
        task.add_done_callback(self._suspected.discard)

    def _take_away(self, replica: Replica, reason: str) -> None:
        if replica.up:
            log.warning("%s; %s", reason, self._elsewhere(replica))
            replica.up = False
            self._back.clear()
            self._waiting[replica] = asyncio.create_task(self._wait_for(replica))

    async def _outcome(self, replica: Replica, sampling: Sampling) -> Outcome:
        """Return how a replica takes a request of one token; a part of another answer meanwhile, or an update, counts
        as a token."""
        began = time.monotonic()
        outcome = await self._probed(replica, sampling)
        return "samples" if replica.updating or replica.heard > began else outcome

    async def _probed(self, replica: Replica, sampling: Sampling) -> Outcome:
        """Return how a replica takes a request of one token. Calls that fail together ask once."""
        if replica.probe is None or replica.probe.done():
            replica.probe = asyncio.create_task(probe(replica.engine, sampling))
        return await asyncio.shield(replica.probe)

    async def moved(self, engine: Engine, error: EngineError, sampling: Sampling | None = None) -> bool:
        """Return whether another replica can be asked after a replica failed: where that one is `lost`, at once if
        another one is up, else as soon as one is, within `patience_seconds`."""
        if not await self.lost(engine, error, sampling):
            return False
        try:
            await self.ready()
        except EngineError:
            return False
        return True

    async def ready(self) -> None:
        """Wait until a replica is up. Raises `EngineError` where none is within `patience_seconds`."""
        if any(each.up for each in self.replicas):
            return
        try:
            async with asyncio.timeout(self._options.patience_seconds):
                await self._back.wait()
        except TimeoutError as error:
            urls = ", ".join(each.engine.http.url for each in self.replicas)
            told = f"{urls} cannot be reached, or began anew and waits until its weights are named, or does not sample"
            if problems := [each.problem for each in self.replicas if each.problem]:
                told = f"{told}; the last try: {problems[0]}"
            raise EngineError(503, told, kind=UNREACHABLE) from error

    def _elsewhere(self, failed: Replica) -> str:
        others = any(each.up for each in self.replicas if each is not failed)
        return "its sessions go on elsewhere" if others else "its sessions wait for it"

    async def _wait_for(self, replica: Replica) -> None:
        """Take a replica back as soon as it answers and has the weights that its version names."""
        seconds = FIRST_WAIT_SECONDS
        while not replica.up:
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, LONGEST_WAIT_SECONDS)
            try:
                await self._take_back(replica)
            except EngineError as error:
                replica.problem = error.message
                level = logging.DEBUG if error.kind == UNREACHABLE else logging.WARNING
                log.log(level, "%s is not taken back yet: %s", replica.engine.http.url, error.message)
            except Exception:  # an error would end the only task that asks the replica again
                log.warning("%s is not taken back yet", replica.engine.http.url, exc_info=True)

    async def _take_back(self, replica: Replica) -> None:
        engine, began = replica.engine, await replica.engine.http.began()
        if self._may_have_begun_anew(replica, began):
            if engine.weight_version is not None:
                engine.weight_version = None
                replica.named.clear()
            await engine.start()
            self._check_alike(replica)
            replica.began = began
        if replica.sick is not None:
            if await self._probed(replica, replica.sick) != "samples":
                raise EngineError(503, "it does not sample one token", kind=UNREACHABLE)
            replica.sick = None
        while not self._is_current(replica):  # a trainer may bring other weights during an update
            if self._weights is None:
                log.warning("%s is back with unknown weights; it waits until its version is set", engine.http.url)
                await replica.named.wait()
            else:
                await self._update(replica, self._weights, str(self._version))
                if self._weights is None:  # another server refused them meanwhile, or the trainer named its own
                    replica.named.clear()
        log.warning("%s is back", engine.http.url)
        replica.up, replica.problem = True, ""
        self._back.set()

    def _may_have_begun_anew(self, replica: Replica, began: str | None) -> bool:
        """Return whether a server may have other weights than before. Without metrics no one can tell: a single server
        whose trainer loads its weights is then taken for the same, because no other could go on."""
        if began is not None or replica.began is not None or len(self.replicas) > 1 or self._weights is not None:
            return began is None or began != replica.began
        log.warning("%s has no metrics: it may have begun anew, with other weights", replica.engine.http.url)
        return False

    def _is_current(self, replica: Replica) -> bool:
        if self._weights is None:
            return replica.named.is_set()
        return replica.engine.weight_version == self._version

    # Weights ----------------------------------------------------------------------------------------------------------

    @property
    def versions(self) -> dict[str, str | None]:
        """Return the version of the weights of each server, by URL."""
        return {each.engine.http.url: each.engine.weight_version for each in self.replicas}

    def name_weights(self, version: str | None, url: str | None = None) -> None:
        """Take a trainer's word that the server at `url` has new weights, or that all have. The version that all have
        already, said once more, holds for servers that were named alone meanwhile, and for none that began anew."""
        named = self.replicas if url is None else [r for r in self.replicas if r.engine.http.url == engine_url(url)]
        if url is None and version == self._version:
            named = [each for each in named if each.named.is_set() and self._weights is None]
        elif url is None:
            self._version, self._weights = version, None
        for each in named:
            each.engine.weight_version = version
            each.named.set()

    async def set_weights(self, weights: Path | Mapping[str, Any], version: str) -> None:
        """Give the replicas new weights, one after another: see `polar_gym.engines.Updating`. One that is away gets
        them when it is back, unless the update fails elsewhere."""
        before = self._version, self._weights
        loaded = [each.engine.weight_version for each in self.replicas]
        waiting = [each for each in self.replicas if not each.named.is_set()]
        self._version, self._weights = version, weights
        for each in waiting:
            each.named.set()  # it gets the weights instead
        try:
            for each in self.replicas:
                if each.up or len(self.replicas) == 1:
                    try:
                        await self._update(each, weights, version)
                    except EngineError as error:
                        if not await self.moved(each.engine, error):
                            raise
        except BaseException:  # no server is to be given these weights later: the trainer is told that it has to act
            changed = [each.engine.weight_version for each in self.replicas] != loaded
            self._version, self._weights = (after_failure(version), None) if changed else before
            for each in waiting:
                if each.engine.weight_version != version:
                    each.named.clear()
            raise

    async def _update(self, replica: Replica, weights: Path | Mapping[str, Any], version: str) -> None:
        if not isinstance(replica.engine, Updating):
            raise EngineError(400, f"engine={self.info.name} takes no weights; use vllm or embedded")
        replica.updating = True
        try:
            await replica.engine.set_weights(weights, version)
        finally:
            replica.updating = False
        replica.engine.weight_version = version
        replica.named.set()
