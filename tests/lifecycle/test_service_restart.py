"""A rollout server as a process, killed with SIGKILL while it works: it goes on with its tasks."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from polar_gym.client import RolloutClient, SyncRolloutClient
from polar_gym.protocol import Dispatch, TaskStatus
from tests.lifecycle.callback_receiver import Receiver
from tests.lifecycle.peer_node import PeerNode, make_request
from tests.lifecycle.server_process import ServerProcess, server_process
from tests.lifecycle.service_fixtures import CALLBACK_KEY, NODE_KEY, SERVICE_KEY


async def test_no_result_is_lost_or_doubled_when_server_and_nodes_are_killed(tmp_path: Path) -> None:
    tasks, samples, dice = 20, 3, random.Random(5)
    async with (
        Receiver(CALLBACK_KEY, broken=lambda number: number % 7 == 0) as receiver,
        server_process(tmp_path / "state", "cluster=none", "lease_seconds=2") as server,
        RolloutClient(server.url, SERVICE_KEY) as client,
        PeerNode(server.url, NODE_KEY, name="a", engine="x") as one,
        PeerNode(server.url, NODE_KEY, name="b", engine="y") as two,
    ):
        nodes = [one, two]
        async with asyncio.TaskGroup() as group:
            working = [group.create_task(node.work()) for node in nodes]
            following = []
            for number in range(tasks):
                await client.submit(make_request(f"t{number}", num_samples=samples, callback_url=receiver.url))
                following.append(group.create_task(client.wait(f"t{number}")))
                if number % 7 == 3:
                    await asyncio.sleep(dice.uniform(0, 0.1))
                    await server.stop(signal.SIGKILL)
                    await server.start()
                elif number % 7 == 6:
                    await dice.choice(nodes).restart()
            states = await asyncio.wait_for(asyncio.gather(*following), 60)
            await receiver.wait_for(tasks * samples + tasks)
            for task in working:
                task.cancel()
        assert {state.status for state in states} == {TaskStatus.COMPLETED}
        assert [state.usable for state in states] == [samples] * tasks
        results = [result for result in receiver.results.values() if result["kind"] == "session"]
        ids = Counter(result["session"]["session_id"] for result in results)
        assert set(ids.values()) == {1}, "one result for each session, whatever was repeated"
        assert set(ids) == {session.session_id for state in states for session in state.sessions}
        assert all(result["episode"]["reward"] == 1.0 for result in results)
        assert sum(receiver.received[key] for key in receiver.results) >= len(receiver.results)
        for state in states[:3]:
            arrived = [episode.session.session_id async for episode in client.episodes(state.task_id)]
            assert sorted(arrived) == sorted(session.session_id for session in state.sessions)


async def test_a_restarted_server_knows_the_servers_that_were_updated_alone(tmp_path: Path) -> None:
    """Guards against the freshest sessions that count as the stalest, and against a node that names the weights of
    such a server by the version before, because the server was restarted in the middle of a rolling update."""
    async with (
        server_process(tmp_path / "state", "cluster=none", "lease_seconds=30") as server,
        RolloutClient(server.url, SERVICE_KEY) as client,
        PeerNode(server.url, NODE_KEY) as node,
    ):
        node.engines = {"http://a:8000": "1", "http://b:8000": "1"}
        await node.beat()
        await client.set_weights("1")
        await client.submit(make_request("t"))
        (order,) = await node.take()
        await client.set_weights("2", engine="http://A:8000/v1")
        await server.stop(signal.SIGKILL)
        await server.start()
        assert (await node.beat()).engines == {"http://a:8000": "2"}
        assert await node.finish(order, weight_version="2")
        assert (await client.episode(order.session_id)).session.staleness == 0
        await client.set_weights("2")
        assert (await node.beat()).engines == {}


async def test_a_restarted_server_keeps_running_sessions_where_they_are(tmp_path: Path) -> None:
    async with (
        server_process(tmp_path / "state", "cluster=none", "lease_seconds=30") as server,
        RolloutClient(server.url, SERVICE_KEY) as client,
        PeerNode(server.url, NODE_KEY) as node,
    ):
        await client.pause()
        await client.set_weights("v7")
        await client.submit(make_request("t"))
        (order,) = await node.take()
        await server.stop(signal.SIGKILL)
        await server.start()
        assert (await client.task("t")).sessions[0].node == "a"
        state = await client.pause()
        assert set(state.unreached) == {"a"}, "calls may be under way there"
        assert not state.settled
        answer = await node.beat()
        assert (await client.pause()).settled
        assert (answer.known, answer.cancel) == (True, [])
        assert (answer.generation.paused, answer.weight_version) == (True, "v7"), "what the trainer set still holds"
        assert await node.finish(order)
        state = await client.wait("t")
        assert (state.status, state.sessions[0].attempt) == (TaskStatus.COMPLETED, 0)


@asynccontextmanager
async def killed_in_an_order(directory: Path) -> AsyncIterator[tuple[ServerProcess, PeerNode, Dispatch]]:
    """A server that was killed between writing a placement down and hearing that the node took it."""
    async with (
        server_process(directory / "state", "cluster=none", "lease_seconds=30") as server,
        RolloutClient(server.url, SERVICE_KEY) as client,
        PeerNode(server.url, NODE_KEY) as node,
    ):
        await client.submit(make_request("t"))
        (first,) = await node.take()
        await server.stop(signal.SIGKILL)
        node.held.clear()
        yield server, node, first


async def test_an_order_that_never_left_is_given_again(tmp_path: Path) -> None:
    """A server killed between writing a placement down and telling the node: same attempt, same node."""
    async with killed_in_an_order(tmp_path) as (server, node, first):
        await server.start()
        await node.beat()
        (again,) = await node.take()
        assert (again.session_id, again.attempt) == (first.session_id, first.attempt)


async def test_an_order_that_may_have_left_and_is_refused_now_is_not_given_to_another_node(tmp_path: Path) -> None:
    """Guards against two nodes that run one attempt, because the server was killed while the first took it."""
    async with killed_in_an_order(tmp_path) as (server, node, first):
        node.refuse_with = (503, "draining")
        await server.start()
        await node.beat()
        await asyncio.wait_for(node.refused.wait(), 60)
        async with PeerNode(server.url, NODE_KEY, name="b") as other:
            (again,) = await other.take()
            assert (again.session_id, again.attempt) == (first.session_id, first.attempt + 1)


async def test_sigterm_ends_the_server_and_the_client_says_that_it_is_gone(tmp_path: Path) -> None:
    async with server_process(tmp_path / "state", "cluster=none") as server:
        assert await server.stop() == 0

    def ask() -> None:
        with SyncRolloutClient(server.url, SERVICE_KEY, keep_trying_seconds=0.5) as client:
            client.tasks()

    with pytest.raises(Exception, match=f"{server.port}"):
        await asyncio.to_thread(ask)
