"""Attacks on the three ports (server, node, model proxy): refused, logged, and nothing is changed by them.

What each port's own tests hold already is not repeated: keys, ids and bodies of the server (`test_service_edge`), keys
and ids of a node (`test_node_control`), keys of the proxy (`test_gateway`), callbacks (`test_service_callbacks`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from polar_gym.gateway.node import control
from polar_gym.gateway.proxy import proxy, receiving
from polar_gym.http import listener
from polar_gym.http.keys import Keys
from polar_gym.protocol import Callback
from polar_gym.service import callbacks
from tests.lifecycle.callback_receiver import Receiver
from tests.lifecycle.nodes import node_here, order, session_on_node
from tests.lifecycle.peer_node import PeerNode, episode_of, make_request
from tests.lifecycle.service_fixtures import CALLBACK_KEY, NODE_KEY, rollout_server
from tests.support.processes import free_port
from tests.support.sessions import task

BODY = b'{"model": "policy", "messages": [{"role": "user", "content": "x"}]}'
REQUESTS: list[tuple[str, dict[str, str]]] = [
    ("/v1/chat/completions", {"Authorization": "Bearer {key}"}),
    ("/v1/responses", {"Authorization": "Bearer {key}"}),
    ("/v1/messages", {"x-api-key": "{key}"}),
    ("/v1beta/models/policy:generateContent?key={key}", {}),
]


async def ask(url: str, key: str, path: str, headers: dict[str, str], body: bytes = BODY) -> int:
    given = {name: value.format(key=key) for name, value in headers.items()}
    async with (
        aiohttp.ClientSession(headers=given) as http,
        http.post(url + path.format(key=key), data=body) as response,
    ):
        await response.read()
        return response.status


def journals(tmp_path: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (tmp_path / "state").rglob("*.jsonl")}


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


# The model proxy ------------------------------------------------------------------------------------------------------


async def test_an_old_key_opens_nothing_after_its_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On the loopback port, where other sessions go on; the session's own listener is gone with its sandbox."""
    async with session_on_node(tmp_path) as (node, alive):
        async with node.session(task(task_id="over")) as life:
            life.capture.running = True
            assert await ask(node.url, life.capture.key, *REQUESTS[0]) == 200
            await life.capture.end()
            assert await ask(node.url, life.capture.key, *REQUESTS[0]) == 403, "it has ended, and is being evaluated"
        before = journals(tmp_path)
        for path, headers in REQUESTS:
            caplog.clear()
            assert await ask(node.url, life.capture.key, path, headers) in (400, 401, 403), path
            assert "opens no session" in caplog.text, path
            assert life.capture.key not in caplog.text
        assert journals(tmp_path) == before
        assert [len(life.capture.calls), len(alive.calls), alive.admitted] == [1, 0, 0]


async def test_another_sessions_key_is_refused_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with session_on_node(tmp_path) as (node, mine), node.session(task(task_id="other")) as other:
        other.capture.running = True
        server = await asyncio.get_running_loop().create_server(node.proxy.server_for(mine), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        before = journals(tmp_path)
        for path, headers in REQUESTS:
            caplog.clear()
            assert await ask(url, other.capture.key, path, headers) in (400, 401, 403), path
            assert "refused: the API key opens no session" in caplog.text, path
            assert other.capture.key not in caplog.text
        server.close()
        assert journals(tmp_path) == before
        assert [mine.admitted, other.capture.admitted] == [0, 0]


async def test_a_body_that_is_too_large_is_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(receiving, "MAX_BODY_BYTES", 1000)
    async with session_on_node(tmp_path) as (node, capture):
        assert await ask(node.url, capture.key, *REQUESTS[0], b'{"model":"%b"}' % (b"x" * 2000)) == 413
        assert (capture.calls, capture.admitted) == ([], 0)
        assert "the body is over 1000 bytes" in caplog.text
        assert await ask(node.url, capture.key, *REQUESTS[0]) == 200, "the session goes on"


async def test_what_cannot_be_translated_is_counted_and_logged_once_for_each_field(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against sessions that end with reward 0, without any trace of what their harness had asked for."""

    def body(*parts: bytes) -> bytes:
        return b'{"model": "policy", "messages": [{"role": "user", "content": [%b]}]}' % b", ".join(parts)

    text, page, tape = b'{"type": "text", "text": "x"}', b'{"type": "page"}', b'{"type": "tape"}'
    async with session_on_node(tmp_path) as (node, capture):
        for sent in (body(page), body(text, page), body(text, text, tape), b'{"model": "policy", "messages": 1}'):
            assert await ask(node.url, capture.key, *REQUESTS[0], sent) == 400
        assert await ask(node.url, capture.key, *REQUESTS[0], body(text)) == 200
        assert node.proxy.calls == {"refused": 4, "delivered": 1}
    told = [each.getMessage() for each in caplog.records if "refused: messages" in each.getMessage()]
    assert [message.partition(" refused: ")[2].partition(": ")[0] for message in told] == [
        "messages[0].content[0].type",
        "messages",
    ], told
    assert all(capture.session_id in message for message in told)


async def test_a_body_that_comes_slowly_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against harnesses, or what they run, that hold the gateway's memory with requests that never end."""
    monkeypatch.setattr(receiving, "BODY_SECONDS", 0.2)
    async with session_on_node(tmp_path) as (node, capture):
        reader, writer = await asyncio.open_connection(*address(node.url))
        head = f"Host: localhost\r\nAuthorization: Bearer {capture.key}\r\nContent-Length: 99"
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n{{".encode())
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 60)
        writer.close()
        assert (capture.calls, capture.admitted) == ([], 0)
        assert "refused: the body did not come" in caplog.text


HALF_A_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "


@pytest.mark.parametrize("sent", [b"", HALF_A_HEAD])
async def test_a_head_that_comes_slowly_is_cut_off_by_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    monkeypatch.setattr(proxy, "HEAD_SECONDS", 0.2)
    async with session_on_node(tmp_path) as (node, capture):
        await _is_cut_off(node.url, sent)
        assert "sent no request" in caplog.text
        assert await ask(node.url, capture.key, *REQUESTS[0]) == 200


async def _is_cut_off(url: str, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection(*address(url))
    writer.write(sent)
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), 60)
    writer.close()


# The node's control port ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", HALF_A_HEAD])
async def test_a_head_that_comes_slowly_is_cut_off_by_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    monkeypatch.setattr(listener, "HEAD_SECONDS", 0.2)
    async with node_here(tmp_path) as (gateway, node):
        await _is_cut_off(gateway.url, sent)
        assert "sent no request" in caplog.text
        assert (await node.ask("GET", "/v1/sessions"))[1] == []


async def test_an_order_that_is_too_large_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_BODY_BYTES", 1000)
    async with node_here(tmp_path) as (gateway, node):
        status, _ = await node.put(order(metadata={"x": "y" * 2000}))
        assert status == 413
        assert gateway.service.sessions == []


# The rollout server ---------------------------------------------------------------------------------------------------


async def test_names_of_artifacts_are_never_opened(tmp_path: Path) -> None:
    """A node says where its journal is and what was not carried: the server keeps the words and follows none."""
    secret = tmp_path / "secret"
    secret.write_text("of this machine")
    async with rollout_server(tmp_path) as (_, client), PeerNode(client.url, NODE_KEY) as node:
        await client.submit(make_request("t"))
        (given,) = await node.take()
        episode = episode_of(given)
        episode.artifacts.journal = str(secret)
        episode.artifacts.not_carried = ["../../../etc/passwd", "/etc/passwd\0"]
        assert await node.deliver(episode, 0)
        (told,) = [episode async for episode in client.episodes("t")]
        assert told.artifacts == episode.artifacts
        assert "of this machine" not in told.to_json().decode()
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parts[0] for path in written} == {"state", "secret"}


async def test_a_callback_that_is_made_up_changes_nothing_at_the_receiver(tmp_path: Path) -> None:
    """By somebody who knows the form, but not the key; and one who sends a genuine one again under a new key."""
    async with Receiver(CALLBACK_KEY) as receiver, rollout_server(tmp_path) as (_, client):
        await client.submit(make_request("t", callback_url=receiver.url))
        await client.cancel("t")
        await receiver.wait_for(2)
        before = dict(receiver.results)
        made_up = Callback(kind="task", task_id="t", task=await client.task("t")).to_json()
        headers, body = receiver.requests[0]
        sent_again = {name: value for name, value in headers.items() if name.startswith("Polar")}
        async with aiohttp.ClientSession() as http:
            stamp = sent_again[callbacks.TIME_HEADER]
            forged = {callbacks.TIME_HEADER: stamp, callbacks.SIGNATURE_HEADER: callbacks.sign("guess", stamp, made_up)}
            async with http.post(receiver.url, headers=forged, data=made_up) as response:
                assert response.status == 401
            async with http.post(receiver.url, headers=sent_again, data=body) as response:
                assert response.status == 200, "the same again is known, and not a second result"
        assert receiver.forged == 1
        assert receiver.results == before


# A web page that is shown on this machine -----------------------------------------------------------------------------

PAGES: list[dict[str, str]] = [
    {"Origin": "https://evil.example"},
    {"Origin": "http://127.0.0.1:8701"},
    {"Origin": "null"},
    {"Host": "evil.example"},
    {"Host": "127.0.0.1.evil.example:8701"},
    {"Host": "[::1"},
    {"Host": ""},
]


async def test_a_web_page_gives_a_node_without_a_key_no_orders(tmp_path: Path) -> None:
    """Guards against a page that drained the node, and one whose own name was bound to it, which began a session."""
    dispatch = order("s").to_json()
    async with node_here(tmp_path, key=None) as (gateway, _), aiohttp.ClientSession() as http:
        for headers in PAGES:
            for method, path, body in (
                ("POST", "/v1/drain", b""),
                ("PUT", "/v1/sessions/s/0", dispatch),
                ("GET", "/v1/sessions", None),
            ):
                async with http.request(method, gateway.url + path, data=body, headers=headers) as response:
                    assert response.status == 403, (headers, path)
                    assert "a web page may have sent this" in (await response.json())["error"]
            for path in ("/healthz", "/readyz", "/metrics"):
                async with http.get(gateway.url + path, headers=headers) as response:
                    assert response.status == 200, "probes come by any name"
        assert not gateway.service.draining
        assert gateway.service.sessions == []
        async with http.put(f"{gateway.url}/v1/sessions/s/0", data=dispatch, headers={"Host": "localhost"}) as response:
            assert response.status == 201


async def test_a_port_without_a_key_is_also_known_by_its_own_url(tmp_path: Path) -> None:
    """A tunnel or a proxy in front of the port keeps the name that it was asked by."""
    node_port, server_port, url = free_port(), free_port(), "http://head.example:1"
    async with (
        node_here(tmp_path / "node", key=None, url=url, listen=f"127.0.0.1:{node_port}"),
        rollout_server(tmp_path, Keys(), url=url, listen=f"127.0.0.1:{server_port}"),
        aiohttp.ClientSession() as http,
    ):
        for asked in (f"http://127.0.0.1:{node_port}/v1/sessions", f"http://127.0.0.1:{server_port}/v1/tasks"):
            for name, expected in (("head.example:1", 200), ("other.example:1", 403)):
                async with http.get(asked, headers={"Host": name}) as response:
                    assert response.status == expected, (asked, name)


async def test_a_web_page_calls_no_model(tmp_path: Path) -> None:
    """Not even with the session's key, which a page would have to be told."""
    async with session_on_node(tmp_path) as (node, capture):
        path, headers = REQUESTS[0]
        for page in PAGES:
            assert await ask(node.url, capture.key, path, {**headers, **page}) == 403, page
        assert capture.calls == []
        assert await ask(node.url, capture.key, path, headers) == 200
