"""Sends results to the task's `callback_url`: at least once, signed, from an outbox that survives restarts.

A callback is written to the outbox together with the result that it tells, and leaves the outbox when the receiver has
answered 2xx. Until then it is repeated, with growing pauses, for days. Receivers recognise repetitions by their
idempotency key. A receiver calls `verify` before it trusts a body; `verify` also refuses old callbacks, so that an
attacker cannot replay them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import random
import time
from collections import Counter
from collections.abc import Collection, Mapping, Set
from typing import Literal
from urllib.parse import urlsplit

import aiohttp
import orjson

from polar_gym.background_loop import cancel_all
from polar_gym.http.edge import LEAST_BYTES_A_SECOND
from polar_gym.http.failures import reason
from polar_gym.http.urls import is_http_url
from polar_gym.service.addresses import CallbackAddresses
from polar_gym.service.book import Book, event
from polar_gym.service.change import OutboxEntry
from polar_gym.service.episode_files import DamagedError

log = logging.getLogger(__name__)

KEY_HEADER = "Polar-Gym-Idempotency-Key"
TIME_HEADER = "Polar-Gym-Timestamp"
SIGNATURE_HEADER = "Polar-Gym-Signature"

REPLAY_WINDOW_SECONDS = 300.0
"""How far a callback's timestamp may be from the receiver's clock."""
ANSWER_SECONDS, CONNECT_SECONDS = 60.0, 10.0
"""The time for a receiver's answer, and of that for a connection. A large body has as much more as one that is sent to
the server."""
GIVE_UP_SECONDS, LEAST_TRIES = 3 * 86400.0, 100
"""How long a callback is repeated, and how often at least: a server that was down for days has not tried, and a clock
may jump."""
AT_ONCE = 16
"""The most callbacks that are under way at once."""
TO_ONE_HOST = 8
"""The most of them to one host: a receiver that hangs leaves the other places to others."""
LONGEST_PAUSE = 300.0
"""The longest time, in seconds, between two tries to deliver a callback."""

CallbackEnd = Literal["callback.delivered", "callback.given_up"]


class ForgedCallbackError(ValueError):
    """A callback's signature is wrong, missing or too old: do not trust its body."""


def sign(key: str, timestamp: str, body: bytes) -> str:
    """Return the signature of a callback: an HMAC of its timestamp and its body."""
    return "v1=" + hmac.new(key.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def verify(key: str, headers: Mapping[str, str], body: bytes, now: float | None = None) -> str:
    """Return the idempotency key of a genuine callback (for receivers). Raise `ForgedCallbackError` for all others."""
    found = {name.lower(): value for name, value in headers.items()}
    timestamp = found.get(TIME_HEADER.lower(), "")
    genuine = hmac.compare_digest(
        sign(key, timestamp, body).encode(), found.get(SIGNATURE_HEADER.lower(), "").encode(errors="replace")
    )
    if not genuine:
        raise ForgedCallbackError(f"{SIGNATURE_HEADER} is not ours")
    if (
        not timestamp.isdigit()
        or abs((now if now is not None else time.time()) - int(timestamp)) > REPLAY_WINDOW_SECONDS
    ):
        raise ForgedCallbackError(f"{TIME_HEADER}={timestamp!r}: more than {REPLAY_WINDOW_SECONDS:g} s off")
    return callback_key(orjson.loads(body))


def callback_key(body: Mapping[str, object]) -> str:
    """Return the idempotency key that the body gives. The body is signed, the header with the key is not."""
    session = body.get("session")
    if isinstance(session, Mapping):
        return f"{session['session_id']}:{session['attempt']}"
    task = body["task"]
    assert isinstance(task, Mapping)
    return f"task:{task['task_id']}:{int(task['created_at'])}"


def check_url(url: str) -> str | None:
    """Return the fault of a callback URL, or None for a good one."""
    if not is_http_url(url):
        return "must be an http:// or https:// URL"
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        return "must hold no user name or password: URLs end up in logs"
    return None


class CallbackSender:
    """Sends the callbacks of the outbox until `run` is cancelled."""

    def __init__(self, book: Book, key: str, addresses: CallbackAddresses) -> None:
        self._book = book
        self._addresses = addresses
        self._store = book.store
        self._key = key

    async def run(self) -> None:
        running: dict[asyncio.Task[None], OutboxEntry] = {}
        async with aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(socket_factory=self._addresses.connect, resolver=self._addresses.lookups),
            auto_decompress=False,  # the answers' bodies are not read
        ) as http:
            try:
                while True:
                    self._book.outbox_news.clear()
                    now = time.time()
                    while (entry := await self._due(now, running.values())) is not None:
                        running[asyncio.create_task(self._send(http, entry))] = entry
                    for done in await self._next(running.keys(), now):
                        del running[done]
                        done.result()
            finally:
                await cancel_all(running)

    async def _due(self, now: float, running: Collection[OutboxEntry]) -> OutboxEntry | None:
        """Return the callback that is due first and has a place; None where there is none."""
        to_hosts = Counter(entry.host for entry in running)
        full = [host for host, count in to_hosts.items() if count >= TO_ONE_HOST]
        keys = {entry.key for entry in running}
        due = await self._store.due_callbacks(now, len(running) + 1, full) if len(running) < AT_ONCE else []
        return next((entry for entry in due if entry.key not in keys), None)

    async def _next(self, running: Set[asyncio.Task[None]], looked_at: float) -> set[asyncio.Task[None]]:
        """Wait until a callback under way has ended, a new one is in the outbox, or the next repetition is due. Return
        those that have ended. `looked_at`: when the outbox was read; a callback that became due since then is due now.
        """
        pause = None
        if len(running) < AT_ONCE and (next_due := await self._store.next_due(looked_at)) is not None:
            pause = max(0.0, next_due - time.time())
        news = asyncio.ensure_future(self._book.outbox_news.wait())
        try:
            await asyncio.wait({*running, news}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        return {sending for sending in running if sending.done()}

    async def _send(self, http: aiohttp.ClientSession, entry: OutboxEntry) -> None:
        try:
            body = await self._body(entry)
        except OSError as error:
            await self._failed(entry, f"its episode cannot be read now: {error}")
            return
        except DamagedError as error:
            log.error("callback %s: its episode cannot be read: %s", entry.key, error)
            await self._done(entry, "callback.given_up", f"its episode cannot be read: {error}", damaged=True)
            return
        if body is None:
            await self._done(entry, "callback.given_up", "its task was evicted")
            return
        timestamp = str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            KEY_HEADER: entry.key,
            TIME_HEADER: timestamp,
            SIGNATURE_HEADER: sign(self._key, timestamp, body),
        }
        total = ANSWER_SECONDS + len(body) / LEAST_BYTES_A_SECOND
        timeout = aiohttp.ClientTimeout(total=total, connect=CONNECT_SECONDS)
        try:
            async with http.post(
                entry.url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                problem = None if 200 <= response.status < 300 else f"HTTP {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            problem = reason(error)
        if problem is None:
            await self._done(entry, "callback.delivered")
        else:
            await self._failed(entry, problem)

    async def _failed(self, entry: OutboxEntry, problem: str) -> None:
        """Have a callback tried again later, or give it up where it is too old and was tried often."""
        if time.time() - entry.created_at > GIVE_UP_SECONDS and entry.tries + 1 >= LEAST_TRIES:
            log.warning("callback %s: given up after %d tries: %s", entry.key, entry.tries + 1, problem)
            await self._done(entry, "callback.given_up", problem)
        else:
            self._book.counts.callbacks["failed"] += 1
            log.info("callback %s: not delivered yet: %s", entry.key, problem)
            await self._store.callback_failed(entry.key, time.time() + pause_after(entry.tries + 1))

    async def _done(self, entry: OutboxEntry, kind: CallbackEnd, why: str = "", *, damaged: bool = False) -> None:
        """Remove a callback from the outbox. `damaged`: no later request could fetch its episode."""
        self._book.counts.callbacks[kind.removeprefix("callback.")] += 1
        said = {"reason": why} if why else {}
        fetched = damaged or kind == "callback.delivered"
        await self._store.callback_done(entry, event(entry, kind, entry, key=entry.key, **said), fetched=fetched)

    async def _body(self, entry: OutboxEntry) -> bytes | None:
        """Return the body of a callback, or None where its task was evicted. Raise `DamagedError`, or `OSError` where
        the episode cannot be read now."""
        task = await self._book.find(entry.task_id)
        if task is None:
            return None
        if entry.session_id is None:
            return orjson.dumps(
                {"kind": "task", "task_id": entry.task_id, "task": orjson.Fragment(task.state().to_json())}
            )
        sample = task.samples[entry.session_id]
        row = await self._store.find_episode(entry.session_id)
        episode = b"null"
        if row is not None and not row.evicted:
            episode = await asyncio.to_thread(self._store.files.read, row.session_id, row.attempt)
        parts = {"session": orjson.Fragment(sample.session.to_json()), "episode": orjson.Fragment(episode)}
        return orjson.dumps({"kind": "session", "task_id": entry.task_id, **parts})


def pause_after(tries: int) -> float:
    """Return the seconds until the next try, after `tries` of them: half a second, doubled by each further try, and up
    to a second of jitter; at most `LONGEST_PAUSE`."""
    doublings = min(tries - 1, 10)  # 0.5 s doubled ten times is more than the longest pause
    return min(0.5 * 2**doublings + random.uniform(0.0, 1.0), LONGEST_PAUSE)
