"""Attacks on the rollout server's HTTP edge: refused, said why, nothing changed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from polar_gym.errors import ConfigError
from polar_gym.http import edge, listener, server_routes
from polar_gym.http.keys import Keys
from polar_gym.http.route import Route
from polar_gym.service import server
from polar_gym.service.service import RolloutService
from tests.lifecycle.peer_node import PeerNode, episode_of, make_request
from tests.lifecycle.service_fixtures import CALLBACK_KEY, NODE_KEY, SERVICE_KEY, rollout_server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(url: str, method: str, path: str, **options: Any) -> tuple[int, str]:
    async with aiohttp.ClientSession() as http, http.request(method, url + path, **options) as response:
        return response.status, await response.text()


def same_as_before(service: RolloutService) -> bool:
    return not service.book.live and not service.fleet.members


ROUTES = [route for route in vars(server_routes).values() if isinstance(route, Route)]
FILLED = {"task_id": "t", "session_id": "s", "node": "a"}
ALL_KEYS = {"service": SERVICE_KEY, "node": NODE_KEY}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
async def test_every_route_answers_and_wants_its_key(
    tmp_path: Path, route: Route[Any], caplog: pytest.LogCaptureFixture
) -> None:
    wrong = [bearer(key) for name, key in ALL_KEYS.items() if name not in route.keys]
    wrong += [{}, bearer(CALLBACK_KEY), bearer(SERVICE_KEY[:-1]), {"Authorization": f"Basic {SERVICE_KEY}"}]
    async with rollout_server(tmp_path) as (service, client):
        path = route.url("", **FILLED)
        for headers in wrong if route.keys else []:
            status, text = await ask(client.url, route.method, path, headers=headers, data=b"{}")
            assert status == 401, headers
            assert "key" in orjson.loads(text)["error"]
            assert not any(key in text + caplog.text for key in (SERVICE_KEY, NODE_KEY, CALLBACK_KEY))
        for headers in [bearer(ALL_KEYS[name]) for name in route.keys] or [{}]:
            status, text = await ask(client.url, route.method, path, headers=headers, data=b"{}")
            assert status != 401
            assert f"{route.method} {path}: " not in text, "no handler has this route"
        assert same_as_before(service)


async def test_a_path_without_a_route_is_told_to_those_with_a_key(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client):
        for path in ("/v1/nothing", "/v1/nodes/a/nothing"):
            assert (await ask(client.url, "GET", path))[0] == 401
            status, text = await ask(client.url, "GET", path, headers=bearer(SERVICE_KEY))
            assert (status, orjson.loads(text)["error"]) == (404, f"GET {path}: Not Found")


async def test_the_document_describes_every_route(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client):
        status, text = await ask(client.url, "GET", "/openapi.json")
        document = orjson.loads(text)
        assert (status, document["openapi"]) == (200, "3.1.0")
        for route in ROUTES:
            operation = document["paths"][route.path][route.method.lower()]
            assert operation.get("security", []) == [{f"{name}Key": []} for name in route.keys]
        schemas = document["components"]["schemas"]
        assert {"TaskRequest", "TaskState", "Heartbeat", "Episode", "Callback", "ErrorAnswer"} <= set(schemas)
        used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
        assert used <= set(schemas), "no reference leads nowhere"


async def test_probes_and_metrics_are_open(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client):
        assert (await ask(client.url, "GET", "/healthz"))[0] == 200
        assert (await ask(client.url, "GET", "/readyz"))[0] == 503, "no node"
        async with PeerNode(client.url, NODE_KEY):
            assert (await ask(client.url, "GET", "/readyz"))[0] == 200
            _, text = await ask(client.url, "GET", "/metrics")
            assert "polar_gym_nodes 1.0" in text


@pytest.mark.parametrize("evil", ["../../etc/passwd", "..", ".hidden", "a/b", "-x", "a" * 129, "a\nb", "ä", "a\0b"])
async def test_ids_that_could_be_paths_are_refused(tmp_path: Path, evil: str) -> None:
    async with rollout_server(tmp_path) as (service, client), PeerNode(client.url, NODE_KEY) as node:
        body = make_request("t").to_json().replace(b'"t"', orjson.dumps(evil), 1)
        status, text = await ask(client.url, "POST", "/v1/tasks", headers=bearer(SERVICE_KEY), data=body)
        assert status == 400
        assert "task_id=" in orjson.loads(text)["error"]
        await client.submit(make_request("t"))
        (order,) = await node.take()
        episode = episode_of(order.model_copy(update={"session_id": evil}))
        with pytest.raises(aiohttp.ClientResponseError, match=r"episode\.session\.session_id"):
            await node.deliver(episode, 0)
        assert [path.name for path in tmp_path.rglob("*.gz")] == []
        assert list(service.book.live) == ["t"]


async def test_bad_bodies_name_the_field_and_the_value(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (service, client):
        good = orjson.loads(make_request("t").to_json())

        async def refused(change: dict[str, Any]) -> str:
            body = orjson.dumps({**good, **change})
            status, text = await ask(client.url, "POST", "/v1/tasks", headers=bearer(SERVICE_KEY), data=body)
            assert status == 422
            return orjson.loads(text)["error"]

        assert "num_samples=0" in await refused({"num_samples": 0})
        # a record for each sample was made before they were counted: the server stood still and ran out of memory
        assert "num_samples=1000000000" in await refused({"num_samples": 10**9})
        assert "colour='red': unknown key; known here:" in await refused({"colour": "red"})
        assert "http:// or https://" in await refused({"callback_url": "file:///etc/passwd"})
        assert "user name" in await refused({"callback_url": "http://me:secret@x/"})
        status, text = await ask(client.url, "POST", "/v1/tasks", headers=bearer(SERVICE_KEY), data=b"{]")
        assert (status, "not JSON" in text) == (400, True)
        assert same_as_before(service)


async def test_a_body_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_REQUEST_BYTES", 1000)
    async with rollout_server(tmp_path) as (service, client):
        body = make_request("t", metadata={"x": "y" * 2000}).to_json()
        status, text = await ask(client.url, "POST", "/v1/tasks", headers=bearer(SERVICE_KEY), data=body)
        assert status == 413
        assert "error" in orjson.loads(text)
        assert same_as_before(service)


@pytest.mark.parametrize("what", ["nothing", "half a head"])
async def test_a_client_that_sends_its_head_slowly_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "HEAD_SECONDS", 0.2)
    caplog.set_level(logging.WARNING)
    async with rollout_server(tmp_path) as (_, client):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
        writer.write(b"" if what == "nothing" else b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        assert await asyncio.wait_for(reader.read(), 60) == b"", "closed without an answer"
        writer.close()
        assert "sent no request" in caplog.text
        assert await client.nodes() == []


async def test_a_client_that_sends_its_body_slowly_is_answered_and_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "BODY_SECONDS", 0.2)
    async with rollout_server(tmp_path) as (service, client):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
        head = ["POST /v1/tasks HTTP/1.1", "Host: x", "Content-Length: 100", f"Authorization: Bearer {SERVICE_KEY}"]
        writer.write("\r\n".join([*head, "", "{"]).encode())
        assert b"408" in await asyncio.wait_for(reader.readline(), 60)
        writer.close()
        assert same_as_before(service)


async def test_without_keys_only_programs_of_this_machine_are_served(tmp_path: Path) -> None:
    async with rollout_server(tmp_path, Keys()) as (service, client):
        assert (await client.tasks()).tasks == []
        body = make_request("t").to_json()
        for headers in ({"Host": "evil.example"}, {"Origin": "http://127.0.0.1"}):
            status, _ = await ask(client.url, "POST", "/v1/tasks", headers=headers, data=body)
            assert status == 403, "a web page, by its own name or by a name that was made to lead here"
        with_callback = make_request("t", callback_url="http://127.0.0.1:1/").to_json()
        status, text = await ask(client.url, "POST", "/v1/tasks", data=with_callback)
        assert (status, "POLAR_GYM_CALLBACK_KEY" in text) == (422, True), "no callback goes out unsigned"
        assert same_as_before(service)


@pytest.mark.parametrize(
    ("keys", "named"),
    [(Keys(), "POLAR_GYM_SERVICE_KEY"), (Keys(service=SERVICE_KEY), "POLAR_GYM_NODE_KEY")],
)
async def test_an_open_address_without_keys_is_refused(tmp_path: Path, keys: Keys, named: str) -> None:
    with pytest.raises(ConfigError, match=f"set {named}"):
        async with rollout_server(tmp_path, keys, listen="0.0.0.0:0"):
            pass
    assert not (tmp_path / "state").exists()


async def test_two_servers_do_not_share_a_state_directory(tmp_path: Path) -> None:
    async with rollout_server(tmp_path):
        with pytest.raises(ConfigError, match="in use by another rollout server"):
            async with rollout_server(tmp_path):
                pass


@pytest.mark.parametrize(
    ("path", "headers", "said"),
    [
        ("/v1/tasks?status=DONE", {}, "status='DONE': expected one of QUEUED, RUNNING, COMPLETED, FAILED, CANCELLED"),
        ("/v1/tasks?limit=0", {}, "limit='0': expected a number from 1 to 500"),
        ("/v1/tasks?after=nobody", {}, "after='nobody': there is no such task, or it was evicted"),
        ("/v1/episodes/s?attempt=%C2%B2", {}, "attempt='²': expected a number"),
        ("/v1/tasks/t/events", {"Last-Event-ID": "²"}, "Last-Event-ID='²': expected a number"),
        ("/v1/tasks/t/events", {"Last-Event-ID": "9" * 30}, "Last-Event-ID='999999999999999999999999999999': expected"),
    ],
)
async def test_what_is_asked_for_wrongly_is_named(
    tmp_path: Path, path: str, headers: dict[str, str], said: str
) -> None:
    """Guards against empty pages, and internal errors, for what was only mistyped."""
    async with rollout_server(tmp_path) as (_, client):
        await client.submit(make_request("t"))
        status, text = await ask(client.url, "GET", path, headers={**bearer(SERVICE_KEY), **headers})
        assert 400 <= status < 500, text
        assert said in orjson.loads(text)["error"]


async def test_events_are_resumed_after_the_last_one_seen(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t"))
        (order,) = await node.take()
        await node.finish(order)
        every = [event async for event in client.events("t")]
        status, text = await ask(
            client.url,
            "GET",
            "/v1/tasks/t/events",
            headers={**bearer(SERVICE_KEY), "Last-Event-ID": str(every[1].id)},
        )
        assert status == 200
        assert [line for line in text.splitlines() if line.startswith("id: ")] == [f"id: {e.id}" for e in every[2:]]


async def test_episodes_are_waited_for_and_continued_behind_the_last(tmp_path: Path) -> None:
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t", num_samples=2))
        first, second = await node.take(2)

        async def fetch(**query: str) -> list[str]:
            status, text = await ask(
                client.url, "GET", "/v1/tasks/t/episodes", headers=bearer(SERVICE_KEY), params=query
            )
            assert status == 200, text
            return [orjson.loads(line)["session"]["session_id"] for line in text.splitlines()]

        assert await fetch() == []
        waiting = asyncio.create_task(fetch(wait="30"))
        await node.finish(first)
        assert await waiting == [first.session_id]
        assert await fetch(after=first.session_id) == []
        await node.finish(second)
        assert await fetch(after=first.session_id) == [second.session_id]
        assert await fetch() == [first.session_id, second.session_id]


async def test_a_watcher_that_leaves_is_no_error_of_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a traceback in the log for every `polar-gym watch` that is interrupted."""
    async with rollout_server(tmp_path) as (_, client):
        await client.submit(make_request("t"))
        async with aiohttp.ClientSession(headers=bearer(SERVICE_KEY)) as http:
            response = await http.get(f"{client.url}/v1/tasks/t/events")
            assert await response.content.readline()
            response.close()
        await client.cancel("t")
        assert (await client.wait("t")).finished_at is not None
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
