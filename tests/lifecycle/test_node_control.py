"""A node's control port: what it takes, what it refuses, and that a refusal changes nothing."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from polar_gym.gateway.node import control
from polar_gym.http import edge, node_routes
from polar_gym.http.route import Route
from polar_gym.protocol import Generation, Weights
from polar_gym.schema import EvaluatorSpec, HarnessSpec, RuntimeSpec, Status
from tests.lifecycle.nodes import HEADERS, KEY, client, node_here, order
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking

ROUTES = [route for route in vars(node_routes).values() if isinstance(route, Route)]


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    need_bubblewrap()


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


async def test_the_same_order_twice_is_one_session(tmp_path: Path) -> None:
    async with node_here(tmp_path) as (_, node):
        asked = await asyncio.gather(*(node.put(order()) for _ in range(5)))
        assert sorted(status for status, _ in asked) == [200, 200, 200, 200, 201]
        episode = await node.episode()
        assert (episode.session.status, episode.trajectory.fidelity.calls) == (Status.COMPLETED, 1)
        assert (await node.put(order()))[0] == 200
        assert (await node.put(order(attempt=1)))[0] == 201, "another attempt is another session"
        assert (await node.episode(attempt=1)).session.attempt == 1


async def test_without_the_key_nothing_is_told_and_nothing_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with node_here(tmp_path) as (gateway, node), client(gateway.url, {}) as stranger:
        before = files(tmp_path)
        for given in ("", "Bearer wrong-key-0123456789", f"Bearer {KEY[:-1]}", f"Basic {KEY}", "Bearer ä"):
            stranger.http.headers["Authorization"] = given
            for route in ROUTES:
                if route.keys:
                    path = route.url("", session_id="s", attempt=0)
                    status, answer = await stranger.ask(route.method, path, order().to_json())
                    assert (status, "node key" in answer["error"]) == (401, True), path
        assert files(tmp_path) == before
        assert not gateway.service.draining
        assert "PUT /v1/sessions/s/0 from 127.0.0.1 refused: this needs the node key" in caplog.text
        for path in ("/healthz", "/readyz", "/metrics"):
            async with stranger.http.get(path) as response:
                assert response.status == 200
        assert (await node.ask("GET", "/v1/sessions"))[1] == []


async def test_every_route_answers_with_the_key(tmp_path: Path) -> None:
    async with node_here(tmp_path) as (_, node):
        for route in ROUTES:
            path = route.url("", session_id="s", attempt=0)
            async with node.http.request(route.method, path) as response:
                assert response.status != 401
                assert f"{route.method} {path}: " not in await response.text(), "no handler has this route"


NO_IDS = [
    ("..", "0"),
    ("..%2F..%2Fetc", "0"),
    ("a%2Fb", "0"),
    ("a.1", "0"),
    ("a%00b", "0"),
    ("ä", "0"),
    ("x" * 65, "0"),
    ("s", "-1"),
    ("s", "1e3"),
    ("s", "٣"),
    ("s", "9" * 30),
    ("s", "..%2F0"),
]


async def test_an_id_never_becomes_a_path(tmp_path: Path) -> None:
    async with node_here(tmp_path) as (gateway, _), aiohttp.ClientSession(headers=HEADERS) as http:
        before = files(tmp_path)
        for session_id, attempt in NO_IDS:
            for method, suffix in (("PUT", ""), ("DELETE", ""), ("GET", ""), ("GET", "/episode")):
                url = URL(f"{gateway.url}/v1/sessions/{session_id}/{attempt}{suffix}", encoded=True)
                async with http.request(method, url, data=order().to_json()) as response:
                    assert response.status in (400, 404), await response.text()
        assert files(tmp_path) == before


NOT_RUNNABLE: list[tuple[dict[str, Any], str]] = [
    ({"agent": HarnessSpec(name="nope")}, "agent.name: unknown harness 'nope'; known: "),
    ({"agent": HarnessSpec(name="command")}, "agent.command: is required"),
    ({"evaluator": EvaluatorSpec(name="nope")}, "evaluator.name: unknown evaluator 'nope'"),
    ({"runtime": RuntimeSpec(name="../auto")}, "runtime.name: unknown runtime '../auto'"),
]


async def test_a_request_that_cannot_be_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with node_here(tmp_path) as (_, node):
        before = files(tmp_path)
        for change, says in NOT_RUNNABLE:
            status, answer = await node.put(order(**change))
            assert (status, says in answer["error"]) == (422, True), answer
        assert files(tmp_path) == before
        assert (await node.ask("GET", "/v1/sessions"))[1] == []


NO_ORDERS = [
    (b"{", 400, "the body is not JSON"),
    (b"[]", 400, "Input should be a valid dictionary"),
    (b'{"wings": 2}', 400, "wings=2: unknown key; known here: "),
    (order("other").to_json(), 400, "the path names session s.0, the body other.0"),
    (b" " * (control.MAX_BODY_BYTES + 1), 413, "Maximum request body size"),
]


async def test_a_body_that_is_no_order_is_refused(tmp_path: Path) -> None:
    async with node_here(tmp_path) as (_, node):
        for body, status, says in NO_ORDERS:
            answered, answer = await node.ask("PUT", "/v1/sessions/s/0", body)
            assert (answered, says in answer["error"]) == (status, True), answer


async def test_a_body_that_never_comes_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a client that holds a connection, and a handler, with a byte now and then."""
    monkeypatch.setattr(edge, "BODY_SECONDS", 0.2)
    async with node_here(tmp_path) as (gateway, _):
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"PUT /v1/sessions/s/0 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9\r\n\r\n{{"
        writer.write(head.encode())
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_draining_finishes_what_there_is_and_takes_nothing_new(tmp_path: Path) -> None:
    async with node_here(tmp_path, delay_seconds=0.5) as (_, node):
        await node.put(order())
        assert (await node.ask("POST", "/v1/drain"))[0] == 204
        assert (await node.put(order("later")))[0] == 503
        assert (await node.put(order()))[0] == 200, "what it has, it still knows"
        assert (await node.ask("GET", "/readyz"))[0] == 503
        assert (await node.episode()).session.status is Status.COMPLETED


async def test_paused_calls_wait_and_the_agents_time_does_not_pass(tmp_path: Path) -> None:
    """Guards against agents that run out of time while the trainer updates the weights."""
    async with node_here(tmp_path) as (_, node):
        paused = Generation(paused=True, running="finish")
        status, answer = await node.ask("POST", "/v1/generation", paused.to_json())
        assert (status, answer) == (200, {"paused": True, "in_flight": 0, "weight_version": None, "engines": {}})
        await node.put(order(timeout_seconds=5))
        await node.until("RUNNING")
        await asyncio.sleep(6)
        assert await node.status("s") == "RUNNING"
        await node.ask("POST", "/v1/weights", Weights(version="7").to_json())
        await node.ask("POST", "/v1/generation", Generation().to_json())
        episode = await node.episode()
    assert (episode.session.status, episode.session.truncated_by) == (Status.COMPLETED, None)
    (trace,) = episode.trajectory.traces
    assert [span.version for span in trace.weight_versions] == ["7"], "the call waited for the new weights"
    assert episode.session.weight_version is None, "they were not there when its run began"


async def test_an_agents_time_passes_on_after_a_pause(tmp_path: Path) -> None:
    request = order(timeout_seconds=1.0, agent=asking("ask(); import time; time.sleep(60)"))
    async with node_here(tmp_path) as (_, node):
        await node.put(request)
        await node.until("RUNNING")
        await node.ask("POST", "/v1/generation", Generation(paused=True, running="keep").to_json())
        await asyncio.sleep(1)
        await node.ask("POST", "/v1/generation", Generation().to_json())
        episode = await node.episode()
    assert episode.session.truncated_by == "time"
    assert 1.9 < (episode.session.timing.running or 0) < 10


async def test_pausing_waits_for_the_calls_under_way_or_does_not(tmp_path: Path) -> None:
    async with node_here(tmp_path, delay_seconds=1.5) as (gateway, node):
        await node.ask("POST", "/v1/weights", Weights(version="1").to_json())
        await node.put(order())
        async with asyncio.timeout(60):
            while not gateway.service.generation().in_flight:  # noqa: ASYNC110 - the harness takes its time
                await asyncio.sleep(0.01)
        kept = await node.ask("POST", "/v1/generation", Generation(paused=True, running="keep").to_json())
        assert kept[1]["in_flight"] == 1
        short = Generation(paused=True, running="finish", timeout_seconds=0.1)
        assert (await node.ask("POST", "/v1/generation", short.to_json()))[1]["in_flight"] == 1
        finished = await node.ask("POST", "/v1/generation", Generation(paused=True, running="finish").to_json())
        assert finished[1] == {"paused": True, "in_flight": 0, "weight_version": "1", "engines": {}}
        assert (await node.episode()).session.weight_version == "1"


async def test_metrics_count_what_happened(tmp_path: Path) -> None:
    async with node_here(tmp_path, pools={"run": 7}) as (_, node):
        await node.put(order())
        episode = await node.episode()
        await node.put(order("broken", agent=HarnessSpec.model_validate({"name": "command", "command": "exit 3"})))
        await node.episode("broken")
        async with node.http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
    assert 'polar_gym_places{stage="run"} 7.0' in lines
    assert 'polar_gym_held{stage="run"} 0.0' in lines
    assert 'polar_gym_sandboxes{state="held"} 0.0' in lines
    assert 'polar_gym_sandboxes{state="left"} 0.0' in lines
    assert 'polar_gym_ended_total{status="COMPLETED"} 1.0' in lines
    assert 'polar_gym_failures_total{kind="harness_error"} 1.0' in lines
    assert 'polar_gym_calls_total{outcome="delivered"} 1.0' in lines
    assert f"polar_gym_sampled_tokens_total {episode.trajectory.fidelity.sampled_tokens}.0" in lines
    assert any(line.startswith("polar_gym_loop_lag_seconds ") for line in lines)


async def test_no_secret_is_written_anywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The agent prints all that it knows, a caller sends a wrong key, a session fails; then all files are searched."""
    caplog.set_level(logging.DEBUG)
    tells = HarnessSpec.model_validate({"name": "command", "command": "env; env >&2; exit 3"})
    async with (
        node_here(tmp_path) as (gateway, node),
        client(gateway.url, {"Authorization": f"Bearer {KEY}x"}) as wrong,
    ):
        keys = [KEY]
        await wrong.ask("GET", "/v1/sessions")
        for session_id, agent in (("tells", tells), ("asks", asking())):
            await node.put(order(session_id, agent=agent))
            (capture,) = gateway.service.node.proxy._captures.values()
            keys.append(capture.key)
            episode = await node.episode(session_id)
            assert session_id == "asks" or "OPENAI_API_KEY=[session key]" in episode.artifacts.stdout
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5
    for key in keys:
        assert key not in caplog.text
        assert not [data for data in written if key.encode() in data]


async def test_sessions_that_wait_for_the_one_place_without_confinement_are_told(tmp_path: Path) -> None:
    """Guards against a node that is given the whole queue, runs one session at a time, and says that none waits."""
    async with node_here(tmp_path) as (gateway, _):
        alone = gateway.service.node.alone

        async def run() -> None:
            async with alone.place("t"):
                pass

        async with alone.place("t"):
            waiting = asyncio.create_task(run())
            await asyncio.sleep(0)  # the task runs up to its wait
            assert gateway.service.heartbeat(gateway.url).waiting == 1
        await waiting
        assert gateway.service.heartbeat(gateway.url).waiting == 0
