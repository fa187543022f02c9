"""A receiver of callbacks as a process that can be killed: it verifies, and stores each idempotency key once.

    POLAR_GYM_CALLBACK_KEY=... python -m tests.faults.receiver --port P --store FILE

`results` has one row for each key, `arrivals` one for each request that was genuine. A row is on the disk before the
sender is told so: a receiver that is killed between the two is told again, and knows the key. That this happens often
enough, every tenth request is stored and then not answered.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import sqlite3
from pathlib import Path

import orjson
from aiohttp import web

from polar_gym.http.keys import CALLBACK_KEY
from polar_gym.service.callbacks import ForgedCallbackError, verify

UNANSWERED_EVERY = 10
SCHEMA = """
CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, kind TEXT, id TEXT, attempt INTEGER, digest TEXT);
CREATE TABLE IF NOT EXISTS arrivals (key TEXT);
CREATE TABLE IF NOT EXISTS refused (said TEXT);
"""


class Receiver:
    def __init__(self, key: str, store: Path) -> None:
        self._key = key
        self._store = sqlite3.connect(store, isolation_level=None, check_same_thread=False)
        self._store.execute("PRAGMA journal_mode=WAL")
        self._store.executescript(SCHEMA)
        self._turn = asyncio.Lock()
        self._requests = 0

    async def receive(self, http: web.Request) -> web.Response:
        body = await http.read()
        async with self._turn:
            status = await asyncio.to_thread(self._take, dict(http.headers), body)
        self._requests += 1
        if self._requests % UNANSWERED_EVERY == 0 and http.transport is not None:
            http.transport.abort()
        return web.Response(status=status)

    def _take(self, headers: dict[str, str], body: bytes) -> int:
        try:
            key = verify(self._key, headers, body)
        except ForgedCallbackError as error:
            self._store.execute("INSERT INTO refused VALUES (?)", (str(error),))
            return 401
        said = orjson.loads(body)
        session, task = said.get("session") or {}, said.get("task") or {}
        row = (key, said["kind"], session.get("session_id") or task["task_id"], session.get("attempt", 0))
        episode = hashlib.sha256(orjson.dumps(said.get("episode"), option=orjson.OPT_SORT_KEYS)).hexdigest()
        with self._store:
            self._store.execute("BEGIN")
            self._store.execute("INSERT INTO arrivals VALUES (?)", (key,))
            self._store.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?)", (*row, episode))
        return 200


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    given = parser.parse_args()
    receiver = Receiver(os.environ[CALLBACK_KEY], given.store)
    app = web.Application(client_max_size=2**30)
    app.router.add_post("/results", receiver.receive)
    web.run_app(app, host="127.0.0.1", port=given.port, print=lambda _: None, access_log=None)


if __name__ == "__main__":
    main()
