"""The life of tasks on a rollout server, with peers as nodes."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Collection
from datetime import date
from pathlib import Path

import pytest

from polar_gym.client import RolloutServiceError, SyncRolloutClient
from polar_gym.protocol import TaskState, TaskStatus
from polar_gym.schema import Retries, Status
from polar_gym.service import bounds
from polar_gym.service.journal_files import JournalFiles
from polar_gym.service.store import Store
from tests.lifecycle.peer_node import PeerNode, episode_of, failed, make_request
from tests.lifecycle.service_fixtures import NODE_KEY, SERVICE_KEY, rollout_server


async def test_samples_run_and_their_episodes_arrive_in_order(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        state = await client.submit(make_request("t", num_samples=3))
        assert (state.status, len(state.sessions)) == (TaskStatus.QUEUED, 3)
        orders = await node.take(3)
        assert sorted(order.sample_index for order in orders) == [0, 1, 2]
        arriving = client.episodes("t")
        for order, reward in zip(orders, (0.0, 0.5, 1.0), strict=True):
            assert await node.finish(order, reward=reward)
            episode = await anext(arriving)
            assert (episode.session.session_id, episode.reward) == (order.session_id, reward)
            assert episode.session.node == "a"
        assert await anext(arriving, None) is None, "the stream ends with the task"
        state = await client.wait("t")
        assert (state.status, state.usable, state.failures) == (TaskStatus.COMPLETED, 3, {})
        kinds = [event.kind async for event in client.events("t")]
        assert kinds[0] == "task.submitted"
        assert kinds[-1] == "task.ended"
        assert kinds.count("session.dispatched") == kinds.count("session.ended") == 3


async def test_a_task_id_names_one_request(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client):
        request = make_request("t", num_samples=2)
        request.agent.today = date(2024, 2, 28)
        first = await client.submit(request)
        again = await client.submit(request)
        assert [s.session_id for s in again.sessions] == [s.session_id for s in first.sessions]
        another_day = make_request("t", num_samples=2)
        another_day.agent.today = date(2024, 2, 29)
        assert await client.submit(another_day) == again, "submitted once more, on the next day"
        with pytest.raises(RolloutServiceError, match=r"another num_samples, timeout_seconds") as refused:
            await client.submit(make_request("t", num_samples=3, timeout_seconds=5))
        assert refused.value.status == 409
        together = await asyncio.gather(*(client.submit(make_request("u")) for _ in range(5)))
        assert len({state.sessions[0].session_id for state in together}) == 1


async def test_failed_samples_are_counted_by_kind_and_a_task_without_a_usable_one_failed(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("some", num_samples=3))
        one, two, three = await node.take(3)
        await node.finish(one)
        await node.finish(two, reward=None, failure=failed("engine_error"))
        await node.finish(three, reward=None, failure=failed("engine_error"))
        state = await client.wait("some")
        assert (state.status, state.usable, state.failures) == (TaskStatus.COMPLETED, 1, {"engine_error": 2})
        await client.submit(make_request("none"))
        (order,) = await node.take()
        await node.finish(order, reward=None, failure=failed())
        state = await client.wait("none")
        assert (state.status, state.failures) == (TaskStatus.FAILED, {"runtime_error": 1})
        assert [episode.reward async for episode in client.episodes("none")] == [None]


async def test_a_failure_is_tried_again_only_where_the_task_says_so(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t", retries=Retries(failure=1)))
        (first,) = await node.take()
        assert not await node.finish(first, reward=None, failure=failed())
        (second,) = await node.take()
        assert (second.session_id, second.attempt) == (first.session_id, 1)
        assert await node.finish(second)
        state = await client.wait("t")
        assert (state.status, state.failures) == (TaskStatus.COMPLETED, {})
        assert (await client.episode(first.session_id)).session.attempt == 1
        kept = await client.episode(first.session_id, attempt=0)
        assert kept.session.failure is not None


async def test_cancelling_stops_what_runs_and_what_waits(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY, run=1) as node:
        await client.submit(make_request("t", num_samples=2))
        (order,) = await node.take()
        state = await client.cancel("t")
        assert (state.status, state.failures) == (TaskStatus.CANCELLED, {"cancelled": 2})
        assert await node.cancellation() == [(order.session_id, 0)]
        late = episode_of(order, reward=None, status=Status.CANCELLED)
        assert not await node.deliver(late, 0), "what was captured is kept, excluded"
        assert (await client.episode(order.session_id, attempt=0)).session.status is Status.CANCELLED
        with pytest.raises(RolloutServiceError, match="no such episode"):
            await client.episode(order.session_id)
        assert (await client.cancel("t")).status is TaskStatus.CANCELLED
        await node.beat()
        await client.submit(make_request("u"))
        assert (await node.take())[0].request.task_id == "u", "the place is free again"


async def test_a_task_that_is_cancelled_twice_at_once_stays_cancelled(tmp_path: Path) -> None:
    """Guards against a second order that comes while the end is being written, and after which the task has failed."""
    async with rollout_server(tmp_path) as (service, client):
        await client.submit(make_request("t", num_samples=2))
        states = await asyncio.gather(service.cancel("t"), service.cancel("t"))
        assert [*states, await client.task("t")] == [states[0]] * 3
        assert states[0].status is TaskStatus.CANCELLED


async def test_tasks_that_come_at_once_do_not_exceed_the_limit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a limit that each of many tasks keeps alone."""
    monkeypatch.setattr(bounds, "OPEN_SAMPLES", 3)
    async with rollout_server(tmp_path) as (service, client):
        requests = [make_request(name, num_samples=2) for name in ("t", "u", "v")]
        submitted = await asyncio.gather(*map(service.submit, requests), return_exceptions=True)
        assert [type(each) for each in submitted] == [tuple, bounds.OverloadedError, bounds.OverloadedError]
        assert service.book.open_samples == 2
        await client.cancel("t")
        assert (await client.submit(requests[1])).status is TaskStatus.QUEUED


async def test_a_group_stops_early_when_enough_samples_are_usable(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY, run=3) as node:
        await client.submit(make_request("t", num_samples=4, stop_when_usable=2))
        orders = await node.take(3)
        await node.deliver(episode_of(orders[0], reward=None, failure=failed()), 0)
        await node.deliver(episode_of(orders[1]), 0)
        await node.deliver(episode_of(orders[2]), 0)
        state = await client.wait("t")
        assert (state.status, state.usable, state.stopped_early) == (TaskStatus.COMPLETED, 2, True)
        assert state.failures == {"runtime_error": 1, "early_stop": 1}
        assert all([e.request.stop_when_usable == 2 async for e in client.episodes("t")]), "episodes carry the stamp"


@pytest.mark.parametrize("when_stale", ["mark", "cancel"])
async def test_sessions_that_began_too_many_weight_versions_ago(tmp_path: Path, when_stale: str) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.set_weights("v1")
        await client.submit(make_request("t", num_samples=2, max_staleness=1, when_stale=when_stale))
        old, slow = await node.take(2)
        await node.beat()
        await client.set_weights("v2")
        assert node.weight_version == "v2"
        assert await node.finish(old, weight_version="v1"), "one version behind is not too many"
        state = await client.set_weights("v3")
        assert (state.weight_version, state.settled) == ("v3", True)
        if when_stale == "mark":
            assert await node.finish(slow, weight_version="v1")
            task = await client.wait("t")
            assert (task.usable, task.stale, task.failures) == (2, 1, {})
            assert (await client.episode(slow.session_id)).session.staleness == 2
        else:
            assert await node.cancellation() == [(slow.session_id, 0)]
            task = await client.wait("t")
            assert (task.usable, task.failures) == (1, {"stale": 1})
        assert (await client.episode(old.session_id)).session.staleness == 1


async def test_a_session_whose_weights_have_a_name_that_was_never_set_lies_behind_all_versions(tmp_path: Path) -> None:
    """Guards against one that passed as fresh in silence: a session that goes on with its record may have begun under
    the engine's own label."""
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t", num_samples=2, max_staleness=0))
        labelled, ahead = await node.take(2)
        await client.set_weights("v1")
        node.engines = {"http://a:8000": "v1", "http://b:8000": "v1"}
        await node.beat()
        await client.set_weights("v2", engine="http://a:8000")
        assert await node.finish(labelled, weight_version="default")
        assert await node.finish(ahead, weight_version="v2")
        assert (await client.wait("t")).stale == 1
        staleness = [(await client.episode(each.session_id)).session.staleness for each in (labelled, ahead)]
        assert staleness == [1, 0]


async def test_pausing_reaches_all_nodes_and_those_that_come_later(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        state = await client.pause()
        assert state.settled
        assert (set(state.nodes), state.nodes["a"].paused) == ({"a"}, True)
        async with PeerNode(client.url, NODE_KEY, name="later") as later:
            assert (await later.beat()).generation.paused
        state = await client.resume()
        assert set(state.unreached) == {"later"}
        assert not state.settled
        assert not (await node.beat()).generation.paused


async def test_new_weights_of_a_server_that_no_node_has_are_refused(tmp_path: Path) -> None:
    """Guards against calls under new weights that are recorded under the old version."""
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        node.engines = {"http://a:8000": "1", "http://b:8000": "1"}
        await node.beat()
        state = await client.set_weights("2", engine="http://A:8000/v1")
        assert state.nodes.keys() == {"a"}
        refusal = "engine='http://c:8000': no node has this server; the nodes have: http://a:8000, http://b:8000"
        with pytest.raises(RolloutServiceError, match=re.escape(refusal)):
            await client.set_weights("2", engine="http://c:8000")


async def test_metrics_count_what_happened(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t"))
        (order,) = await node.take()
        assert await node.finish(order)
        assert not await node.deliver(episode_of(order), 1), "never dispatched"
        await client.submit(make_request("u"))
        await node.take()
        await node.beat()
        async with node.http.get(f"{client.url}/metrics") as response:
            lines = (await response.text()).splitlines()
    assert "polar_gym_dispatched_sessions_total 2.0" in lines
    assert "polar_gym_retried_sessions_total 0.0" in lines
    assert 'polar_gym_episodes_total{result="accepted"} 1.0' in lines
    assert 'polar_gym_episodes_total{result="excluded"} 1.0' in lines
    assert 'polar_gym_ended_tasks_total{status="COMPLETED"} 1.0' in lines
    assert 'polar_gym_samples{phase="placed"} 1.0' in lines
    assert 'polar_gym_held_run{node="a"} 1.0' in lines


async def test_the_synchronous_client_does_the_same(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:

        def train() -> tuple[list[float | None], TaskState, list[str]]:
            with SyncRolloutClient(client.url, SERVICE_KEY) as own:
                own.submit(make_request("t", num_samples=2))
                assert own.pause().settled
                assert own.resume().settled
                assert own.set_weights("v").weight_version == "v"
                rewards = [episode.reward for episode in own.episodes("t")]
                assert [state.node for state in own.nodes()] == ["a"]
                return rewards, own.wait("t"), [event.kind for event in own.events("t")]

        training = asyncio.create_task(asyncio.to_thread(train))
        for order in await node.take(2):
            await node.finish(order)
        rewards, state, kinds = await training
        assert (rewards, state.usable, kinds[-1]) == ([1.0, 1.0], 2, "task.ended")


async def test_a_task_runs_whose_trainer_hung_up_before_the_answer(tmp_path: Path) -> None:
    """Guards against handlers that are cancelled between writing a task down and beginning it."""
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY, run=40) as node:
        for number in range(20):
            body = make_request(f"t{number}").to_json()
            _, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
            head = ["POST /v1/tasks HTTP/1.1", "Host: x", f"Authorization: Bearer {SERVICE_KEY}"]
            writer.write("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
            await writer.drain()
            await asyncio.sleep(number / 5000)  # some hang up before, some while, some after it is written down
            writer.transport.abort()
        begun = {task.task_id for task in (await client.tasks(status=TaskStatus.QUEUED)).tasks}
        begun |= {task.task_id for task in (await client.tasks(status=TaskStatus.RUNNING)).tasks}
        assert begun
        orders = await node.take(len(begun))
        assert begun <= {order.request.task_id for order in orders}


async def test_evicting_goes_on_while_there_is_something_to_evict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against episodes that arrive faster than those of one round of evictions go."""
    left, done = [1000, 1000, 7, 0], asyncio.Event()

    async def evict(store: Store, before: float, keep_bytes: int) -> int:
        if len(left) == 1:
            done.set()
        return left.pop(0)

    monkeypatch.setattr(Store, "evict", evict)
    async with rollout_server(tmp_path), asyncio.timeout(30):
        await done.wait()


async def test_a_file_that_cannot_be_removed_does_not_stop_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def keep_only(files: JournalFiles, session_ids: Collection[str]) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(JournalFiles, "keep_only", keep_only)
    async with rollout_server(tmp_path) as (service, _), asyncio.timeout(60):
        while "Input/output error" not in caplog.text:  # noqa: ASYNC110 - no event tells of a line of the log
            await asyncio.sleep(0.01)
        assert not service.book.failed.done()


async def test_tasks_are_listed_in_pages(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client):
        for number in range(5):
            await client.submit(make_request(f"t{number}"))
        await client.cancel("t1")
        page = await client.tasks(limit=2)
        assert ([task.task_id for task in page.tasks], page.next) == (["t4", "t3"], "t3")
        page = await client.tasks(limit=3, after=page.next)
        assert ([task.task_id for task in page.tasks], page.next) == (["t2", "t1", "t0"], None)
        cancelled = await client.tasks(status=TaskStatus.CANCELLED)
        assert [task.task_id for task in cancelled.tasks] == ["t1"]
