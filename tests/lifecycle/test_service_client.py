"""Clients of a rollout server that goes away, comes back or refuses: what they say, and what they write."""

from __future__ import annotations

import asyncio
import io
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from polar_gym import client as client_module
from polar_gym.cli import main
from polar_gym.client import RolloutClient, RolloutServiceError, UnreachableError, watch
from polar_gym.client.watch import follow
from polar_gym.errors import ConfigError
from polar_gym.http import server_routes as routes
from polar_gym.http.edge import answer_list
from polar_gym.http.failures import reason
from polar_gym.protocol import TaskState
from polar_gym.schema import Episode, Status
from tests.lifecycle.peer_node import PeerNode, episode_of, make_request
from tests.lifecycle.service_fixtures import NODE_KEY, SERVICE_KEY, rollout_server
from tests.support.processes import free_port

FOLLOWED = 101
"""One task more than aiohttp's clients have connections by themselves."""


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


async def test_watching_says_when_the_server_is_away_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    """Guards against a watch that is silent while the server is dead."""
    listen, said = f"127.0.0.1:{free_port()}", list[str]()
    async with AsyncExitStack() as stack:
        async with rollout_server(tmp_path, listen=listen) as (_, first):
            await first.submit(make_request("t"))
            own = RolloutClient(first.url, SERVICE_KEY, keep_trying_seconds=60, notice=said.append)
            following = asyncio.create_task(follow(await stack.enter_async_context(own), ["t"], None, quiet()))
            await asyncio.sleep(0.3)
        async with asyncio.timeout(60):
            while not said:  # noqa: ASYNC110 - the client tells no events
                await asyncio.sleep(0.02)
        async with rollout_server(tmp_path, listen=listen) as (_, again), PeerNode(again.url, NODE_KEY) as node:
            (order,) = await node.take()
            await node.finish(order)
            (state,) = await asyncio.wait_for(following, 60)
    assert state.usable == 1
    away, back = said
    assert away.startswith(f"http://{listen}: Connection refused; is `polar-gym serve` running there?; trying again")
    assert back == f"http://{listen} answers again"


async def test_watching_a_server_that_stays_away_ends_with_an_error(tmp_path: Path) -> None:
    """Guards against a traceback of task groups, and against the words of connectors."""
    async with AsyncExitStack() as stack:
        async with rollout_server(tmp_path) as (_, client):
            await client.submit(make_request("t"))
            own = RolloutClient(client.url, SERVICE_KEY, keep_trying_seconds=0.5)
            await stack.enter_async_context(own)
            following = asyncio.create_task(follow(own, ["t"], tmp_path / "episodes.jsonl", quiet()))
            await asyncio.sleep(0.3)
        with pytest.raises(UnreachableError, match=r"Connection refused; is `polar-gym serve` running") as gone:
            await asyncio.wait_for(following, 60)
    assert "ssl" not in str(gone.value)


async def test_only_a_server_that_answered_before_is_waited_for(tmp_path: Path) -> None:
    """Guards against commands that wait for minutes where no server was started."""
    async with AsyncExitStack() as stack:
        said = list[str]()
        async with rollout_server(tmp_path) as (_, client):
            own = RolloutClient(client.url, SERVICE_KEY, keep_trying_seconds=0.5, wait_seconds=0, notice=said.append)
            await stack.enter_async_context(own)
            await own.tasks()
        with pytest.raises(UnreachableError, match=r"tried for 0\.5 s"):
            await own.tasks()
        assert len(said) == 1
        other = RolloutClient(client.url, SERVICE_KEY, keep_trying_seconds=60, wait_seconds=0, notice=said.append)
        await stack.enter_async_context(other)
        with pytest.raises(UnreachableError, match=r"serve` running there\?$"):
            await other.tasks()
        assert len(said) == 1


async def test_a_connection_that_died_without_a_word_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against clients that wait for ever where a machine or a network went away."""
    monkeypatch.setattr(client_module, "SILENT_SECONDS", 0.2)
    connections = 0

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read()
        writer.close()

    async with await asyncio.start_server(mute, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with RolloutClient(url, keep_trying_seconds=1) as client:
            with pytest.raises(UnreachableError, match="no answer in time"):
                await asyncio.wait_for(client.tasks(), 30)
    assert connections > 1


async def test_what_was_captured_of_cancelled_samples_is_written_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an output without the episodes that come from their nodes after a task was cancelled."""
    monkeypatch.setattr(watch, "LATE_SECONDS", 2.0)
    output, shown = tmp_path / "episodes.jsonl", quiet()
    output.write_text("precious")
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY, run=2) as node:
        await client.submit(make_request("t", num_samples=3))
        done, running = await node.take(2)
        following = asyncio.create_task(follow(client, ["t", "t"], output, shown))
        await node.deliver(episode_of(done), 0)
        await client.cancel("t")
        await asyncio.sleep(0.3)
        await node.deliver(episode_of(running, reward=None, status=Status.CANCELLED), 0)
        await asyncio.wait_for(following, 60)
    episodes = [Episode.from_json(line) for line in output.read_bytes().splitlines()]
    assert [(e.session.session_id, e.session.status, e.reward) for e in episodes] == [
        (done.session_id, Status.COMPLETED, 1.0),
        (running.session_id, Status.CANCELLED, None),
    ]
    assert "1 samples ended without an episode" in shown.file.getvalue()  # type: ignore[attr-defined]
    assert (tmp_path / "episodes.1.jsonl").read_text() == "precious"


async def test_a_state_is_asked_for_once_for_changes_that_come_together(tmp_path: Path) -> None:
    """Guards against a watch that costs the square of the samples: a state has all of them."""

    class Counting(RolloutClient):
        asked = 0

        async def task(self, task_id: str) -> TaskState:
            self.asked += 1
            return await super().task(task_id)

    async with rollout_server(tmp_path) as (_, client):
        own = Counting(client.url, SERVICE_KEY)
        await client.submit(make_request("t", num_samples=300))
        await client.cancel("t")
        async with own:
            (state,) = await asyncio.wait_for(follow(own, ["t"], None, quiet()), 60)
        events = sum([1 async for _ in client.events("t")])
    assert {session.status for session in state.sessions} == {Status.CANCELLED}
    assert own.asked < events / 5


async def test_an_order_does_not_wait_for_streams() -> None:
    """Guards against a trainer that follows a hundred tasks and cannot pause generation, without a word."""
    streams, all_open, end = 0, asyncio.Event(), asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        nonlocal streams
        response = web.StreamResponse()
        await response.prepare(request)
        streams += 1
        if streams == FOLLOWED:
            all_open.set()
        await end.wait()
        return response

    async def none(request: web.Request) -> web.Response:
        return answer_list([])

    application = web.Application()
    application.router.add_get(routes.EPISODES.path, stream)
    application.router.add_get(routes.NODES.path, none)
    async with (
        TestServer(application, handler_cancellation=True) as server,
        RolloutClient(str(server.make_url(""))) as client,
    ):
        following = [asyncio.create_task(anext(client.episodes(f"t{number}"))) for number in range(FOLLOWED)]
        async with asyncio.timeout(60):
            await all_open.wait()
            assert await client.nodes() == []
        for task in following:
            task.cancel()
        await asyncio.wait(following)
        end.set()


async def test_an_episode_that_the_server_refused_is_written_without_its_reward(tmp_path: Path) -> None:
    """Guards against training on what early stopping left out: its node had graded the session in time."""
    output = tmp_path / "episodes.jsonl"
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY, run=2) as node:
        await client.submit(make_request("t", num_samples=2, stop_when_usable=1))
        first, late = await node.take(2)
        await node.deliver(episode_of(first), 0)
        graded = episode_of(late)
        graded.trajectory.traces[0].reward = 1.0
        await node.deliver(graded, 0)
        await asyncio.wait_for(follow(client, ["t"], output, quiet()), 60)
    accepted, excluded = (Episode.from_json(line) for line in output.read_bytes().splitlines())
    assert (accepted.session.session_id, accepted.reward) == (first.session_id, 1.0)
    assert (excluded.session.session_id, excluded.session.status) == (late.session_id, Status.CANCELLED)
    assert (excluded.reward, excluded.trajectory.traces[0].reward) == (None, None)
    assert excluded.session.failure is not None
    assert excluded.session.failure.kind == "early_stop"


async def test_a_task_that_stopped_early_as_asked_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against `watch` that ends with 1, "some are not completed", where the task is."""
    monkeypatch.setenv("POLAR_GYM_SERVICE_KEY", SERVICE_KEY)
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY, run=2) as node:
        await client.submit(make_request("t", num_samples=2, stop_when_usable=1))
        first, _ = await node.take(2)
        await node.deliver(episode_of(first), 0)
        state = await client.wait("t")
        assert state.failures == {"early_stop": 1}
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(main, ["watch", "t", "--server", client.url])
    assert ended.value.code == 0, capsys.readouterr().err


async def test_the_wrong_key_says_where_the_client_takes_it_from(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, own), RolloutClient(own.url, "not the key") as client:
        with pytest.raises(RolloutServiceError, match="POLAR_GYM_SERVICE_KEY"):
            await client.tasks()


async def test_the_clients_key_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `recipes/deploy/slurm.sh` says."""
    (tmp_path / "key").write_text(f"{SERVICE_KEY}\n")
    monkeypatch.setenv("POLAR_GYM_SERVICE_KEY_FILE", str(tmp_path / "key"))
    async with rollout_server(tmp_path) as (_, own), RolloutClient(own.url) as client:
        assert (await client.tasks()).tasks == []
    monkeypatch.setenv("POLAR_GYM_SERVICE_KEY_FILE", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"POLAR_GYM_SERVICE_KEY_FILE=.*nothing: cannot be read"):
        RolloutClient(own.url)


@pytest.mark.parametrize("evil", ["a?b", "a#b", "-x"])
async def test_an_id_is_sent_as_it_was_given(tmp_path: Path, evil: str) -> None:
    """Guards against ids that become another path or a query: of another task, say."""
    async with rollout_server(tmp_path) as (_, client):
        await client.submit(make_request("a"))
        with pytest.raises(RolloutServiceError, match="task_id=") as refused:
            await client.cancel(evil)
        assert refused.value.status == 400
        assert (await client.task("a")).finished_at is None


@pytest.mark.parametrize("url", ["127.0.0.1:8700", "ftp://x", "http://"])
def test_what_is_no_url_is_said_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected a URL, e\.g\. http://127"):
        RolloutClient(url)


async def test_cancelling_says_what_had_ended_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLAR_GYM_SERVICE_KEY", SERVICE_KEY)

    def cancel(url: str, *task_ids: str) -> Any:
        with pytest.raises(SystemExit) as ended:
            main(["cancel", *task_ids, "--server", url])
        return ended.value.code

    async with rollout_server(tmp_path) as (_, client):
        await client.submit(make_request("old"))
        await client.cancel("old")
        await client.submit(make_request("new"))
        assert await asyncio.to_thread(cancel, client.url, "old", "new", "nobody") == 2
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["old had ended before: CANCELLED", "new CANCELLED"], "done, and said"
    assert "task_id='nobody': there is no such task" in captured.err


def test_reasons_are_words_for_people() -> None:
    assert reason(ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)")) == "Connection refused"
    assert reason(TimeoutError()) == "no answer in time"
    assert reason(socket.gaierror(-2, "Name or service not known")) == "Name or service not known"
