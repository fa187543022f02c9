"""Callbacks: signed, repeated until they are received, told apart by their key, over restarts of the server too."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from polar_gym.client import RolloutClient, RolloutServiceError, UnreachableError
from polar_gym.errors import ConfigError
from polar_gym.http.keys import Keys
from polar_gym.schema import Episode
from polar_gym.service import callbacks
from polar_gym.service.episode_files import EpisodeFiles
from polar_gym.service.store import OutboxEntry, Store
from tests.lifecycle.callback_receiver import Receiver
from tests.lifecycle.peer_node import PeerNode, failed, make_request
from tests.lifecycle.service_fixtures import CALLBACK_KEY, NODE_KEY, SERVICE_KEY, rollout_server
from tests.support.listening import listen, stop_listening


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repetitions follow at once: what is tested is that they follow."""
    monkeypatch.setattr(callbacks, "pause_after", lambda tries: 0.05)


async def test_results_reach_a_receiver_that_fails_at_first(tmp_path: Path) -> None:
    async with (
        Receiver(CALLBACK_KEY, broken=lambda number: number <= 3) as receiver,
        rollout_server(tmp_path) as (_, client),
        PeerNode(client.url, NODE_KEY) as node,
    ):
        await client.submit(make_request("t", num_samples=2, callback_url=receiver.url))
        good, bad = await node.take(2)
        await node.finish(good)
        await node.finish(bad, reward=None, failure=failed())
        await receiver.wait_for(3)
        first = receiver.results[f"{good.session_id}:0"]
        assert Episode.from_json(orjson.dumps(first["episode"])).reward == 1.0
        assert receiver.results[f"{bad.session_id}:0"]["session"]["failure"]["kind"] == "runtime_error"
        (end,) = [result for result in receiver.results.values() if result["kind"] == "task"]
        assert (end["task"]["status"], end["task"]["usable"]) == ("COMPLETED", 1)
        assert len(receiver.requests) > 3
        assert receiver.forged == 0


async def test_a_sample_that_ended_without_an_episode_is_told_too(tmp_path: Path) -> None:
    async with Receiver(CALLBACK_KEY) as receiver, rollout_server(tmp_path) as (_, client):
        await client.submit(make_request("t", callback_url=receiver.url))
        await client.cancel("t")
        await receiver.wait_for(2)
        (result,) = [result for result in receiver.results.values() if result["kind"] == "session"]
        assert result["episode"] is None
        assert result["session"]["failure"]["kind"] == "cancelled"


async def test_what_becomes_due_while_the_outbox_is_looked_at_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a repetition that waits until something else happens, for hours where nothing does."""
    look = Store.due_callbacks

    async def look_slowly(store: Store, now: float, limit: int, without: Sequence[str]) -> list[OutboxEntry]:
        found = await look(store, now, limit, without)
        await asyncio.sleep(0.1)  # twice as long as until the repetition is due
        return found

    monkeypatch.setattr(Store, "due_callbacks", look_slowly)
    async with (
        Receiver(CALLBACK_KEY, broken=lambda number: 2 <= number <= 4) as receiver,
        rollout_server(tmp_path) as (_, client),
        PeerNode(client.url, NODE_KEY) as node,
    ):
        await client.submit(make_request("t", num_samples=1, callback_url=receiver.url))
        (order,) = await node.take(1)
        await node.finish(order)
        await receiver.wait_for(2)  # the sample's, and the task's


async def test_a_receiver_that_hangs_holds_up_no_other(tmp_path: Path) -> None:
    """Guards against callbacks that wait for hours behind those of another task, each of which took its whole time."""
    hangs, hung = asyncio.Event(), 0

    async def hang(_: web.Request) -> web.Response:
        nonlocal hung
        hung += 1
        await hangs.wait()
        return web.Response()

    app = web.Application()
    app.router.add_post("/{result}", hang)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    listening = await listen(runner)
    async with Receiver(CALLBACK_KEY) as receiver, rollout_server(tmp_path) as (_, client):
        stuck = f"http://127.0.0.1:{listening.getsockname()[1]}"
        for task_id in ("one", "other"):
            url = f"{stuck}/{task_id}"
            await client.submit(make_request(task_id, num_samples=callbacks.AT_ONCE, callback_url=url))
            await client.cancel(task_id)
        await client.submit(make_request("t", callback_url=receiver.url))
        await client.cancel("t")
        await receiver.wait_for(2)
        assert hung <= callbacks.TO_ONE_HOST
        hangs.set()
    await stop_listening(runner, listening)


async def given_up(client: RolloutClient) -> set[str | None]:
    return {event.session_id async for event in client.events("t") if event.kind == "callback.given_up"}


async def test_a_callback_that_is_old_and_was_hardly_tried_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against all callbacks of a server that was down for days being lost, because their receiver starts a
    second after the server."""
    async with Receiver(CALLBACK_KEY, broken=lambda number: True) as receiver:
        async with rollout_server(tmp_path) as (service, client):
            await client.submit(make_request("t", callback_url=receiver.url))
            await client.cancel("t")
            await service.store._execute("UPDATE outbox SET created_at = created_at - 400000, tries = 0")
        tried = len(receiver.requests)
        async with rollout_server(tmp_path) as (service, client), asyncio.timeout(60):
            while len(receiver.requests) < tried + 4:  # noqa: ASYNC110 - no end tells
                await asyncio.sleep(0.05)
            assert await given_up(client) == set()
            await service.store._execute("UPDATE outbox SET tries = ?, due_at = 0", callbacks.LEAST_TRIES)
            while len(await given_up(client)) < 2:  # noqa: ASYNC110 - no end tells
                await asyncio.sleep(0.05)
        assert re.search(r"given up after 10[12] tries: HTTP 500", caplog.text)  # some were under way


async def test_an_episode_that_cannot_be_read_holds_up_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against one damaged file that ends the service, and ends it again after each restart."""
    down = True
    async with Receiver(CALLBACK_KEY, broken=lambda number: down) as receiver:
        async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
            await client.submit(make_request("t", num_samples=3, callback_url=receiver.url))
            torn, gone, whole = await node.take(3)
            for order in (torn, gone, whole):
                await node.finish(order)
        (file,) = (tmp_path / "state").rglob(f"{torn.session_id}.0.json.gz")
        file.write_bytes(file.read_bytes()[:40])
        next((tmp_path / "state").rglob(f"{gone.session_id}.0.json.gz")).unlink()
        down = False
        async with rollout_server(tmp_path) as (service, client):
            await receiver.wait_for(2)
            assert receiver.results[f"{whole.session_id}:0"]["episode"]["reward"] == 1.0
            assert [e.session.session_id async for e in client.episodes("t")] == [whole.session_id]
            for order in (torn, gone):
                with pytest.raises(RolloutServiceError, match="cannot be read") as refused:
                    await client.episode(order.session_id)
                assert refused.value.status == 410
                assert f"episode {order.session_id}.0 cannot be read" in caplog.text
            async with asyncio.timeout(60):
                while await given_up(client) != {torn.session_id, gone.session_id}:  # noqa: ASYNC110 - no end tells
                    await asyncio.sleep(0.05)
            assert not service.book.failed.done()


async def _ask_for_it(client: RolloutClient, session_id: str) -> None:
    with pytest.raises(RolloutServiceError, match="cannot be read"):
        await client.episode(session_id)


async def _ask_for_all(client: RolloutClient, session_id: str) -> None:
    assert [episode async for episode in client.episodes("t")] == []


async def _call_back(client: RolloutClient, session_id: str) -> None:
    async with asyncio.timeout(60):
        while session_id not in await given_up(client):  # noqa: ASYNC110 - no end tells
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("use", [_ask_for_it, _ask_for_all, _call_back])
async def test_a_damaged_episode_may_be_evicted(
    use: Callable[[RolloutClient, str], Awaitable[None]], tmp_path: Path
) -> None:
    """Guards against a size that counts in `keep_bytes` for ever, and a task that is never dropped."""
    async with (
        Receiver(CALLBACK_KEY, broken=lambda number: True) as receiver,
        rollout_server(tmp_path) as (service, client),
        PeerNode(client.url, NODE_KEY) as node,
    ):
        await client.submit(make_request("t", callback_url=receiver.url if use is _call_back else None))
        (order,) = await node.take()
        await node.finish(order)
        service.store.files.remove(order.session_id, order.attempt)
        await use(client, order.session_id)
        await service.store._execute("DELETE FROM outbox")  # the task's own callback, which never succeeds
        assert await service.store.evict(before=0.0, keep_bytes=0) == 1
        assert await service.store.stored_bytes() == 0


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_stream_ends_at_an_episode_that_stays_unreadable_and_names_it(tmp_path: Path, damaged: bool) -> None:
    """Guards against a client that asks for the same episode for ever, and does not say which. `damaged`: the episode
    before it is left out."""
    async with rollout_server(tmp_path) as (service, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t", num_samples=2))
        whole, unreadable = await node.take(2)
        for order in (whole, unreadable):
            await node.finish(order)
        (file,) = (tmp_path / "state").rglob(f"{unreadable.session_id}.0.json.gz")
        file.unlink()
        file.mkdir()
        if damaged:
            (before,) = (tmp_path / "state").rglob(f"{whole.session_id}.0.json.gz")
            before.write_bytes(b"garbage")
        async with RolloutClient(client.url, SERVICE_KEY, keep_trying_seconds=1.0) as impatient, asyncio.timeout(60):
            arriving = impatient.episodes("t")
            if not damaged:
                assert (await anext(arriving)).session.session_id == whole.session_id
            with pytest.raises(UnreachableError, match=f"episode {unreadable.session_id}.0 .*Is a directory"):
                await anext(arriving)
        assert not (await service.store._execute("SELECT fetched FROM episodes ORDER BY number"))[1]["fetched"]


async def test_an_episode_that_cannot_be_read_now_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against whole episodes that count as damaged, are left out and may be evicted, because the process had too
    many open files for a moment."""
    read, tries = EpisodeFiles.read, Counter[str]()
    mark, marked, readable = Store.mark_fetched, set[int](), set[str]()

    def fail_once(files: EpisodeFiles, session_id: str, attempt: int) -> bytes:
        tries[session_id] += 1
        if tries[session_id] == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        readable.add(session_id)
        return read(files, session_id, attempt)

    async def note(store: Store, numbers: Sequence[int]) -> None:
        marked.update(numbers)
        assert len(marked) <= len(readable), "what cannot be read now may not be evicted"
        await mark(store, numbers)

    monkeypatch.setattr(EpisodeFiles, "read", fail_once)
    monkeypatch.setattr(Store, "mark_fetched", note)
    async with (
        Receiver(CALLBACK_KEY) as receiver,
        rollout_server(tmp_path) as (service, client),
        PeerNode(client.url, NODE_KEY) as node,
    ):
        await client.submit(make_request("t", num_samples=3))
        orders = await node.take(3)
        for order in orders:
            await node.finish(order)
        gone, *whole = sorted(order.session_id for order in orders)
        service.store.files.remove(gone, 0)
        arrived = [episode.session.session_id async for episode in client.episodes("t")]
        assert sorted(arrived) == whole, "each once"
        assert marked == {1, 2, 3}
        tries.clear()
        assert (await client.episode(whole[0])).reward == 1.0
        await client.submit(make_request("u", callback_url=receiver.url))
        (order,) = await node.take()
        await node.finish(order)
        await receiver.wait_for(2)
        assert receiver.results[f"{order.session_id}:0"]["episode"]["reward"] == 1.0
        assert tries == {whole[0]: 2, order.session_id: 2}


async def test_a_large_callback_has_as_long_as_its_body_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against episodes that never reach a receiver with a slow line."""
    monkeypatch.setattr(callbacks, "ANSWER_SECONDS", 1e-6)
    monkeypatch.setattr(callbacks, "LEAST_BYTES_A_SECOND", 1)
    async with Receiver(CALLBACK_KEY) as receiver, rollout_server(tmp_path) as (_, client):
        await client.submit(make_request("t", callback_url=receiver.url))
        await client.cancel("t")
        await receiver.wait_for(2)


async def test_the_outbox_survives_the_server(tmp_path: Path) -> None:
    down = True
    async with Receiver(CALLBACK_KEY, broken=lambda number: down) as receiver:
        async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
            await client.submit(make_request("t", callback_url=receiver.url))
            (order,) = await node.take()
            await node.finish(order)
        assert not receiver.results
        # such a server kept the results, and sent none, without a word
        with pytest.raises(ConfigError, match="POLAR_GYM_CALLBACK_KEY is not set"):
            async with rollout_server(tmp_path, Keys(None, NODE_KEY)):
                pass
        down = False
        async with rollout_server(tmp_path) as (_, client):
            await receiver.wait_for(2)
        assert receiver.results[f"{order.session_id}:0"]["episode"]["reward"] == 1.0


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://169.254.169.254/latest", "169.254.169.254 is link-local"),
        ("http://[fe80::1]/", "fe80::1 is link-local"),
        ("http://[::ffff:a9fe:a9fe]/", "is link-local"),
        ("http://2852039166/", "169.254.169.254 is link-local"),
        ("http://0.0.0.0:1/", "0.0.0.0 is link-local or unspecified"),
        ("http://127.0.0.1:1/", "127.0.0.1 is loopback"),
        ("http://localhost:1/", " is loopback"),
        ("http://[::1]:1/", "::1 is loopback"),
    ],
)
async def test_a_callback_into_the_servers_own_machine_is_refused(tmp_path: Path, url: str, named: str) -> None:
    """A server that listens on loopback only has its clients there, and calls them back there; see the other tests."""
    async with rollout_server(tmp_path, listen="0.0.0.0:0") as (service, client):
        with pytest.raises(RolloutServiceError, match="callback_url: ") as refused:
            await client.submit(make_request("t", callback_url=url))
        assert refused.value.status == 422
        assert named in str(refused.value)
        assert not service.book.live


async def test_the_address_of_a_callback_is_checked_again_when_it_is_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a name that leads elsewhere by then. Here the URL was accepted by a server on loopback."""
    caplog.set_level(logging.INFO)
    async with Receiver(CALLBACK_KEY, broken=lambda number: True) as receiver:
        async with rollout_server(tmp_path) as (_, client):
            await client.submit(make_request("t", callback_url=receiver.url))
            await client.cancel("t")
        caplog.clear()
        async with rollout_server(tmp_path, listen="0.0.0.0:0") as (service, _), asyncio.timeout(60):
            while not service.book.counts.callbacks["failed"]:  # noqa: ASYNC110 - no event tells of a failed try
                await asyncio.sleep(0.01)
        assert "127.0.0.1 is loopback" in caplog.text
        assert "HTTP 500" not in caplog.text, "the receiver was not asked"


async def test_names_that_are_looked_up_slowly_hold_up_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against nodes that are taken for dead, and a service that stands still, while a name server is away."""
    lookup, asked, let_go = socket.getaddrinfo, set[str](), threading.Event()
    named = {"submitted.example", "called-back.example", "node.example"}

    def slow(host: Any, *arguments: Any, **options: Any) -> Any:
        if host not in named:
            return lookup(host, *arguments, **options)
        asked.add(host)
        if asked == named:
            loop.call_soon_threadsafe(all_asked.set)
        let_go.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    loop, all_asked = asyncio.get_running_loop(), asyncio.Event()
    async with rollout_server(tmp_path) as (service, client), PeerNode(client.url, NODE_KEY) as node:
        loop.set_default_executor(ThreadPoolExecutor(1))
        node.url = "http://node.example"
        await node.beat()
        await client.submit(make_request("t"))
        told, _ = await service.submit(make_request("u", callback_url="http://called-back.example"))
        await service.cancel(told.task_id)
        submitting = asyncio.create_task(client.submit(make_request("v", callback_url="http://submitted.example")))
        try:
            async with asyncio.timeout(60):
                await all_asked.wait()
                await asyncio.to_thread(let_go.is_set)
        finally:
            let_go.set()
        await submitting


async def test_forged_old_and_changed_callbacks_are_refused(tmp_path: Path) -> None:
    async with Receiver(CALLBACK_KEY) as receiver, rollout_server(tmp_path) as (_, client):
        await client.submit(make_request("t", callback_url=receiver.url))
        await client.cancel("t")
        await receiver.wait_for(2)
        before = dict(receiver.results)
        headers, body = receiver.requests[0]
        changed = body.replace(b'"cancelled"', b'"completed"')
        assert changed != body
        stamp = headers[callbacks.TIME_HEADER]
        old = {callbacks.TIME_HEADER: "1", callbacks.SIGNATURE_HEADER: callbacks.sign(CALLBACK_KEY, "1", body)}
        forgeries = [
            (headers, changed),
            ({**headers, callbacks.SIGNATURE_HEADER: callbacks.sign("another key", stamp, body)}, body),
            ({**headers, callbacks.TIME_HEADER: str(int(stamp) + 1)}, body),
            ({name: value for name, value in headers.items() if name != callbacks.SIGNATURE_HEADER}, body),
            ({**headers, **old}, body),
        ]
        async with aiohttp.ClientSession() as http:
            for number, (given, sent) in enumerate(forgeries, start=1):
                given = {name: value for name, value in given.items() if name.startswith("Polar")}
                async with http.post(receiver.url, headers=given, data=sent) as response:
                    assert response.status == 401, number
        assert receiver.results == before
        with pytest.raises(callbacks.ForgedCallbackError, match="s off"):
            callbacks.verify(CALLBACK_KEY, headers, body, now=int(stamp) + callbacks.REPLAY_WINDOW_SECONDS + 1)


def test_pauses_grow_to_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pauses = [callbacks.pause_after(tries) for tries in range(1, 40)]
    assert pauses[0] < 2
    assert pauses[5] > 10
    assert max(pauses) <= 300
    assert pauses[-1] == 300


@pytest.mark.parametrize("url", ["ftp://x/", "file:///etc/passwd", "http://", "//x", "http://u:p@x/", "http://[", "x"])
def test_urls_that_callbacks_do_not_go_to(url: str) -> None:
    assert callbacks.check_url(url)
    assert callbacks.check_url("https://trainer:9000/x?y=1") is None
