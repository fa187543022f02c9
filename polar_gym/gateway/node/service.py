"""The sessions that a node was given: takes, cancels, keeps and evicts them. Knows nothing of HTTP.

The node holds a session from the moment when the session's manifest is on the disk. The episode is on the disk before
the node tells of the session's end, and stays there until the server has acknowledged it. So a process that dies at any
time loses no session that it said it had: the next process salvages those that were running
(`polar_gym.gateway.node.salvage`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import orjson
import tenacity

from polar_gym.engines.replicas import Replicas
from polar_gym.gateway.node.admission import Allowed, check_request
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.node.settings import GatewaySettings
from polar_gym.gateway.node.state import Key, StateDirectory
from polar_gym.gateway.session.life import Plugins, SessionLife
from polar_gym.gateway.session.transcript import last_lines
from polar_gym.protocol import DeliveryAnswer, Dispatch, Generation, GenerationAnswer, Heartbeat, Transcript
from polar_gym.schema import (
    Artifacts,
    Episode,
    Failure,
    Fidelity,
    Session,
    Status,
    TaskRequest,
    Trajectory,
)

log = logging.getLogger(__name__)

SAVE_AGAIN_SECONDS = 5.0
"""The pause between two tries to write an episode."""
EVICT_SECONDS = 30.0
"""The shortest pause between two evictions."""
ENDING_SECONDS = 300.0
"""How long interrupted sessions may take to end."""
NOT_BEGUN = (Status.QUEUED, Status.INITIALIZING, Status.READY)
"""The states of a session whose harness does not run yet."""


class DrainingError(Exception):
    """The node takes no more sessions."""


@dataclass(slots=True)
class Held:
    """One session of this node whose end the server has not acknowledged."""

    session: Session
    life: SessionLife | None = None
    """None: the session has ended, and its episode is on the disk."""


def _cut_off(life: SessionLife, *, at_work: bool) -> bool:
    """Return whether a session lost its harness or its sandbox. While the gateway is stopped, that is no doing of the
    agent: Slurm and systemd send SIGTERM to every process of a job. A harness that was `at_work` and catches the signal
    exits with 0, mostly in the middle of a call, or after an answer with tool calls, of which none ends its work."""
    session = life.session
    if (session.failure is not None and session.failure.kind == "runtime_error") or (session.exit_code or 0) > 128:
        return True
    last = next((call for call in reversed(life.capture.asked) if call.kind == "main"), None)
    if not at_work or session.truncated_by is not None or last is None:
        return False
    calls, ends_by = (last.response or {}).get("tool_calls") or [], life.capture.harness.ends_by
    ended = bool(ends_by) and any(ends_by in call["function"]["arguments"] for call in calls)
    return last.outcome == "abandoned" or (bool(calls) and not ended)


class NodeService:
    """The sessions of one node, by key."""

    def __init__(
        self, node: Node, state: StateDirectory, settings: GatewaySettings, engine_key: str, allowed: Allowed
    ) -> None:
        self.node = node
        self.state = state
        self.settings = settings
        self.engine_key = engine_key
        self.allowed = allowed
        self.incarnation = uuid.uuid4().hex
        self.draining = False
        self.fenced = False
        """True: the server has answered no heartbeat for a lease. No order resumes generation before it does."""
        self._stopping = False
        self._at_work: set[Key] = set()
        """The sessions whose harness ran when the node began to stop."""
        self.changed = asyncio.Event()
        """Set when the server should be told of a change."""
        self.ended: asyncio.Queue[Key] = asyncio.Queue()
        """Sessions whose episode is on the disk and is to be delivered."""
        self.ended_by_status: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.orders = 0
        """The number of orders that came by a request of the server, not in the answer to a heartbeat."""
        self._held: dict[Key, Held] = {}
        self._finished: set[Key] = set()
        """The sessions that may be evicted."""
        self._work: dict[Key, asyncio.Task[None]] = {}

    # Sessions ---------------------------------------------------------------------------------------------------------

    @property
    def sessions(self) -> list[Session]:
        return [held.session for held in self._held.values()]

    def transcripts(self) -> list[Transcript]:
        """Return the end of each running session's conversation."""
        return [
            Transcript(
                session_id=key.session_id,
                attempt=key.attempt,
                calls=len(held.life.capture.calls),
                lines=last_lines(held.life.capture.calls),
            )
            for key, held in self._held.items()
            if held.life is not None and held.session.status is Status.RUNNING
        ]

    def session(self, key: Key) -> Session | None:
        held = self._held.get(key)
        return held.session if held else None

    async def find(self) -> None:
        """Take up the sessions of an earlier process. Each has an episode already. Call this once, before all else."""

        def ended() -> Iterator[tuple[Key, Session | None]]:
            for key in self.state.known():
                try:
                    yield key, self._undelivered(key)
                except ValueError as error:
                    self.state.set_aside(key, error)

        for key, session in await asyncio.to_thread(lambda: list(ended())):
            if session is None:
                self._finished.add(key)
            else:
                self._held[key] = Held(session)
                self._end(key)

    def _undelivered(self, key: Key) -> Session | None:
        files = self.state.files(key)
        if files.delivered.exists():
            return None
        episode = orjson.loads(files.episode.read_bytes())
        return Session.model_validate(episode.get("session") if isinstance(episode, dict) else episode)

    async def accept(self, order: Dispatch) -> tuple[Session, bool]:
        """Take a session. Return it, and whether it is new: the same key twice is one session.

        Raise `polar_gym.errors.ConfigError` for a request that cannot be run, and `DrainingError`.
        """
        key = Key(order.session_id, order.attempt)
        if (known := await self._known(key)) is not None:
            return known, False
        if self.draining:
            raise DrainingError("this node is draining: it finishes what it has")
        plugins = await asyncio.to_thread(self._check, order.request)
        request = order.request
        if order.resume and request.start_from is None:
            found = await asyncio.to_thread(self.state.record_for, order, self.settings.records, self._work)
            request = request.model_copy(update={"start_from": found})
        if key in self._held:
            return self._held[key].session, False
        life = self.node.open_session(request, order.sample_index, lambda _: self.changed.set(), key, plugins)
        self._held[key] = Held(life.session, life)
        try:
            await self.node.note(life)
        except OSError:
            del self._held[key]
            await self.node.close_session(life)
            raise
        self._work[key] = work = asyncio.create_task(self._conduct(key, life))
        work.add_done_callback(lambda _: self._work.pop(key))
        return life.session, True

    async def _known(self, key: Key) -> Session | None:
        if key in self._held:
            return self._held[key].session
        if key in self._finished:
            return (await asyncio.to_thread(self.state.read_manifest, key)).session
        return None

    @property
    def running(self) -> list[Key]:
        """Return the sessions whose journals grow."""
        sessions = [(key, held.session) for key, held in self._held.items() if held.life is not None]
        return [key for key, session in sessions if session.status is Status.RUNNING]

    def _check(self, request: TaskRequest) -> Plugins:
        check_request(request, self.allowed)
        return self.node.find_plugins(request)

    def cancel(self, key: Key) -> None:
        """Cancel a session. Its episode holds the calls until then. A session that has ended stays as it is, and an
        unknown key is ignored."""
        held = self._held.get(key)
        if held is not None and held.life is not None:
            held.life.cancel()

    def cancel_all_of(self, session_ids: Iterable[str]) -> None:
        wanted = set(session_ids)
        for key in list(self._held):
            if key.session_id in wanted:
                self.cancel(key)

    async def _conduct(self, key: Key, life: SessionLife) -> None:
        try:
            episode = await self.node.conduct(life)
            if self._stopping and _cut_off(life, at_work=key in self._at_work):
                life.session.failure = None
                episode = await life.abandon(Status.INTERRUPTED)
        except Exception as error:  # an error of the gateway itself ends this session, the others go on
            log.exception("session %s", key)
            life.fail(life.session.status, "gateway_error", repr(error))
            episode = await life.abandon(Status.ERROR)
        finally:
            await self.node.close_session(life)
        try:
            await self._save(key, episode)
        except Exception as error:  # a plug-in put a value into the episode that cannot be JSON
            log.exception("session %s: its episode cannot be written, one without a trajectory is", key)
            told = f"its episode cannot be written: {error!r}"
            episode = await asyncio.to_thread(self._without_trajectory, key, told)
            self._held[key].session = episode.session
            await self._save(key, episode)
        self.ended_by_status[episode.session.status] += 1
        if episode.session.failure is not None:
            self.failures[episode.session.failure.kind] += 1
        self._held[key].life = None
        self._end(key)

    async def _save(self, key: Key, episode: Episode) -> None:
        """Write an episode. Where the disk is full, try again until the operator has made space."""
        keep_trying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(OSError),
            wait=tenacity.wait_fixed(SAVE_AGAIN_SECONDS),
            before_sleep=lambda state: log.error(
                "session %s: its episode cannot be written, trying again: %s",
                key,
                state.outcome.exception() if state.outcome else "",
            ),
        )
        await keep_trying(asyncio.to_thread, self.state.finish, key, episode)

    def _end(self, key: Key) -> None:
        if self.settings.server is None:
            self._finished.add(key)  # no server will acknowledge it
        else:
            self.ended.put_nowait(key)
        self.changed.set()

    # Delivery and eviction --------------------------------------------------------------------------------------------

    async def delivered(self, key: Key, answer: DeliveryAnswer) -> None:
        """Record that the server has an episode. From now on the session may be evicted."""
        await asyncio.to_thread(self.state.mark_delivered, key, answer)
        self._held.pop(key, None)
        self._finished.add(key)
        self.changed.set()

    def substitute(self, key: Key, why: str) -> bytes:
        """Return what to deliver instead of an episode that the server refuses for good, or that cannot be read.
        Blocks."""
        return self._without_trajectory(key, why).to_json()

    def _without_trajectory(self, key: Key, why: str) -> Episode:
        """Return an episode with no trajectory, no reward, and a failure that says why. Blocks."""
        manifest, session = self.state.read_manifest(key), self._held[key].session.model_copy()
        before = f"; before that: {failure.kind}: {failure.message}" if (failure := session.failure) else ""
        session.failure = Failure(stage=session.status, kind="gateway_error", message=f"{why}{before}")
        if session.status is Status.COMPLETED:
            session.status = Status.ERROR
        return Episode(
            session=session,
            request=manifest.request,
            engine=manifest.engine,
            trajectory=Trajectory(builder=manifest.request.builder.name, traces=[], fidelity=Fidelity()),
            reward=None,
            artifacts=Artifacts(journal=str(self.state.files(key).journal)),
        )

    async def all_delivered(self) -> None:
        while self._held:
            self.changed.clear()
            await self.changed.wait()

    async def evict(self) -> None:
        """Remove finished sessions that are too old, and the oldest while all take more than `keep_bytes`."""
        settings = self.settings
        gone = await asyncio.to_thread(
            self.state.evict, sorted(self._finished), time.time(), settings.keep_seconds, settings.keep_bytes
        )
        for key in gone:
            self._finished.discard(key)
            self._held.pop(key, None)

    async def keep_evicting(self) -> None:
        """Evict again and again, in a twentieth of the time at most: it looks at the files of all kept sessions."""
        while True:
            begun = time.monotonic()
            try:
                await self.evict()
            except OSError as error:
                log.error("finished sessions could not be evicted: %s", error)
            await asyncio.sleep(max(EVICT_SECONDS, 20 * (time.monotonic() - begun)))

    # Orders -----------------------------------------------------------------------------------------------------------

    async def set_generation(self, order: Generation) -> GenerationAnswer:
        """Pause model calls, or resume them where the node is not fenced. With `finish`, return when no call is in
        flight, or when the time is up."""
        gate = self.node.proxy.generation
        if order.paused:
            gate.pause()
            if order.running == "finish":
                await gate.idle(order.timeout_seconds)
        elif not self.fenced:
            gate.resume()
        return self.generation()

    def fence(self) -> None:
        """Pause model calls because the lease is over. The answer to the next heartbeat resumes them."""
        log.warning("the server has answered no heartbeat for a lease: generation is paused until it does")
        self.fenced = True
        self.node.proxy.generation.pause()

    def set_weights(self, version: str, engine: str | None = None) -> GenerationAnswer:
        self.node.set_weight_version(version, engine)
        return self.generation()

    def generation(self) -> GenerationAnswer:
        gate, engine = self.node.proxy.generation, self.node.engine
        return GenerationAnswer(
            paused=gate.paused,
            in_flight=gate.in_flight,
            weight_version=engine.weight_version,
            engines=engine.versions if isinstance(engine, Replicas) else {},
        )

    def drain(self) -> None:
        """Take no new sessions, and finish those that the node holds."""
        self.draining = True
        self.changed.set()

    async def stop(self, grace_seconds: float) -> None:
        """Drain for `grace_seconds`, then interrupt the sessions that still run: the server begins them again on other
        nodes. Sessions that have not begun to run are interrupted at once."""
        self._stopping = True
        self._at_work = {key for key, held in self._held.items() if held.session.status is Status.RUNNING}
        self.drain()
        self._interrupt(NOT_BEGUN)
        if self._work:
            await asyncio.wait(self._work.values(), timeout=grace_seconds)
        self._interrupt()
        if self._work:
            _, left = await asyncio.wait(self._work.values(), timeout=ENDING_SECONDS)
            for work in left:
                log.error("a session does not end; the next start salvages it")
                work.cancel()

    def _interrupt(self, statuses: tuple[Status, ...] = tuple(Status)) -> None:
        for held in self._held.values():
            if held.life is not None and held.session.status in statuses:
                held.life.cancel(Status.INTERRUPTED)

    # Heartbeat --------------------------------------------------------------------------------------------------------

    def heartbeat(self, url: str) -> Heartbeat:
        stages, engine = self.node.stages, self.node.engine.info
        return Heartbeat(
            node=self.node.name,
            url=url,
            incarnation=self.incarnation,
            engine=engine,
            engine_key=self.engine_key,
            places=stages.places,
            held=stages.held,
            waiting=stages.init.waiting + self.node.alone.waiting,
            draining=self.draining,
            sessions=self.sessions,
        )
