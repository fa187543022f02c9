"""An engine that is away for a while: sessions wait for it, harnesses are kept waiting, and nothing fails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from polar_gym.chat import ChatRequest
from polar_gym.config.loading import load_config
from polar_gym.engines import EngineError, http, probe
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.engines.vllm import ENGINE, VllmEngine, VllmOptions
from polar_gym.gateway.node import process
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.node.settings import gateway_settings
from polar_gym.gateway.proxy import sending
from polar_gym.schema import Sampling
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking, task
from tests.support.tools import ASK
from tests.support.vllm_stand_in import REQUEST, LeavingServer, without_templates

TCP = Path("/proc/net/tcp")
ESTABLISHED = "01"


class AskedServer(LeavingServer):
    """A server that looks at its client's end of the connection."""

    timer = ""
    """The kind of the system's timer, and its ticks, both hexadecimal."""

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports = [request.transport.get_extra_info(end)[1] for end in ("peername", "sockname")]
        while self.timer.partition(":")[0] in ("", "01"):  # 01: a part of the request is not acknowledged yet
            rows = [row.split() for row in TCP.read_text().splitlines()[1:]]
            own = [row for row in rows if [int(end.rpartition(":")[2], 16) for end in row[1:3]] == ports]
            (self.timer,) = [row[5] for row in own if row[3] == ESTABLISHED]
            await asyncio.sleep(0.01)
        return await super()._chat(request)


@asynccontextmanager
async def started(server: LeavingServer, **options: Any) -> AsyncIterator[VllmEngine]:
    await server.up()
    engine = VllmEngine(VllmOptions(url=server.url, **options))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
        await server.down()


async def test_a_call_waits_for_an_engine_that_is_away() -> None:
    """Guards against sessions that fail because the engine was restarted."""
    server = LeavingServer()
    async with started(server) as engine:
        await server.down()
        asking = asyncio.create_task(engine.chat(REQUEST, Sampling()))
        await asyncio.sleep(5)
        assert not asking.done(), "longer than the patience at the start"
        await server.up()
        assert (await asyncio.wait_for(asking, 60)).response_ids.tolist() == [5, 6]


async def test_a_call_waits_for_an_engine_that_says_it_has_died() -> None:
    server = LeavingServer()
    async with started(server) as engine:
        server.die_on_the_next = True
        assert (await engine.chat(REQUEST, Sampling())).response_ids.tolist() == [5, 6]


async def test_patience_has_an_end() -> None:
    server = LeavingServer()
    async with started(server, patience_seconds=0.5) as engine:
        await server.down()
        with pytest.raises(EngineError, match="cannot be reached"):
            await asyncio.wait_for(engine.chat(REQUEST, Sampling()), 60)
        await server.up()


@pytest.mark.skipif(not TCP.exists(), reason="the timers of connections are told by Linux")
async def test_a_silent_host_is_asked_whether_it_lives() -> None:
    """Guards against calls that hang where their server's host is gone: only the system's own questions notice that."""
    server = AskedServer()
    async with started(server) as engine:
        await engine.chat(REQUEST, Sampling())
    kind, ticks = server.timer.split(":")
    assert kind == "02", "the timer of the questions runs"
    assert int(ticks, 16) / os.sysconf("SC_CLK_TCK") <= http.SILENCE["TCP_KEEPIDLE"]


async def test_the_end_of_a_session_ends_the_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()

    without_templates(monkeypatch)
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.5)
    server = LeavingServer()
    async with started(server) as engine, Node(engine, cache=tmp_path / "cache") as node:
        await server.down()
        episode = await node.rollout(task(agent=asking(), timeout_seconds=6))
        await server.up()
    assert episode.session.truncated_by == "time"
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "engine_error", "the engine was still away"
    assert episode.trajectory.fidelity.calls == 1


async def test_a_session_goes_on_where_its_server_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call names the server that answered, and the version of that server's weights."""

    without_templates(monkeypatch)
    servers = LeavingServer(), LeavingServer()
    for each in servers:
        await each.up()
    engine = ENGINE(VllmOptions(url=[each.url for each in servers]))
    async with Node(engine, cache=tmp_path / "cache") as node, node.session(task()) as life:
        node.set_weight_version("1")
        node.set_weight_version("2", servers[1].url)
        life.capture.running = True
        sdk = openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key=life.capture.key, max_retries=0)
        for call in range(4):
            if call == 2:
                await servers[0].down()
            await sdk.chat.completions.create(model="policy", messages=[*ASK, {"role": "user", "content": str(call)}])
        calls = life.capture.calls
    assert [call.engine_url for call in calls] == [servers[0].url] * 2 + [servers[1].url] * 2
    assert [[span.version for span in call.weight_versions] for call in calls] == [["1"], ["1"], ["2"], ["2"]]
    assert [call.outcome for call in calls] == ["delivered"] * 4, "no call was lost"
    assert {chat["headers"].get("X-Session-ID") for chat in servers[1].chats} == {None, life.session.session_id}
    await servers[1].down()


async def test_a_call_that_ends_before_its_plan_names_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a reward of 0 where a frozen server took the session's time to template: without a name, any
    healthy server's answer counted for it."""
    without_templates(monkeypatch)
    servers, asked = (LeavingServer(), LeavingServer()), asyncio.Event()

    async def frozen(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    for each in servers:
        await each.up()
    engine = ENGINE(VllmOptions(url=[each.url for each in servers]))
    async with Node(engine, cache=tmp_path / "cache") as node, node.session(task()) as life:
        life.capture.running = True
        sdk = openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key=life.capture.key, max_retries=0)
        said = await sdk.chat.completions.create(model="policy", messages=ASK)
        monkeypatch.setattr(engine.replicas[0].engine, "template", frozen)
        turn = {"role": "assistant", "content": said.choices[0].message.content}
        more = [*ASK, turn, {"role": "user", "content": "And now?"}]
        call = asyncio.create_task(sdk.chat.completions.create(model="policy", messages=more))  # pyright: ignore
        await asyncio.wait_for(asked.wait(), 60)
        await life.capture.end()
        await asyncio.wait({call})
        assert [each.engine_url for each in life.capture.calls] == [servers[0].url] * 2
        assert life.capture.calls[1].outcome == "abandoned"
    for each in servers:
        await each.down()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for an engine at the start follow at once; this one has no templates."""

    without_templates(monkeypatch)
    monkeypatch.setattr(http, "START_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(process, "ENGINE_AGAIN_SECONDS", 0.1)


def a_node(tmp_path: Path, engine: LeavingServer, **settings: Any) -> AbstractAsyncContextManager[process.Gateway]:
    config = load_config(settings={"engine": {"name": "vllm", "url": engine.url}, "runtime": "bubblewrap"})
    own = gateway_settings({"listen": "127.0.0.1:0", "state": tmp_path / "state", **settings})
    return process.serving(config, own, None)


SERVER = {"server": "http://127.0.0.1:9"}


@pytest.mark.usefixtures("hasty")
async def test_a_node_with_a_server_waits_for_its_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against nodes that end because they were started before their engine."""
    engine = LeavingServer()
    await engine.up()
    await engine.down()
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(process, "FAREWELL_SECONDS", 0.1)
        starting = asyncio.create_task(stack.enter_async_context(a_node(tmp_path, engine, **SERVER)))
        async with asyncio.timeout(60):
            while "waiting up to 600 s for the engine: vLLM at" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        assert not starting.done()
        await engine.up()
        gateway = await asyncio.wait_for(starting, 60)
        assert gateway.service.node.engine.info.name == "vllm"
    assert caplog.text.count("waiting up to") == 1
    await engine.down()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("settings", [{}, {**SERVER, "engine_wait_seconds": 0.5}])
async def test_a_node_does_not_wait_for_ever_and_without_a_server_not_at_all(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    engine = LeavingServer()
    await engine.up()
    await engine.down()
    with pytest.raises(EngineError, match="cannot be reached"):
        async with asyncio.timeout(30), a_node(tmp_path, engine, **settings):
            pass


@pytest.mark.usefixtures("hasty")
async def test_a_node_that_waits_for_its_engine_can_be_stopped(tmp_path: Path) -> None:
    engine, told = LeavingServer(), asyncio.Event()
    await engine.up()
    await engine.down()
    async with AsyncExitStack() as stack:
        asyncio.get_running_loop().call_later(0.5, told.set)
        entering = process.unless(told, stack.enter_async_context(a_node(tmp_path, engine, **SERVER)))
        assert await asyncio.wait_for(entering, 30) is None
    await engine.up()
    async with a_node(tmp_path, engine):
        """Nothing of the first is in its way."""
    await engine.down()


class Slow(EmbeddedEngine):
    def __init__(self, fails: bool = False) -> None:
        super().__init__(EmbeddedOptions(scripts=[Script(commands=[], final_message="All done.")]))
        self.go_on, self.fails = asyncio.Event(), fails

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: Any = None) -> Any:
        await self.go_on.wait()
        if self.fails:
            raise EngineError(503, "the engine is gone", kind="overloaded")
        return await super().chat(request, sampling, on_delta)


@asynccontextmanager
async def whole_answer(tmp_path: Path, engine: Slow) -> AsyncIterator[aiohttp.ClientResponse]:
    """An answer that is no stream, once something has come of it."""
    async with Node(engine, cache=tmp_path) as node, node.session(task()) as life:
        life.capture.running = True
        headers = {"Authorization": f"Bearer {life.capture.key}"}
        body = {"model": "policy", "messages": ASK}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{node.url}/v1/chat/completions", json=body, headers=headers) as response,
        ):
            yield response


async def test_a_client_without_a_stream_is_kept_waiting_with_blanks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against clients that give up on headers that do not come while the engine is restarted."""
    monkeypatch.setattr(sending, "HOLD_SECONDS", 0.1)
    monkeypatch.setattr(sending, "KEEP_ALIVE_SECONDS", 0.02)
    engine = Slow()
    async with whole_answer(tmp_path, engine) as response:
        assert await response.content.readexactly(3) == b"   "
        engine.go_on.set()
        completion = await response.json(content_type="application/json")
    assert completion["choices"][0]["message"]["content"] == "All done."


async def test_an_error_after_the_status_line_breaks_a_whole_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "HOLD_SECONDS", 0.1)
    engine = Slow(fails=True)
    async with whole_answer(tmp_path, engine) as response:
        assert await response.content.readexactly(1) == b" "
        engine.go_on.set()
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def test_the_official_client_reads_an_answer_that_begins_with_blanks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "HOLD_SECONDS", 0.1)
    monkeypatch.setattr(sending, "KEEP_ALIVE_SECONDS", 0.02)
    engine = Slow()
    async with Node(engine, cache=tmp_path) as node, node.session(task()) as life:
        life.capture.running = True
        asyncio.get_running_loop().call_later(0.5, engine.go_on.set)
        sdk = openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key=life.capture.key, max_retries=0)
        said = await sdk.chat.completions.create(model="policy", messages=ASK)
    assert said.choices[0].message.content == "All done."
