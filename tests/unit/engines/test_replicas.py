"""Several servers of one policy: which session is where, and what becomes of a server that was away."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, Literal
from unittest.mock import AsyncMock

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.background_loop import cancel_all
from polar_gym.engines import UNREACHABLE, EngineError, http, probe, replicas
from polar_gym.engines.addresses import addresses
from polar_gym.engines.replicas import Replicas, Seated
from polar_gym.engines.vllm import ENGINE, VllmOptions
from polar_gym.schema import Sampling
from tests.support.vllm_stand_in import REQUEST, LeavingServer, SickServer, answer, streamed

RPC = "/collective_rpc"
"""The route of the order to read weights."""


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "FIRST_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(replicas, "LONGEST_WAIT_SECONDS", 0.1)


class TroubledServer(LeavingServer):
    """A server that refuses a request once, or keeps its answer back."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals: dict[str, web.Response] = {}
        """Path -> the answer to the next request."""
        self.held: dict[str, asyncio.Event] = {}
        """Path -> the event that the next request waits for."""

    async def _models(self, request: web.Request) -> web.Response:
        if request.path in self.refusals:
            return self.refusals.pop(request.path)
        return await super()._models(request)

    async def _order(self, request: web.Request) -> web.Response:
        said = await super()._order(request)
        if (held := self.held.pop(request.path, None)) is not None:
            await held.wait()
        return self.refusals.pop(request.path, said)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if (held := self.held.pop(request.path, None)) is None:
            return await super()._chat(request)
        whole = streamed(answer([5, 6], 2)).body
        assert isinstance(whole, bytes)
        first, rest = whole.split(b"\n\n", 1)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(first + b"\n\n")
        self.asked.set()
        await held.wait()
        await response.write(rest)
        return response

    @property
    def read(self) -> list[str]:
        """The directories whose weights it was told to read."""
        return [body["kwargs"]["weights_path"] for path, body in self.orders if path == RPC]


@asynccontextmanager
async def started(*servers: LeavingServer, **options: Any) -> AsyncIterator[Replicas]:
    async with AsyncExitStack() as stack:
        for each in servers:
            await each.up()
            stack.push_async_callback(each.down)
        engine = ENGINE(VllmOptions(url=[each.url for each in servers], **options))
        await engine.start()
        stack.push_async_callback(engine.close)
        for each in servers:
            each.chats.clear()
        yield engine


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def places(engine: Replicas, sessions: Sequence[str]) -> list[int]:
    engines = [each.engine for each in engine.replicas]
    return [engines.index(engine.of(session)) for session in sessions]  # pyright: ignore[reportArgumentType]


async def leave(engine: Replicas, server: LeavingServer, number: int) -> None:
    """Take a server away, and have the engine notice."""
    await server.down()
    with pytest.raises(EngineError) as raised:
        await engine.replicas[number].engine.chat(REQUEST, Sampling())
    assert await engine.moved(engine.replicas[number].engine, raised.value)


async def test_sessions_spread_and_stay() -> None:
    async with started(LeavingServer(), LeavingServer()) as engine:
        assert places(engine, "abab") == [0, 1, 0, 1]
        engine.note("a", 900)
        engine.note("b", 100)
        assert places(engine, "cd") == [1, 1], "until one has as much to do as the other"
        engine.release("a")
        assert places(engine, "ebcd") == [0, 1, 1, 1]
        assert places(engine, "f") == [0], "a session is expected to need what the one that ended needed"


async def test_a_session_is_templated_by_its_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one slow server that holds up the sessions of all: any of them asked the one with the least load,
    and each of these requests looped over all sessions."""
    async with started(LeavingServer(), LeavingServer()) as engine:
        assert places(engine, "ab") == [0, 1]
        for place, each in enumerate(engine.replicas):
            monkeypatch.setattr(each.engine, "decode", AsyncMock(return_value=str(place)))
        assert [await Seated(engine, session).decode([1]) for session in "abba"] == ["0", "1", "1", "0"]


@given(st.lists(st.tuples(st.sampled_from(["begin", "note", "end"]), st.integers(0, 9), st.integers(1, 9999))))
def test_a_new_session_goes_where_the_load_is_least(events: list[tuple[str, int, int]]) -> None:
    engine = ENGINE(VllmOptions(url=[f"http://127.0.0.1:{port}" for port in (1, 2, 3)]))
    seats: dict[str, int] = {}
    tokens: dict[str, float] = {}
    ended: list[float] = []
    for what, number, count in events:
        session = str(number)
        if what == "begin":
            expected = sum(ended) / len(ended) if ended else 1.0
            loads = [sum(max(tokens[s], expected) for s, seat in seats.items() if seat == place) for place in range(3)]
            (place,) = places(engine, [session])
            assert place == seats.get(session, loads.index(min(loads))), "a session that has a place keeps it"
            seats[session] = place
            tokens.setdefault(session, 0.0)
        elif session in seats and what == "note":
            engine.note(session, count)
            tokens[session] = max(tokens[session], count)
        elif session in seats:
            engine.release(session)
            ended.append(tokens.pop(session))
            del seats[session]


async def test_calls_name_their_session_to_routers_and_ranks() -> None:
    server = LeavingServer()
    async with started(server, data_parallel_size=4, session_header="x-user-id") as engine:
        for session in "aab":
            await engine.chat(replace(REQUEST, session_id=session), Sampling())
        await engine.chat(REQUEST, Sampling())
        headers = [chat["headers"] for chat in server.chats]
    assert [each.get("x-user-id") for each in headers] == ["a", "a", "b", None]
    ranks = [each.get("X-data-parallel-rank") for each in headers]
    assert ranks[0] == ranks[1] is not None
    assert {int(rank) for rank in ranks[:3]} <= {0, 1, 2, 3}
    assert ranks[3] is None


async def test_a_server_that_goes_hands_its_sessions_over_and_is_taken_back() -> None:
    servers = LeavingServer(), LeavingServer()
    async with started(*servers) as engine:
        assert places(engine, "abcd") == [0, 1, 0, 1]
        await leave(engine, servers[0], 0)
        assert places(engine, "abcd") == [1] * 4
        assert (await engine.chat(REQUEST, Sampling())).response_ids.tolist() == [5, 6]
        await servers[0].up()
        await until(lambda: engine.replicas[0].up)
        assert places(engine, "abcd") == [1] * 4, "their tokens are cached there now"
        assert places(engine, "ef") == [0, 0]


@pytest.mark.parametrize("how", ["at once", "in the middle"])
async def test_a_server_that_fails_all_calls_is_away_until_it_samples(how: Literal["at once", "in the middle"]) -> None:
    """Guards against a server that draws all new sessions because it fails them soonest."""
    servers = SickServer(how), LeavingServer()
    async with started(*servers) as engine:
        assert places(engine, "abcd") == [0, 1, 0, 1]
        servers[0].healthy_calls = 0
        with pytest.raises(EngineError, match="CUDA error") as raised:
            await engine.replicas[0].engine.chat(REQUEST, Sampling())
        assert await engine.moved(engine.replicas[0].engine, raised.value, Sampling())
        assert places(engine, "abcde") == [1] * 5
        failed = servers[0].failed
        await until(lambda: servers[0].failed > failed + 1)
        assert not engine.replicas[0].up
        servers[0].healthy_calls = inf
        await until(lambda: engine.replicas[0].up)
        assert places(engine, "abcdef") == [1] * 5 + [0]


async def test_requests_that_fail_on_a_healthy_server_take_no_server_away() -> None:
    """The server is asked for one token, and once for all calls that fail together."""
    servers = LeavingServer(), LeavingServer()
    async with started(*servers) as engine:
        failed = EngineError(502, "the grammar cannot be compiled", kind="server")
        asked = engine.replicas[0].engine
        assert not any(await asyncio.gather(*(engine.moved(asked, failed, Sampling()) for _ in range(9))))
        assert [each.up for each in engine.replicas] == [True, True]
        assert [chat["max_tokens"] for chat in servers[0].chats] == [1]
        assert servers[1].chats == []


async def test_where_no_server_is_left_calls_wait_for_the_first_that_is_back() -> None:
    servers = LeavingServer(), LeavingServer()
    async with started(*servers) as engine:
        for each in servers:
            await each.down()
        asking = asyncio.create_task(engine.chat(REQUEST, Sampling()))
        await until(lambda: not any(each.up for each in engine.replicas))
        await servers[1].up()
        assert (await asyncio.wait_for(asking, 60)).response_ids.tolist() == [5, 6]
        await servers[0].up()


async def test_patience_with_all_servers_has_an_end() -> None:
    servers = LeavingServer(), LeavingServer()
    async with started(*servers, patience_seconds=0.2) as engine:
        for each in servers:
            await each.down()
        with pytest.raises(EngineError, match="cannot be reached"):
            await asyncio.wait_for(engine.chat(REQUEST, Sampling()), 60)
        for each in servers:
            await each.up()


@pytest.mark.parametrize("began", [1.0, 2.0, None])
async def test_a_server_that_began_anew_has_no_version_until_a_trainer_names_its_weights(began: float | None) -> None:
    """Guards against tokens of the initial weights under the name of trained ones."""
    servers = LeavingServer(), LeavingServer()
    async with started(*servers) as engine:
        engine.weight_version = "1"
        await leave(engine, servers[0], 0)
        servers[0].began = began
        await servers[0].up()
        if began != 1.0:
            await until(lambda: not engine.replicas[0].named.is_set())
            engine.weight_version = "1"  # as in each heartbeat
            await asyncio.sleep(0.2)
            assert not engine.replicas[0].up
            assert engine.versions == {servers[0].url: None, servers[1].url: "1"}
            engine.name_weights("1", servers[0].url)
        await until(lambda: engine.replicas[0].up)
        assert engine.versions == dict.fromkeys((each.url for each in servers), "1")


@pytest.mark.parametrize("began", [1.0, 2.0])
async def test_a_server_that_missed_an_update_gets_the_weights_before_it_is_taken_back(
    tmp_path: Path, began: float
) -> None:
    servers = LeavingServer(), LeavingServer()
    async with started(*servers) as engine:
        await leave(engine, servers[0], 0)
        await engine.set_weights(tmp_path, "2")
        assert engine.versions == {servers[0].url: None, servers[1].url: "2"}
        servers[0].began = began
        await servers[0].up()
        await until(lambda: engine.replicas[0].up)
        assert engine.versions[servers[0].url] == "2"
        assert Counter(path for path, _ in servers[0].orders) == Counter(path for path, _ in servers[1].orders)
        assert {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}} in [
            body for _, body in servers[0].orders
        ]


async def test_a_single_server_that_began_anew_gets_the_weights_before_it_is_asked(tmp_path: Path) -> None:
    """Guards against tokens of the initial weights under the name of trained ones: calls waited for the server, and
    went on without a look at its weights."""
    server = TroubledServer()
    async with started(server) as engine:
        await engine.set_weights(tmp_path, "1")
        server.held[RPC] = release = asyncio.Event()
        server.began = 2.0
        await server.down()
        asking = asyncio.create_task(engine.chat(REQUEST, Sampling()))
        await until(lambda: not engine.replicas[0].up)
        await server.up()
        await until(lambda: len(server.read) == 2)
        later = asyncio.create_task(engine.chat(REQUEST, Sampling()))
        await asyncio.sleep(0.2)
        assert not asking.done()
        assert not later.done(), "nor is a call that came later"
        release.set()
        for each in (asking, later):
            assert (await asyncio.wait_for(each, 60)).response_ids.tolist() == [5, 6]
        assert engine.versions == {server.url: "1"}


async def test_a_single_server_is_not_taken_back_with_another_model(caplog: pytest.LogCaptureFixture) -> None:
    server = LeavingServer()
    async with started(server, patience_seconds=0.2) as engine:
        await server.down()
        server.model, server.began = "other", 2.0
        with pytest.raises(EngineError, match="cannot be reached"):
            await engine.chat(REQUEST, Sampling())
        await server.up()
        await until(lambda: "is not taken back yet: engine.url: " in caplog.text)
        with pytest.raises(EngineError, match="cannot be reached, or began anew"):
            await engine.chat(REQUEST, Sampling())
        assert engine.info.model == "m"


async def test_a_single_server_without_metrics_goes_on_with_the_weights_that_it_loaded_itself() -> None:
    """Guards against a run that stops for ever after one refused connection."""
    server = LeavingServer()
    server.began = None
    async with started(server) as engine:
        engine.weight_version = "1"
        await server.down()
        asking = asyncio.create_task(engine.chat(REQUEST, Sampling()))
        await until(lambda: not engine.replicas[0].up)
        await server.up()
        assert (await asyncio.wait_for(asking, 60)).response_ids.tolist() == [5, 6]
        assert engine.versions == {server.url: "1"}


async def test_metrics_may_be_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forbidden(*_: Any) -> web.Response:
        return web.Response(status=403)

    monkeypatch.setattr(LeavingServer, "_metrics", forbidden)
    async with started(LeavingServer()) as engine:
        assert engine.replicas[0].began is None


async def test_weights_that_come_while_a_server_is_updated_reach_it_before_it_is_taken_back(tmp_path: Path) -> None:
    """Guards against tokens of the last but one weights: an update came while a server that was back read older ones,
    and passed it by because it was not up."""
    servers = TroubledServer(), TroubledServer()
    async with started(*servers) as engine:
        await engine.set_weights(tmp_path / "1", "1")
        await leave(engine, servers[0], 0)
        servers[0].began = 2.0
        servers[0].held[RPC] = release = asyncio.Event()
        await servers[0].up()
        await until(lambda: len(servers[0].read) == 2)
        await engine.set_weights(tmp_path / "2", "2")
        release.set()
        await until(lambda: engine.replicas[0].up)
        assert engine.versions == dict.fromkeys((each.url for each in servers), "2")
        assert servers[0].read == [str(tmp_path / version) for version in "112"]


async def test_a_server_whose_update_failed_once_is_updated_again(tmp_path: Path) -> None:
    """Guards against the loss of a server: it began anew, its update failed, and it then had its old version's name, so
    that the update was not repeated."""
    servers = TroubledServer(), TroubledServer()
    async with started(*servers) as engine:
        await engine.set_weights(tmp_path, "1")
        await leave(engine, servers[0], 0)
        servers[0].began = 2.0
        servers[0].refusals[RPC] = web.Response(status=500)
        await servers[0].up()
        await until(lambda: engine.replicas[0].up)
        assert servers[0].read == [str(tmp_path)] * 3


async def test_a_server_that_waits_for_its_name_takes_weights_instead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a server that waits for ever, because `set_weights` did not wake it."""
    servers = TroubledServer(), TroubledServer()
    async with started(*servers) as engine:
        engine.weight_version = "1"
        await leave(engine, servers[0], 0)
        servers[0].began = 2.0
        await servers[0].up()
        await until(lambda: f"{servers[0].url} is back with unknown weights" in caplog.text)
        await engine.set_weights(tmp_path, "2")
        await until(lambda: engine.replicas[0].up)
        assert servers[0].read == [str(tmp_path)]


@pytest.mark.parametrize("refusal", [{"status": 500}, {"text": "{}"}])
async def test_a_server_whose_start_failed_once_is_started_again(
    caplog: pytest.LogCaptureFixture, refusal: dict[str, Any]
) -> None:
    """Guards against the loss of a server, and calls that raise AssertionError: a failed start left no HTTP session,
    and the next error ended the task that waits for the server."""
    servers = TroubledServer(), TroubledServer()
    async with started(*servers) as engine:
        await leave(engine, servers[0], 0)
        servers[0].began = 2.0
        servers[0].refusals["/v1/models"] = web.Response(**refusal)
        await servers[0].up()
        await until(lambda: engine.replicas[0].up)
        await leave(engine, servers[1], 1)
        assert (await engine.chat(REQUEST, Sampling())).response_ids.tolist() == [5, 6]
        assert f"{servers[0].url} is not taken back yet" in caplog.text
        await servers[1].up()


async def test_an_answer_under_way_ends_whole_though_its_server_seems_to_have_begun_anew() -> None:
    """Guards against answers that hang: another call's connection failed once, the server does not tell when it began,
    and the HTTP session was closed while answers came over it."""
    servers = TroubledServer(), TroubledServer()
    servers[0].began = None
    async with started(*servers) as engine:
        servers[0].asked.clear()
        servers[0].held["/v1/chat/completions"] = release = asyncio.Event()
        asking = asyncio.create_task(engine.replicas[0].engine.chat(REQUEST, Sampling()))
        await servers[0].asked.wait()
        failed = EngineError(503, "cannot be reached (Temporary failure in name resolution)", kind=UNREACHABLE)
        assert await engine.moved(engine.replicas[0].engine, failed)
        await until(lambda: engine.replicas[0].up)
        release.set()
        assert (await asyncio.wait_for(asking, 60)).response_ids.tolist() == [5, 6]


async def test_a_version_may_be_that_of_one_server() -> None:
    servers = LeavingServer(), LeavingServer()
    async with started(*servers) as engine:
        engine.weight_version = "1"
        engine.name_weights("2", servers[1].url)
        assert engine.versions == {servers[0].url: "1", servers[1].url: "2"}
        engine.name_weights("3", f"{servers[0].url}/v1/")
        assert engine.versions == {servers[0].url: "3", servers[1].url: "2"}
        engine.weight_version = "1"
        assert set(engine.versions.values()) == {"1"}, "an order for all holds, although it repeats their version"
        engine.weight_version = "2"
        assert set(engine.versions.values()) == {"2"}


async def salt(engine: Replicas, server: LeavingServer) -> str | None:
    """Return the salt of a call's prefix cache."""
    await engine.replicas[0].engine.chat(REQUEST, Sampling())
    return server.chats[-1].get("cache_salt")


@pytest.mark.parametrize("says", [b'{"success":true}', b'{"success":false}', b""])
async def test_a_salt_is_new_where_caches_may_hold_other_weights(says: bytes, tmp_path: Path) -> None:
    """Guards against prefixes of other weights, also where a name of weights is used again, and against a new salt
    where the caches are empty: it would keep calls from what the calls in flight at the update computed anew."""
    server = LeavingServer()
    server.says_of_caches = says
    async with started(server) as engine:
        salts = [await salt(engine, server)]
        for version in ("1", "2"):
            await engine.set_weights(tmp_path, version)
            engine.name_weights(version)
            salts.append(await salt(engine, server))
        different = 1 if says == b'{"success":true}' else 3
        assert len(set(salts)) == different
        for version in ("3", "1", "1"):  # by a trainer that loads weights itself, and begins again
            engine.name_weights(version)
            engine.name_weights(version, server.url)
            salts.append(await salt(engine, server))
    assert len(set(salts)) == different + 2
    assert salts[-1] == salts[-2], "nothing has changed"


async def test_a_call_that_waited_for_a_busy_server_has_the_salt_of_now() -> None:
    """Guards against prefixes of the weights before an update, during which a server had no room for the call."""

    class Busy(LeavingServer):
        busy = False

        async def _chat(self, request: web.Request) -> web.StreamResponse:
            said = await super()._chat(request)
            return web.json_response({"error": {"message": "busy"}}, status=503) if self.busy else said

    server = Busy()
    async with started(server) as engine:
        engine.weight_version, server.busy = "1", True
        waiting = asyncio.create_task(engine.chat(REQUEST, Sampling()))
        await until(lambda: bool(server.chats))
        before = server.chats[0]["cache_salt"]
        engine.weight_version, server.busy = "2", False
        await waiting
        assert server.chats[-1]["cache_salt"] != before
        assert await salt(engine, server) == server.chats[-2]["cache_salt"]


async def test_gateways_of_one_server_have_different_salts() -> None:
    """Guards against prefixes of the weights that a gateway before this one had: a trainer that starts again gives its
    versions the same names, and names none before its first update."""
    server, salts = LeavingServer(), list[str | None]()
    async with started(server) as first, AsyncExitStack() as stack:
        second = ENGINE(VllmOptions(url=server.url))
        await second.start()
        stack.push_async_callback(second.close)
        for engine in (first, second):
            salts.append(await salt(engine, server))
            engine.name_weights("step-1")
            salts.append(await salt(engine, server))
    assert len(set(salts)) == 4


@pytest.mark.parametrize("fails", [RPC, "/reset_prefix_cache", "/update_weight_version"])
async def test_after_an_update_that_failed_the_weights_have_no_old_name(fails: str, tmp_path: Path) -> None:
    """Guards against tokens of new weights under the name of the old ones, from prefixes of the old ones: vLLM had read
    the new weights when the update failed, and was asked to go on."""
    server = TroubledServer()
    server.says_of_caches = b'{"success":true}'
    async with started(server) as engine:
        await engine.set_weights(tmp_path, "1")
        before = await salt(engine, server)
        server.refusals[fails] = web.Response(status=500, text="out of memory")
        with pytest.raises(EngineError, match="out of memory"):
            await engine.set_weights(tmp_path, "2")
        assert server.orders[-1][0] == "/resume"
        assert engine.of("s").weight_version == "unknown (the update to 2 failed)"
        assert await salt(engine, server) != before
        await engine.set_weights(tmp_path, "2")
        assert engine.of("s").weight_version == "2"


@pytest.mark.parametrize("fails", ["/pause", RPC])
async def test_an_update_that_was_refused_is_not_repeated(fails: str, tmp_path: Path) -> None:
    """Guards against a healthy server that stayed away after its connection had failed once: it was given the weights
    that it had refused, again and again, or hours later, without the trainer."""
    server = TroubledServer()
    async with started(server) as engine:
        await engine.set_weights(tmp_path / "1", "1")
        server.refusals[fails] = web.Response(status=400, text="no such file")
        with pytest.raises(EngineError, match="no such file"):
            await engine.set_weights(tmp_path / "2", "2")
        told = "1" if fails == "/pause" else "unknown (the update to 2 failed)"
        assert engine.weight_version == engine.of("s").weight_version == told
        read = list(server.read)
        await server.down()
        back = asyncio.create_task(engine.chat(REQUEST, Sampling()))
        await until(lambda: not engine.replicas[0].up)
        await server.up()
        await back
        assert server.read == read


async def test_a_server_that_waited_for_its_name_waits_again_where_the_update_fails(tmp_path: Path) -> None:
    """Guards against tokens of unknown weights under a trainer's version."""
    servers = TroubledServer(), TroubledServer()
    async with started(*servers) as engine:
        engine.weight_version = "1"
        await leave(engine, servers[0], 0)
        servers[0].began = 2.0
        await servers[0].up()
        await until(lambda: not engine.replicas[0].named.is_set())
        servers[0].refusals[RPC] = web.Response(status=400, text="no such file")
        servers[1].refusals["/pause"] = web.Response(status=400, text="no such file")
        with pytest.raises(EngineError, match="no such file"):
            await engine.set_weights(tmp_path, "2")
        assert not engine.replicas[0].named.is_set()
        assert not engine.replicas[0].up
        engine.weight_version = "3"
        await until(lambda: engine.replicas[0].up)


async def test_a_server_that_gets_refused_weights_meanwhile_waits_for_its_name(tmp_path: Path) -> None:
    """Guards against a server that comes back with weights which another one has refused: its update was under way."""
    first, second = servers = TroubledServer(), TroubledServer()
    async with started(*servers) as engine:
        await engine.set_weights(tmp_path / "1", "1")
        await leave(engine, second, 1)
        second.began = 2.0
        loads, pause = asyncio.Event(), asyncio.Event()
        second.held[RPC], first.held["/pause"] = loads, pause
        first.refusals["/pause"] = web.Response(status=400, text="no such file")
        update = asyncio.create_task(engine.set_weights(tmp_path / "2", "2"))
        await second.up()
        await until(lambda: engine.replicas[1].updating)
        pause.set()
        with pytest.raises(EngineError, match="no such file"):
            await update
        loads.set()
        await until(lambda: not engine.replicas[1].updating)
        assert not engine.replicas[1].named.is_set()
        assert not engine.replicas[1].up
        engine.weight_version = "3"
        await until(lambda: engine.replicas[1].up)


async def test_a_server_that_is_away_tells_why(tmp_path: Path) -> None:
    """Guards against hours of looking for a server that cannot be reached, where it lacks the weights' directory."""

    class Forgetful(TroubledServer):
        async def _order(self, request: web.Request) -> web.Response:
            said = await super()._order(request)
            return web.Response(status=400, text="no such file") if request.path == RPC and self.began == 2.0 else said

    server = Forgetful()
    async with started(server, patience_seconds=0.5) as engine:
        await engine.set_weights(tmp_path, "1")
        await server.down()
        server.began = 2.0
        with pytest.raises(EngineError):
            await engine.chat(REQUEST, Sampling())
        await server.up()
        await until(lambda: "no such file" in engine.replicas[0].problem)
        with pytest.raises(EngineError, match=r"cannot be reached, or .*; the last try: .*no such file"):
            await engine.chat(REQUEST, Sampling())


async def test_a_server_that_never_answers_one_request_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the loss of a server: while it was restarted, its host took the connection for `/metrics`, and
    neither answered nor closed it."""
    servers = LeavingServer(), LeavingServer()
    async with started(*servers) as engine:
        monkeypatch.setattr(http, "SMALL_SECONDS", 1.0)
        await leave(engine, servers[0], 0)
        with socket.create_server(("127.0.0.1", servers[0].port)) as listening:
            listening.setblocking(False)
            async with asyncio.timeout(60):
                silent, _ = await asyncio.get_running_loop().sock_accept(listening)
        with silent:
            await servers[0].up()
            await until(lambda: engine.replicas[0].up)


async def hold_an_update(
    engine: Replicas, server: TroubledServer, weights: Path, group: asyncio.TaskGroup, release: asyncio.Event
) -> None:
    """Begin an update in a group, which stays with the server until it is released."""
    server.held[RPC] = release
    group.create_task(engine.set_weights(weights, "1"))
    await until(lambda: RPC not in server.held)


@pytest.mark.parametrize("meanwhile", ["nothing", "a part of another answer", "new weights"])
async def test_a_server_that_is_silent_while_it_is_busy_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """Guards against a server that is taken from all sessions because a long queue or an update kept one token back."""
    monkeypatch.setattr(probe, "PROBE_SECONDS", 3.0)
    servers = TroubledServer(), LeavingServer()
    release = asyncio.Event()
    async with started(*servers) as engine:
        busy = servers[0]
        assert places(engine, "s") == [0]
        async with asyncio.TaskGroup() as updating:
            if meanwhile == "new weights":
                await hold_an_update(engine, busy, tmp_path, updating, release)
            busy.asked.clear()
            busy.held["/v1/chat/completions"] = release
            asking = asyncio.create_task(engine.answers(busy.url, Sampling()))
            await busy.asked.wait()
            if meanwhile == "a part of another answer":
                engine.heard("s")
            stays = meanwhile != "nothing"
            assert (await asyncio.wait_for(asking, 60), engine.replicas[0].up) == (stays, stays)
            release.set()


@pytest.mark.parametrize("meanwhile", ["a queue", "a part of another answer", "new weights"])
async def test_a_failed_answer_takes_no_server_away_that_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """Guards against the loss of all sessions: one answer fails, and the one token that is asked then waits in a queue.
    Of several servers, one that is silent is away."""
    monkeypatch.setattr(probe, "PROBE_SECONDS", 3.0)
    busy, release = TroubledServer(), asyncio.Event()
    servers = (busy,) if meanwhile == "a queue" else (busy, LeavingServer())
    failed = EngineError(502, "the tool parser failed", kind="server")
    async with started(*servers) as engine:
        assert places(engine, "s") == [0]
        async with asyncio.TaskGroup() as updating:
            if meanwhile == "new weights":
                await hold_an_update(engine, busy, tmp_path, updating, release)
                assert engine.weight_version == "1"
                assert engine.of("s").weight_version is None, "no server has the new weights yet"
            busy.asked.clear()
            busy.held["/v1/chat/completions"] = release
            asking = asyncio.create_task(engine.lost(engine.replicas[0].engine, failed, Sampling()))
            await busy.asked.wait()
            if meanwhile == "a part of another answer":
                engine.heard("s")
            assert not await asyncio.wait_for(asking, 60)
            assert engine.replicas[0].up
            release.set()


async def test_an_order_to_read_weights_has_an_end_and_leaves_no_server_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = asyncio.Event()

    class Stuck(LeavingServer):
        async def _order(self, request: web.Request) -> web.Response:
            if request.path == RPC:
                await release.wait()
            return await super()._order(request)

    server = Stuck()
    async with started(server, patience_seconds=0) as engine:
        monkeypatch.setattr(http, "LONG_SECONDS", 1.0)
        try:
            with pytest.raises(EngineError, match="did not answer within 1 s"):
                await asyncio.wait_for(engine.set_weights(tmp_path, "1"), 60)
        finally:
            release.set()
        assert "/resume" in [path for path, _ in server.orders]


async def test_a_server_whose_pause_was_cancelled_goes_on(tmp_path: Path) -> None:
    """Guards against a vLLM that holds its calls for ever: it was paused, and nobody was left to read the answer."""
    server, release = TroubledServer(), asyncio.Event()
    async with started(server) as engine:
        server.held["/pause"] = release
        updating = asyncio.create_task(engine.set_weights(tmp_path, "1"))
        await until(lambda: "/pause" not in server.held)
        await cancel_all([updating])
        release.set()
        assert [path for path, _ in server.orders] == ["/pause", "/resume"]


@pytest.mark.parametrize(("status", "orders"), [(500, ["/pause", "/resume"]), (404, ["/pause"])])
async def test_a_server_that_may_be_paused_goes_on(tmp_path: Path, status: int, orders: list[str]) -> None:
    """Guards against a vLLM that holds its calls for ever: it was paused, and the answer was an error or lost."""
    server = TroubledServer()
    async with started(server) as engine:
        server.refusals["/pause"] = web.Response(status=status, text="no answer")
        with pytest.raises(EngineError, match="no answer" if status == 500 else "no routes for new weights"):
            await engine.set_weights(tmp_path, "1")
        assert [path for path, _ in server.orders] == orders


async def test_servers_of_a_list_must_be_alike() -> None:
    with pytest.raises(
        EngineError, match=r"engine\.url: http://\S+ has model='n' and http://\S+ had model='m' at first; "
    ):
        async with started(LeavingServer(), LeavingServer("n")):
            pass


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ([], "expected one or more URLs"),
        (["http://a", "http://A/v1"], "each of them once"),
        (["http://a", "b"], "expected a URL, e.g. http://127.0.0.1:8000, not 'b'"),
    ],
)
def test_lists_are_checked(url: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        VllmOptions(url=url)


async def test_each_address_of_a_host_is_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A headless service of Kubernetes has such a name."""

    async def lookup(host: str, port: int, **_: Any) -> list[Any]:
        found = {"policy": ["127.0.0.1", "127.0.0.2"], "::": ["::1"]}.get(host, [host])
        six = [(socket.AF_INET6, 0, 0, "", ("::1", port, 0, 0))]
        return six + [(socket.AF_INET, 0, 0, "", (address, port)) for address in found]

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "getaddrinfo", lookup)
    assert await addresses("http://policy:8000/v1") == ["http://127.0.0.1:8000/v1", "http://127.0.0.2:8000/v1"]
    assert await addresses("http://other:8000") == ["http://other:8000"]
    assert await addresses("https://policy:8000") == ["https://policy:8000"]
