"""A node and its server: heartbeats, orders in their answers, and episodes that arrive whatever the server does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from polar_gym.gateway.node import link, process
from polar_gym.protocol import Delivery, DeliveryAnswer, Generation, GenerationAnswer, Heartbeat, HeartbeatAnswer
from polar_gym.schema import Episode, Status
from tests.lifecycle.nodes import KEY, node_here, order
from tests.support.listening import listen, stop_listening
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking

WORKING = asking("ask(); import time; time.sleep(60)")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    monkeypatch.setattr(link, "AT_MOST_EVERY_SECONDS", 0.05)
    monkeypatch.setattr(link, "REFUSED_AGAIN_SECONDS", 0.2)


@dataclass
class Server:
    """What a node sees of a rollout server: it keeps what it is told, and answers what the test says."""

    answer: HeartbeatAnswer = field(default_factory=lambda: HeartbeatAnswer(lease_seconds=30))
    refusals: list[int] = field(default_factory=list)
    """Statuses of the next deliveries; then they are taken."""
    accepted: bool = True
    heartbeats: list[Heartbeat] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    keys: set[str | None] = field(default_factory=set)
    mute: asyncio.Event | None = None
    """Heartbeats are received, and not answered before this is set."""
    refuse: bool = False
    """Heartbeats are answered with an error."""
    stuck: asyncio.Event | None = None
    """The next delivery is received, and neither taken nor answered before this is set."""
    port: int = 0
    heard: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/nodes/{node}/heartbeat", self._heartbeat)
        app.router.add_post("/v1/nodes/{node}/episodes", self._episode)
        runner = web.AppRunner(app, shutdown_timeout=0)
        listening = await listen(runner, self.port)
        self.port = listening.getsockname()[1]
        try:
            yield
        finally:
            await stop_listening(runner, listening)

    async def _heartbeat(self, http: web.Request) -> web.Response:
        self.heartbeats.append(Heartbeat.from_json(await http.read()))
        response = await self._heard(http, web.Response(body=self.answer.to_json(), status=500 if self.refuse else 200))
        if self.mute is not None:
            await self.mute.wait()
        return response

    async def _episode(self, http: web.Request) -> web.Response:
        if (stuck := self.stuck) is not None:
            self.stuck = None
            await self._heard(http, web.Response())
            await stuck.wait()
        if self.refusals:
            return await self._heard(http, web.Response(status=self.refusals.pop(0), text="no"))
        self.deliveries.append(Delivery.from_json(await http.read()))
        return await self._heard(http, web.Response(body=DeliveryAnswer(accepted=self.accepted).to_json()))

    async def _heard(self, http: web.Request, response: web.Response) -> web.Response:
        self.paths.add(http.path)
        self.keys.add(http.headers.get("Authorization"))
        async with self.heard:
            self.heard.notify_all()
        return response

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(60), self.heard:
            await self.heard.wait_for(true)


async def test_a_node_tells_what_it_is_and_delivers_each_episode_once(tmp_path: Path) -> None:
    server = Server()
    async with server.up(), node_here(tmp_path, pools={"run": 3}, server=server.url) as (gateway, node):
        await server.until(lambda: server.heartbeats)
        first = server.heartbeats[0]
        assert (first.node, first.url, first.places.run, first.sessions) == ("here", gateway.url, 3, [])
        assert first.engine.name == "embedded"
        await node.put(order(agent=WORKING))
        await server.until(lambda: any(s.status is Status.RUNNING for s in server.heartbeats[-1].sessions))
        assert server.heartbeats[-1].held.run == 1
        await node.put(order("quick"))
        await server.until(lambda: server.deliveries)
        await server.until(lambda: [s.session_id for s in server.heartbeats[-1].sessions] == ["s"])
        (delivery,) = server.deliveries
        assert (delivery.episode.session.session_id, delivery.attempt) == ("quick", 0)
        assert (tmp_path / "state" / "sessions" / "quick.0" / "delivered.json").exists()
        assert server.paths == {"/v1/nodes/here/heartbeat", "/v1/nodes/here/episodes"}
        assert server.keys == {f"Bearer {KEY}"}
        assert len({heartbeat.incarnation for heartbeat in server.heartbeats}) == 1


async def test_a_node_beats_often_enough_for_a_short_lease(tmp_path: Path) -> None:
    """Guards against nodes that are silent for longer than their lease because nothing happens, and count as dead."""
    server = Server(answer=HeartbeatAnswer(lease_seconds=0.8))
    async with server.up(), node_here(tmp_path, server=server.url):
        await server.until(lambda: server.heartbeats)
        began, beats = time.monotonic(), len(server.heartbeats)
        await server.until(lambda: len(server.heartbeats) >= beats + 4)
        assert time.monotonic() - began < 4 * 0.8


async def test_a_server_that_does_not_answer_is_asked_again_within_the_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against nodes that wait for a dead connection's answer while the server, begun again, waits for them."""
    server = Server(answer=HeartbeatAnswer(lease_seconds=0.8))
    async with server.up(), node_here(tmp_path, server=server.url):
        await server.until(lambda: server.heartbeats)
        server.mute = asyncio.Event()
        beats = len(server.heartbeats)
        await server.until(lambda: len(server.heartbeats) >= beats + 3)
        server.mute.set()
        assert "no answer in time" in caplog.text


@pytest.mark.parametrize("mute", [False, True])
async def test_a_node_without_a_lease_begins_no_call(tmp_path: Path, mute: bool) -> None:
    """Guards against a node that samples on under old weights, while the server takes the node for dead and tells the
    trainer that generation is paused. `mute`: heartbeats get no answer, and no refusal."""
    server, silence = Server(answer=HeartbeatAnswer(lease_seconds=2)), asyncio.Event()
    async with server.up(), node_here(tmp_path, server=server.url) as (gateway, node):
        gate, asked = gateway.service.node.proxy.generation, gateway.service.transcripts
        await node.put(order(agent=asking("import time\nwhile True: ask(); time.sleep(0.2)")))
        async with asyncio.timeout(60):
            while not any(each.calls for each in asked()):  # noqa: ASYNC110 - no event tells of a call
                await asyncio.sleep(0.01)
        server.mute, server.refuse = (silence, False) if mute else (None, True)
        beats = len(server.heartbeats)
        await server.until(lambda: len(server.heartbeats) > beats + 1)  # no earlier answer is on its way
        try:
            await asyncio.wait_for(gate._closed.wait(), 60)
            await node.ask("POST", "/v1/generation", Generation(paused=True).to_json())
            _, told = await node.ask("POST", "/v1/generation", Generation(paused=False).to_json())
            assert (told["paused"], told["in_flight"]) == (True, 0), "an order of a server whose answers do not arrive"
            (before,) = [each.calls for each in asked()]
        finally:
            silence.set()
            server.refuse = False
        async with asyncio.timeout(60):
            await gate._open.wait()
            while [each.calls for each in asked()] == [before]:  # noqa: ASYNC110 - no event tells of a call
                await asyncio.sleep(0.01)


async def test_a_server_that_refuses_or_fails_gets_the_episode_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(refusals=[500, 401, 404])
    async with server.up(), node_here(tmp_path, server=server.url) as (_, node):
        await node.put(order())
        await server.until(lambda: server.deliveries)
    assert server.refusals == []
    for status in (500, 401, 404):
        assert f"/v1/nodes/here/episodes answered {status}: no" in caplog.text


@pytest.mark.parametrize("status", [400, 408, 413, 422])
async def test_a_server_that_refuses_for_good_gets_an_episode_without_a_trajectory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setitem(link.FOR_GOOD, status, 0.0)
    server = Server(refusals=[status])
    async with server.up(), node_here(tmp_path, server=server.url) as (_, node):
        await node.put(order())
        await server.until(lambda: server.deliveries)
    episode = server.deliveries[0].episode
    assert (episode.session.session_id, episode.session.status) == ("s", Status.ERROR)
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "gateway_error"
    assert f"answered {status}: no" in episode.session.failure.message
    assert (episode.reward, episode.trajectory.traces, episode.artifacts.diff) == (None, [], "")
    kept = tmp_path / "state" / "sessions" / "s.0" / "episode.json"
    assert Episode.from_json(kept.read_bytes()).session.status is Status.COMPLETED
    assert caplog.text.count("answered") == 1
    assert str(kept) in caplog.text


@pytest.mark.parametrize("gone", [True, False])
async def test_an_episode_that_cannot_be_read_ends_its_session_with_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """Guards against a node that reads a lost file for ever, and a task that never ends."""
    monkeypatch.setattr(link, "UNREADABLE_SECONDS", 3600.0 if gone else 0.0)
    answer = asyncio.Event()
    server = Server(stuck=answer, refusals=[500])
    async with server.up(), node_here(tmp_path, server=server.url) as (_, node):
        await node.put(order())
        await server.until(lambda: server.stuck is None)
        kept = tmp_path / "state" / "sessions" / "s.0" / "episode.json"
        kept.unlink()
        if not gone:
            kept.mkdir()
        answer.set()
        await server.until(lambda: server.deliveries)
    session = server.deliveries[0].episode.session
    assert session.failure is not None
    assert (session.status, session.failure.kind) == (Status.ERROR, "gateway_error")
    assert f"its episode cannot be read: [Errno {2 if gone else 21}]" in session.failure.message
    assert str(kept) in session.failure.message


async def test_an_episode_is_sent_again_where_its_substitute_is_refused_too(tmp_path: Path) -> None:
    """Guards against lost episodes where the server is at fault."""
    server = Server(refusals=[413, 413, 413, 500])
    async with server.up(), node_here(tmp_path, server=server.url) as (_, node):
        await node.put(order())
        await server.until(lambda: server.deliveries)
    assert server.deliveries[0].episode.session.status is Status.COMPLETED


async def test_an_episode_waits_for_a_server_of_its_version(tmp_path: Path) -> None:
    """Guards against lost episodes where nodes are replaced before their server, which refuses unknown fields."""
    server = Server(refusals=[422, 400, 422])
    async with server.up(), node_here(tmp_path, server=server.url) as (_, node):
        await node.put(order())
        await server.until(lambda: server.deliveries)
    assert server.deliveries[0].episode.session.status is Status.COMPLETED


async def test_an_episode_outlives_a_server_that_is_away_and_its_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "FAREWELL_SECONDS", 0.1)
    server = Server()
    async with server.up():
        assert server.port
    async with node_here(tmp_path, server=server.url) as (_, node):
        await node.put(order())
        await node.episode()
    assert "the server is away" in caplog.text
    assert "1 episodes are not delivered yet" in caplog.text
    async with node_here(tmp_path, server=server.url):
        await asyncio.sleep(0.5)
        async with server.up():
            await server.until(lambda: server.deliveries)
    (delivery,) = server.deliveries
    assert delivery.episode.session.status is Status.COMPLETED
    async with server.up(), node_here(tmp_path, server=server.url):
        await server.until(lambda: len(server.heartbeats) > 1)
        assert server.heartbeats[-1].sessions == []
    assert len(server.deliveries) == 1, "what was acknowledged is not sent again"


async def test_an_episode_in_hand_is_sent_by_the_link_that_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an episode that is not sent before the node's next start, where an error ended the link."""
    monkeypatch.setattr(process, "RESTART_SECONDS", 0.0)
    server = Server(stuck=(stuck := asyncio.Event()))
    async with server.up(), node_here(tmp_path, server=server.url) as (gateway, node):
        await node.put(order())
        await server.until(lambda: server.stuck is None)

        def fail_once(url: str) -> Heartbeat:
            patch.undo()
            raise ZeroDivisionError("an error of the link")

        with monkeypatch.context() as patch:
            patch.setattr(gateway.service, "heartbeat", fail_once)
            gateway.service.changed.set()
            await server.until(lambda: server.deliveries)
        stuck.set()
    assert server.deliveries[0].episode.session.session_id == "s"


async def test_a_node_follows_what_the_answers_to_its_heartbeats_say(tmp_path: Path) -> None:
    server = Server()
    async with server.up(), node_here(tmp_path, server=server.url) as (gateway, node):
        service = gateway.service
        server.answer.generation, server.answer.weight_version = Generation(paused=True), "5"
        await node.put(order(agent=WORKING))
        await server.until(lambda: service.generation().paused)
        assert service.generation().weight_version == "5"
        server.answer = HeartbeatAnswer(lease_seconds=30, cancel=["s", "unknown"], draining=True)
        await server.until(lambda: server.deliveries)
        assert server.deliveries[0].episode.session.status is Status.CANCELLED
        await server.until(lambda: server.heartbeats[-1].draining)
        assert not service.generation().paused


async def test_a_node_that_begins_in_a_rolling_update_names_each_servers_weights(tmp_path: Path) -> None:
    """Guards against calls of a server with new weights that are recorded under the version before."""
    server = Server()
    async with server.up(), node_here(tmp_path, server=server.url) as (gateway, _):
        named: list[tuple[str, str | None]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                gateway.service.node, "set_weight_version", lambda version, url=None: named.append((version, url))
            )
            server.answer.weight_version, server.answer.engines = "5", {"http://a:8000": "6"}
            gateway.service.changed.set()
            await server.until(lambda: len(named) > 1)
            assert named[:2] == [("5", None), ("6", "http://a:8000")]
            server.answer.weight_version = None  # the first update of a run has no version for all yet
            server.answer.engines = {"http://a:8000": "7"}
            gateway.service.changed.set()
            await server.until(lambda: ("7", "http://a:8000") in named)
            before = len(server.heartbeats)
            gateway.service.changed.set()
            await server.until(lambda: len(server.heartbeats) > before + 1)
            assert named.count(("7", "http://a:8000")) == 1


async def test_a_node_that_missed_the_end_of_a_rolling_update_hears_of_it(tmp_path: Path) -> None:
    """Guards against the name of one server that stays, where the order for all said the version that all had."""
    server = Server()
    async with server.up(), node_here(tmp_path, server=server.url) as (gateway, _):
        url, named = "http://a:8000", list[tuple[str, str | None]]()
        server.answer.weight_version = "5"
        await server.until(lambda: gateway.service.generation().weight_version == "5")
        before_all = gateway.service.generation()

        def generation() -> GenerationAnswer:
            return before_all.model_copy(update={"engines": {url: named[-1][0] if named else "5"}})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gateway.service, "set_weights", lambda version, url=None: named.append((version, url)))
            patch.setattr(gateway.service, "generation", generation)
            for engines in ({url: "6"}, {}, {}, {url: "6"}):
                server.answer.engines = engines
                before = len(server.heartbeats)
                gateway.service.changed.set()
                await server.until(lambda before=before: len(server.heartbeats) > before + 1)
            assert named == [("6", url), ("5", None), ("6", url)]
            server.answer.engines = {}
            named.append(("5", None))  # the order for all comes
            before = len(server.heartbeats)
            gateway.service.changed.set()
            await server.until(lambda: len(server.heartbeats) > before + 1)
        assert named[3:] == [("5", None)], "nothing was missed"


async def test_a_heartbeat_that_tells_no_new_version_changes_nothing(tmp_path: Path) -> None:
    """Guards against heartbeats that name the weights of a server whose weights are other ones by now, and that have
    the call after each of them scored."""
    server = Server()
    async with server.up(), node_here(tmp_path, server=server.url) as (gateway, _):
        service, told = gateway.service, []
        server.answer.weight_version = "5"
        await server.until(lambda: service.generation().weight_version == "5")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service, "set_weights", told.append)
            before = len(server.heartbeats)
            service.changed.set()
            await server.until(lambda: len(server.heartbeats) > before + 1)
        assert not told


async def test_an_answer_that_is_older_than_an_order_does_not_undo_it(tmp_path: Path) -> None:
    """Guards against calls that slip through, while the weights change, by a heartbeat that crossed the order."""
    server = Server()
    async with server.up(), node_here(tmp_path, server=server.url) as (gateway, node):
        await server.until(lambda: server.heartbeats)
        told = HeartbeatAnswer.to_json

        def after_an_order(answer: HeartbeatAnswer) -> bytes:
            gateway.service.orders += 1
            return told(answer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HeartbeatAnswer, "to_json", after_an_order)
            await node.ask("POST", "/v1/generation", Generation(paused=True, running="keep").to_json())
            before = len(server.heartbeats)
            gateway.service.changed.set()
            await server.until(lambda: len(server.heartbeats) > before)
            await asyncio.sleep(0.2)
            assert gateway.service.generation().paused
        gateway.service.changed.set()
        async with asyncio.timeout(60):
            while gateway.service.generation().paused:  # noqa: ASYNC110 - the next answer is not older
                await asyncio.sleep(0.01)
