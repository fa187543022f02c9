"""What the rollout server does when nodes come, go, die, come back, refuse and repeat themselves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from polar_gym.client import RolloutClient
from polar_gym.http import edge
from polar_gym.protocol import Delivery, DeliveryAnswer, JournalPiece, Journals, TaskStatus
from polar_gym.schema import Retries, Status
from polar_gym.service import dispatcher, node_link, server
from polar_gym.service.fleet import Fleet, Member
from polar_gym.service.journal_files import JournalFiles
from polar_gym.service.service import RolloutService
from polar_gym.service.store import Store
from polar_gym.service.task import Task
from tests.lifecycle.peer_node import PeerNode, episode_of, failed, make_request
from tests.lifecycle.service_fixtures import NODE_KEY, rollout_server

LEASE = 0.6


async def test_a_silent_nodes_sessions_go_elsewhere_and_its_late_result_is_excluded(tmp_path: Path) -> None:
    async with (
        rollout_server(tmp_path, lease_seconds=LEASE) as (_, client),
        PeerNode(client.url, NODE_KEY, name="silent") as silent,
    ):
        await client.submit(make_request("t"))
        await _beat_until_taken(silent)
        (first,) = await silent.take()
        async with PeerNode(client.url, NODE_KEY, name="other") as other:
            await _beat_until_taken(other)
            (second,) = await other.take()
            assert (second.session_id, second.attempt) == (first.session_id, 1)
            assert await other.finish(second)
        assert not await silent.finish(first), "late: kept, and excluded"
        state = await client.wait("t")
        assert (state.status, state.usable) == (TaskStatus.COMPLETED, 1)
        assert [e.session.attempt async for e in client.episodes("t")] == [1]
        rewards = {e.session.attempt: e.reward async for e in client.episodes("t", excluded=True)}
        assert rewards == {0: None, 1: 1.0}
        late = await client.episode(first.session_id, 0)
        assert (late.reward, late.evaluation) == (None, None)


async def test_a_node_has_its_lease_from_when_the_server_has_read_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against sessions that begin anew because a restarted server reads a large store for longer than a
    lease."""
    async with (
        rollout_server(tmp_path) as (_, client),
        PeerNode(client.url, NODE_KEY, name="node") as node,
    ):
        await client.submit(make_request("t"))
        await _beat_until_taken(node)
    read, live_tasks = list[float](), Store.live_tasks

    async def timed(store: Store) -> list[Task]:
        tasks = await live_tasks(store)
        read.append(time.monotonic())
        return tasks

    monkeypatch.setattr(Store, "live_tasks", timed)
    async with rollout_server(tmp_path) as (service, _):
        (orphan,) = service._orphans.values()
        assert orphan.deadline >= read[0] + service.limits.lease_seconds


async def test_the_first_whole_result_wins_and_the_attempt_that_replaced_it_is_called_off(tmp_path: Path) -> None:
    async with (
        rollout_server(tmp_path, lease_seconds=LEASE) as (_, client),
        PeerNode(client.url, NODE_KEY, name="silent") as silent,
    ):
        await client.submit(make_request("t"))
        await _beat_until_taken(silent)
        (first,) = await silent.take()
        async with PeerNode(client.url, NODE_KEY, name="other") as other:
            await _beat_until_taken(other)
            assert await silent.deliver(episode_of(first), 0), "it was only thought to be dead"
            assert await other.cancellation() == [(first.session_id, 1)]
        assert (await client.wait("t")).sessions[0].attempt == 0


async def _beat_until_taken(node: PeerNode) -> None:
    """Beat as a living node does, until it was given something: another's lease may have to run out first."""
    async with asyncio.timeout(60):
        while not node.held:
            await node.beat()
            await asyncio.sleep(0.05)


async def test_a_restarted_gateways_sessions_begin_again_and_its_salvage_is_excluded(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t"))
        (first,) = await node.take()
        await node.restart()
        (second,) = await node.take()
        assert (second.session_id, second.attempt) == (first.session_id, 1)
        salvaged = episode_of(first, reward=None, status=Status.INTERRUPTED, failure=failed("interrupted"))
        assert not await node.deliver(salvaged, 0)
        node.held[second.session_id] = second
        assert await node.finish(second)
        assert (await client.wait("t")).status is TaskStatus.COMPLETED
        assert (await client.episode(first.session_id, attempt=0)).session.status is Status.INTERRUPTED


async def test_what_a_restarted_gateway_had_finished_is_not_begun_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against sessions that run twice, though the episode lies on their node and is on its way."""
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t"))
        (order,) = await node.take()
        node.incarnation, node.statuses[order.session_id] = "the next process", Status.COMPLETED
        await node.beat()
        assert await node.finish(order)
        events = [event.kind async for event in client.events("t")]
        assert "session.retried" not in events
        assert "lost" not in caplog.text


async def test_sessions_go_elsewhere_that_a_living_node_cannot_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against sessions that wait for ever for a node that beats and cannot be reached, or fails."""
    monkeypatch.setattr(dispatcher, "GIVE_UP_SECONDS", 0.3)
    async with (
        rollout_server(tmp_path, lease_seconds=3600) as (_, client),
        PeerNode(client.url, NODE_KEY, name="unreachable", run=8) as unreachable,
        PeerNode(client.url, NODE_KEY, name="broken", run=8) as broken,
        PeerNode(client.url, NODE_KEY, name="good", run=4) as good,
    ):
        unreachable.url = "http://127.0.0.1:9"
        broken.refuse_with = (500, "the gateway failed")
        await asyncio.gather(unreachable.beat(), broken.beat())
        await client.submit(make_request("t", num_samples=4))
        orders = await good.take(4)
        assert len({order.session_id for order in orders}) == 4
        assert "127.0.0.1:9" in caplog.text
        assert "HTTP 500: the gateway failed" in caplog.text
        for order in orders:
            assert await good.finish(order)
        assert (await client.wait("t")).usable == 4


async def test_a_task_that_is_cancelled_while_its_node_does_not_answer_stays_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an ended sample that waits again, which no server survives."""
    monkeypatch.setattr(dispatcher, "GIVE_UP_SECONDS", 0.0)
    asked, let_go = asyncio.Event(), asyncio.Event()

    class SilentNode(PeerNode):
        async def _put(self, request: web.Request) -> web.Response:
            asked.set()
            await let_go.wait()
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

    async with (
        rollout_server(tmp_path, lease_seconds=3600) as (service, client),
        SilentNode(client.url, NODE_KEY) as node,
    ):
        await client.submit(make_request("t"))
        await asyncio.wait_for(asked.wait(), 60)
        assert (await client.cancel("t")).status is TaskStatus.CANCELLED
        let_go.set()
        await asyncio.gather(*service._dispatcher._work)
        await node.beat()
        assert (await client.task("t")).status is TaskStatus.CANCELLED
        assert not service.book.failed.done()
        assert not len(service.book.queue)


async def test_a_node_that_can_be_reached_again_is_given_sessions_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "GIVE_UP_SECONDS", 0.1)
    monkeypatch.setattr(dispatcher, "LONGEST_PAUSE", 0.05)
    async with (
        rollout_server(tmp_path, lease_seconds=3600) as (_, client),
        PeerNode(client.url, NODE_KEY) as node,
    ):
        right, node.url = node.url, "http://127.0.0.1:9"
        await node.beat()
        await client.submit(make_request("t"))
        while not (await client.task("t")).sessions[0].attempt:  # noqa: ASYNC110 - the server was told nothing to tell
            await asyncio.sleep(0.02)
        node.url = right
        await node.beat()
        assert (await node.take())[0].attempt == 1


async def test_a_session_that_only_waited_on_a_node_that_died_uses_up_no_retry(tmp_path: Path) -> None:
    """Guards against long queues, whose sessions fail because nodes are restarted one after the other."""
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t", num_samples=2, retries=Retries(node_death=0)))
        begun, waiting = await node.take(2)
        node.statuses[waiting.session_id] = Status.QUEUED
        await node.beat()
        await node.restart()
        (again,) = await node.take()
        assert (again.session_id, again.attempt) == (waiting.session_id, 1), "its first attempt is known to the node"
        assert (await client.task("t")).failures == {"node_died": 1}
        node.statuses[again.session_id] = Status.QUEUED
        await node.beat()
        salvaged = episode_of(again, reward=None, status=Status.INTERRUPTED, failure=failed("interrupted"))
        salvaged.trajectory.fidelity.calls = 0
        assert not await node.deliver(salvaged, 1)
        await node.beat()
        (third,) = await node.take()
        assert await node.finish(third)
        state = await client.wait("t")
        assert (state.usable, begun.session_id) == (1, state.sessions[begun.sample_index].session_id)


async def test_the_retry_limit_ends_a_sample_whose_nodes_keep_dying(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t", retries=Retries(node_death=1)))
        await node.take()
        await node.beat()
        await node.restart()
        (second,) = await node.take()
        assert second.attempt == 1
        await node.beat()
        await node.restart()
        state = await client.wait("t")
        assert (state.status, state.failures) == (TaskStatus.FAILED, {"node_died": 1})
        assert state.sessions[0].status is Status.INTERRUPTED


async def test_a_salvaged_episode_is_the_result_where_no_retry_is_left(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t", retries=Retries(node_death=0)))
        (order,) = await node.take()
        assert await node.finish(order, reward=None, status=Status.INTERRUPTED, failure=failed("interrupted"))
        assert (await client.wait("t")).failures == {"interrupted": 1}


async def test_a_server_that_stood_still_does_not_take_its_nodes_for_dead(tmp_path: Path) -> None:
    """Guards against a suspended or overloaded server, which begins every session again when it wakes."""
    async with rollout_server(tmp_path, lease_seconds=LEASE) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t"))
        await node.take()
        await node.beat()
        time.sleep(2 * LEASE)  # noqa: ASYNC251 - nothing runs, the server included
        await asyncio.sleep(LEASE / 3)
        await node.beat()
        assert (await client.task("t")).sessions[0].attempt == 0


async def test_a_node_whose_heartbeat_waits_for_a_thread_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against sessions that begin again elsewhere because the server is busy."""
    over, let_go = asyncio.Event(), threading.Event()
    take = Fleet.take_silent

    def take_silent(fleet: Fleet, now: float, lease: float) -> list[Member]:
        if "a" in fleet.members and now - fleet.members["a"].seen > lease:
            over.set()
        return take(fleet, now, lease)

    monkeypatch.setattr(edge, "LARGE_BYTES", 0)
    async with (
        rollout_server(tmp_path, lease_seconds=LEASE) as (service, client),
        PeerNode(client.url, NODE_KEY) as node,
    ):
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        busy = asyncio.create_task(asyncio.to_thread(let_go.wait))
        monkeypatch.setattr(Fleet, "take_silent", take_silent)
        beating = asyncio.create_task(node.beat())
        try:
            await asyncio.wait_for(over.wait(), 60)
            assert service.fleet.members
        finally:
            let_go.set()
        await asyncio.gather(busy, beating)
        assert service.fleet.members["a"].beats == 2


async def test_a_death_that_is_reported_needs_no_lease(tmp_path: Path) -> None:
    async with rollout_server(tmp_path, lease_seconds=3600) as (service, client):
        async with PeerNode(client.url, NODE_KEY) as node:
            await client.submit(make_request("t"))
            (first,) = await node.take()
            url = f"{client.url}/v1/nodes/a"
            async with node.http.delete(url, params={"incarnation": "an older one"}) as response:
                assert response.status == 204
            assert service.fleet.members, "another process of that name has died, not this one"
            async with node.http.delete(url, params={"incarnation": node.incarnation}) as response:
                assert response.status == 204
            with pytest.raises(aiohttp.ClientResponseError, match="another process took this name"):
                await node.beat()
        async with PeerNode(client.url, NODE_KEY, name="b") as other:
            (second,) = await other.take()
            assert (second.session_id, second.attempt) == (first.session_id, 1)


async def test_the_same_delivery_twice_gets_the_same_answer(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t", num_samples=2))
        order = (await node.take(2))[0]
        episode = episode_of(order)
        answers = await asyncio.gather(*(node.deliver(episode, 0) for _ in range(5)))
        assert answers == [True] * 5
        assert (await client.task("t")).usable == 1
        stranger = episode_of(order.model_copy(update={"session_id": "nobody"}))
        assert await node.deliver(stranger, 0) is False
        assert (await client.task("t")).usable == 1


async def test_few_records_are_in_memory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that runs out of memory because a node with many sessions has died."""
    read, begun, ended, most = JournalFiles.of, list[str](), list[str](), [0]
    full = asyncio.Event()

    def of(files: JournalFiles, session_id: str) -> list[JournalPiece]:
        begun.append(session_id)
        most.append(len(begun) - len(ended))
        return read(files, session_id)

    class BusyNode(PeerNode):
        async def _put(self, request: web.Request) -> web.Response:
            if len(begun) >= dispatcher.RECORDS_AT_ONCE:
                full.set()
            await full.wait()
            ended.append(request.match_info["session_id"])
            return await super()._put(request)

    monkeypatch.setattr(JournalFiles, "of", of)
    async with rollout_server(tmp_path, lease_seconds=3600) as (service, client):
        async with PeerNode(client.url, NODE_KEY, run=12) as node:
            await client.submit(make_request("t", num_samples=12))
            for order in await node.take(12):
                piece = JournalPiece(session_id=order.session_id, attempt=0, lines="{}\n", manifest="{}")
                await service.journals("a", Journals(pieces=[piece]))
        await service.node_died("a")
        async with BusyNode(client.url, NODE_KEY, name="b", run=12) as other:
            orders = await other.take(12)
    assert all(order.resume and order.records for order in orders)
    assert max(most) == dispatcher.RECORDS_AT_ONCE


class SilentNode(PeerNode):
    """A node that answers no order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tried = set[str]()
        """The sessions of the orders that came."""
        self.full = asyncio.Event()
        """Set when all orders with records that may be on the way are here."""
        self.hangs_up = asyncio.Event()

    async def _put(self, request: web.Request) -> web.Response:
        self.tried.add(request.match_info["session_id"])
        if len(self.tried) == dispatcher.RECORDS_AT_ONCE:
            self.full.set()
        await self.hangs_up.wait()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


@contextlib.asynccontextmanager
async def orders_on_the_way(directory: Path) -> AsyncIterator[tuple[RolloutService, RolloutClient, SilentNode]]:
    """Yield a server with sessions that go on with their records, and a node that holds as many of their orders as may
    be on the way."""
    async with rollout_server(directory, lease_seconds=3600) as (service, client):
        async with PeerNode(client.url, NODE_KEY, run=12) as node:
            await client.submit(make_request("t", num_samples=12))
            await node.take(12)
        await service.node_died("a")
        silent = SilentNode(client.url, NODE_KEY, name="b", run=12)
        async with silent:
            async with asyncio.timeout(60):
                await silent.full.wait()
            yield service, client, silent


async def test_a_node_that_never_answers_holds_up_few_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against sessions of healthy nodes that wait while each session of another one is tried for 20 s."""
    monkeypatch.setattr(dispatcher, "GIVE_UP_SECONDS", 0.0)
    async with orders_on_the_way(tmp_path) as (_, client, silent):
        silent.hangs_up.set()
        async with PeerNode(client.url, NODE_KEY, name="c", run=12) as other:
            orders = await other.take(12)
    assert all(order.resume for order in orders)
    assert len(silent.tried) <= dispatcher.RECORDS_AT_ONCE + 1, "the last one may be tried too"


async def test_orders_to_a_dead_node_hold_up_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against sessions that wait for minutes, because orders with records to a node that died wait for its
    answer."""
    monkeypatch.setattr(node_link, "TIMEOUT_SECONDS", 3600.0)
    async with orders_on_the_way(tmp_path) as (service, client, _):
        await service.node_died("b")
        async with PeerNode(client.url, NODE_KEY, name="c", run=12) as other:
            orders = await other.take(12)
    assert all(order.resume for order in orders)
    assert not service.book.failed.done()


async def test_a_record_that_cannot_be_read_does_not_stop_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(files: JournalFiles, session_id: str) -> list[JournalPiece]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(JournalFiles, "of", of)
    async with rollout_server(tmp_path) as (service, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t"))
        await node.take()
        await node.restart()
        (again,) = await node.take()
        assert (again.attempt, again.resume, again.records) == (1, True, [])
        assert not service.book.failed.done()


async def test_few_large_deliveries_are_in_memory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that runs out of memory because many nodes deliver at once, as after its restart."""
    read, deliver, begun, ended, most = server.read_record, RolloutService.deliver, [], [], [0]
    monkeypatch.setattr(server, "SMALL_DELIVERY_BYTES", 0)
    full = asyncio.Event()

    async def reading(http: web.Request, record: type[Any]) -> Any:
        if record is Delivery:
            begun.append(http)
            most.append(len(begun) - len(ended))
            if len(begun) >= server.LARGE_DELIVERIES_AT_ONCE:
                full.set()
            await full.wait()
        return await read(http, record)

    async def delivering(service: RolloutService, node: str, delivery: Delivery) -> DeliveryAnswer:
        answer = await deliver(service, node, delivery)
        ended.append(delivery)
        return answer

    monkeypatch.setattr(server, "read_record", reading)
    monkeypatch.setattr(RolloutService, "deliver", delivering)
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY, run=24) as node:
        await client.submit(make_request("t", num_samples=24))
        orders = await node.take(24)
        assert all(await asyncio.gather(*(node.deliver(episode_of(order), 0) for order in orders)))
    assert max(most) == server.LARGE_DELIVERIES_AT_ONCE


async def test_a_node_that_lost_a_session_without_a_word_gets_no_second_chance_for_it(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t"))
        await node.take()
        node.held.clear()
        await node.beat()
        await node.beat()
        (again,) = await node.take()
        assert again.attempt == 1


async def test_a_busy_node_is_asked_again_after_its_next_heartbeat(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        node.refuse_with = (503, "starting")
        await client.submit(make_request("t", retries=Retries(node_death=0)))
        await asyncio.wait_for(node.refused.wait(), 60)
        node.refuse_with = None
        await node.beat()
        (order,) = await node.take()
        assert order.attempt == 1, "it may have been begun: no other order names the first attempt"


async def test_a_session_that_its_node_may_have_goes_elsewhere_as_the_next_attempt(tmp_path: Path) -> None:
    """Guards against two nodes that run one attempt: the episode of the one is taken for that of the other, and the
    other's is lost."""

    class ForgottenNode(PeerNode):
        """Takes a session without an answer, and refuses it when it is asked again."""

        async def _put(self, request: web.Request) -> web.Response:
            response = await super()._put(request)
            if self.refuse_with is None:
                self.refuse_with = (503, "draining")
                assert request.transport is not None
                request.transport.abort()
            return response

    async with (
        rollout_server(tmp_path, lease_seconds=3600) as (_, client),
        ForgottenNode(client.url, NODE_KEY, name="first") as first,
    ):
        await client.submit(make_request("t", retries=Retries(node_death=0)))
        (unanswered,) = await first.take()
        async with PeerNode(client.url, NODE_KEY, name="other") as other:
            (order,) = await other.take()
            assert (order.session_id, order.attempt) == (unanswered.session_id, 1)
            await first.beat()
            assert await first.cancellation() == [(unanswered.session_id, 0)]
            assert not await first.deliver(episode_of(unanswered, reward=None, status=Status.CANCELLED), 0)
            assert await other.finish(order)
        assert (await client.wait("t")).usable == 1


async def test_what_no_node_can_run_is_an_error_of_the_request(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        node.refuse_with = (422, "agent.name: unknown harness 'x'")
        await client.submit(make_request("t"))
        state = await client.wait("t")
        assert (state.status, state.failures) == (TaskStatus.FAILED, {"request_error": 1})
        assert state.sessions[0].failure is not None
        assert "unknown harness" in state.sessions[0].failure.message


async def test_a_draining_node_is_given_nothing_new(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t"))
        (order,) = await node.take()
        async with node.http.post(f"{client.url}/v1/nodes/a/drain") as response:
            assert (await response.json())["draining"]
        assert (await node.beat()).draining
        await client.submit(make_request("u"))
        assert await node.finish(order)
        assert (await client.task("u")).status is TaskStatus.QUEUED
        async with PeerNode(client.url, NODE_KEY, name="b") as other:
            assert (await other.take())[0].request.task_id == "u"
        assert not node.held
