"""Keeps a node in touch with its rollout server: sends heartbeats and journals, and delivers episodes.

While a server is away, each episode stays on the disk until the server has acknowledged the episode. After a lease
without an answered heartbeat the node pauses generation: the server takes the node for dead by then, so that no order
to pause reaches the node.
Where the server refuses an episode for good, it gets one without a trajectory instead, so that the task can end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import aiohttp
import tenacity

from polar_gym.gateway.node.service import NodeService
from polar_gym.gateway.node.state import Key
from polar_gym.http.edge import LEAST_BYTES_A_SECOND
from polar_gym.http.failures import error_text, reason
from polar_gym.http.route import Route
from polar_gym.http.server_routes import DELIVER, HEARTBEAT, JOURNALS
from polar_gym.protocol import Journals
from polar_gym.record import Record

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
"""The longest pause between two heartbeats; a short lease makes the pause shorter."""
BEATS_IN_A_LEASE = 4
"""How many heartbeats a node sends in the time of its lease, at least."""
AT_MOST_EVERY_SECONDS = 1.0
"""The shortest pause between two heartbeats; a change of the node ends a longer pause."""
SHIP_SECONDS = 2.0
"""The pause between two looks at the journals of running sessions."""
DELIVERIES = 4
"""How many episodes are sent at the same time."""
REFUSED_AGAIN_SECONDS = 30.0
"""How long to wait before an episode that the server refused is sent again."""
FOR_GOOD = {413: 0.0, 400: 3600.0, 408: 3600.0, 422: 3600.0}
"""Statuses that refuse an episode for what it is, or for how slowly it comes -> for how many seconds it is sent again
all the same: a server that is older than the node may be about to be replaced."""
UNREADABLE_SECONDS = 600.0
"""For how long an episode is read again that is on the disk and cannot be read."""
R = TypeVar("R", bound=Record)
ANSWER_SECONDS, CONNECT_SECONDS = 120.0, 10.0
"""The time for an answer, and of that for a connection. A delivery has as much more as the server gives its body. A
heartbeat has half a lease at most: a dead connection must not silence the node."""


class UnreachableError(Exception):
    """The server did not answer."""


class ServerRefusedError(Exception):
    """The server answered with an error."""


class RefusedForGoodError(ServerRefusedError):
    """The server answered with a status of `FOR_GOOD`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.patience = FOR_GOOD[status]


class UnreadableError(Exception):
    """A session's episode cannot be read from the disk."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"its episode cannot be read: {error}")
        self.patience = 0.0 if isinstance(error, FileNotFoundError) else UNREADABLE_SECONDS


class Link:
    """Connects one node with its server while `run` runs."""

    def __init__(self, service: NodeService, server: str, url: str, key: str | None) -> None:
        self._service = service
        self._own_url = url
        self._pause = HEARTBEAT_SECONDS
        self._fence: asyncio.TimerHandle | None = None
        """Fences the node when the lease of its last answered heartbeat is over."""
        self._refused: dict[Key, float] = {}
        """Session -> when the server first refused its episode for good, or when it could first not be read."""
        self._rolling: dict[str, str] = {}
        """The versions of single servers that the last answer to a heartbeat told."""
        self._server = server
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    async def run(self) -> None:
        """Send heartbeats and journals, and deliver episodes, until cancelled."""
        async with aiohttp.ClientSession(headers=self._headers) as http, asyncio.TaskGroup() as group:
            group.create_task(self._beat(http))
            group.create_task(self._ship(http))
            for _ in range(DELIVERIES):
                group.create_task(self._deliver(http))

    # Heartbeats -------------------------------------------------------------------------------------------------------

    async def _beat(self, http: aiohttp.ClientSession) -> None:
        """Send a heartbeat after each pause, and sooner when the node changes."""
        changed, silent = self._service.changed, False
        while True:
            changed.clear()
            try:
                await self.heartbeat(http)
                silent = False
            except UnreachableError as error:
                if not silent:
                    log.warning("the server is away: %s", error)
                silent = True
            except ServerRefusedError as error:
                log.error("the server refuses this node's heartbeat: %s", error)
            at_least = min(AT_MOST_EVERY_SECONDS, self._pause)
            await asyncio.sleep(at_least)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause - at_least):
                    await changed.wait()

    async def heartbeat(self, http: aiohttp.ClientSession) -> None:
        """Report the node's sessions to the server, and follow the orders in its answer.

        Raises `UnreachableError` or `ServerRefusedError`.
        """
        service = self._service
        orders = service.orders
        body = service.heartbeat(self._own_url).to_json()
        loop = asyncio.get_running_loop()
        sent = loop.time()
        answer = await self._post(http, HEARTBEAT, body, seconds=2 * self._pause)
        if self._fence is not None:
            self._fence.cancel()
        self._fence = loop.call_at(sent + answer.lease_seconds, service.fence)
        service.fenced = False
        self._pause = min(HEARTBEAT_SECONDS, answer.lease_seconds / BEATS_IN_A_LEASE)
        service.cancel_all_of(answer.cancel)
        if answer.draining:
            service.drain()
        if service.orders != orders:
            return  # an order came while this answer was under way: the answer may be older than the order
        names, ended = service.generation().engines, self._rolling.keys() - answer.engines.keys()
        told, self._rolling = {} if ended else self._rolling, answer.engines
        version = answer.weight_version
        missed = any(names.get(url) not in (None, version) for url in ended)  # the order that ended a rolling update
        if version is not None and (missed or version != service.generation().weight_version):
            service.set_weights(version)
        for url, version in answer.engines.items():  # once: a server that began anew since then has other weights
            if version not in (told.get(url), service.generation().engines.get(url)):
                service.set_weights(version, url)
        if answer.generation.paused != service.generation().paused:
            await service.set_generation(answer.generation.model_copy(update={"running": "keep"}))

    # Journals ---------------------------------------------------------------------------------------------------------

    async def _ship(self, http: aiohttp.ClientSession) -> None:
        """Send the server what the journals of running sessions have more than before, so that it can hand a session on
        where this node is gone for good."""
        sizes: dict[Key, int | None] = {}
        while True:
            await asyncio.sleep(SHIP_SECONDS)
            sizes = {key: sizes.get(key, 0) for key in self._service.running}
            wanted = {key: size for key, size in sizes.items() if size is not None}
            keys: list[Key] = []
            try:
                pieces = await asyncio.to_thread(self._service.state.news, wanted)
                if not pieces:
                    continue
                keys = [Key(piece.session_id, piece.attempt) for piece in pieces]
                answer = await self._post(http, JOURNALS, Journals(pieces=pieces).to_json())
                sizes |= {key: answer.sizes.get(str(key)) for key in keys}
                continue
            except UnreachableError as error:
                log.debug("journals are not sent: %s", error)
                continue
            except (ServerRefusedError, OSError) as error:
                log.warning("journals are not sent: %s", error)
                if isinstance(error, RefusedForGoodError) and not error.patience and len(keys) == 1:
                    sizes |= dict.fromkeys(keys)  # of a line that is longer than the server takes
            except Exception:
                log.exception("journals are not sent")
            await asyncio.sleep(REFUSED_AGAIN_SECONDS)

    # Deliveries -------------------------------------------------------------------------------------------------------

    async def _deliver(self, http: aiohttp.ClientSession) -> None:
        """Deliver the episodes of ended sessions, one after the other."""
        while True:
            key = await self._service.ended.get()
            try:
                await self._until_taken(http, key)
                continue
            except asyncio.CancelledError:
                self._service.ended.put_nowait(key)  # for the link that begins again
                raise
            except (ServerRefusedError, UnreadableError) as error:
                log.error("session %s: its episode is not taken, and is sent again: %s", key, error)
            except Exception:
                log.exception("session %s: its episode could not be sent, and is sent again", key)
            asyncio.get_running_loop().call_later(REFUSED_AGAIN_SECONDS, self._service.ended.put_nowait, key)

    async def _until_taken(self, http: aiohttp.ClientSession, key: Key) -> None:
        """Deliver a session's episode, or a substitute where the server refuses it for good, or where it stays
        unreadable. Raises `ServerRefusedError` or `UnreadableError`."""
        episode = self._service.state.files(key).episode
        try:
            await self._until_reached(http, key, episode.read_bytes)
        except (RefusedForGoodError, UnreadableError) as error:
            since = self._refused.setdefault(key, time.monotonic())
            if time.monotonic() - since < error.patience:
                raise
            why = str(error) if isinstance(error, UnreadableError) else f"its episode is refused: {error}"
            await self._until_reached(http, key, partial(self._service.substitute, key, why))
            log.error("session %s: its episode %s is not taken, one without a trajectory is: %s", key, episode, error)
        self._refused.pop(key, None)

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(UnreachableError),
        wait=tenacity.wait_random_exponential(multiplier=0.5, max=15),
    )
    async def _until_reached(self, http: aiohttp.ClientSession, key: Key, read: Callable[[], bytes]) -> None:
        """Deliver the episode that is read, and try again until the server answers. Raises `ServerRefusedError` or
        `UnreadableError`."""
        try:
            episode = await asyncio.to_thread(read)
        except OSError as error:
            raise UnreadableError(error) from error
        body = b'{"attempt":%d,"episode":%b}' % (key.attempt, episode)
        await self._service.delivered(key, await self._post(http, DELIVER, body))

    async def _post(self, http: aiohttp.ClientSession, route: Route[R], body: bytes, seconds: float | None = None) -> R:
        """Return the server's answer to a request. Raises `UnreachableError` or `ServerRefusedError`."""
        assert route.gives is not None
        total = ANSWER_SECONDS + len(body) / LEAST_BYTES_A_SECOND if seconds is None else seconds
        timeout = aiohttp.ClientTimeout(total=total, connect=CONNECT_SECONDS)
        url = route.url(self._server, node=self._service.node.name)
        try:
            async with http.post(url, data=body, timeout=timeout) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnreachableError(f"{url}: {reason(error)}") from error
        if response.status != 200:
            told = f"{url} answered {response.status}: {error_text(answer)}"
            if response.status in FOR_GOOD:
                raise RefusedForGoodError(told, response.status)
            raise ServerRefusedError(told)
        try:
            return route.gives.from_json(answer)
        except ValueError as error:
            raise ServerRefusedError(f"{url} answered, but not with a {route.gives.__name__}: {error}") from error
