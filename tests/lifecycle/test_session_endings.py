"""Whatever ends a session, at whatever stage: every call is counted, and nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polar_gym.chat import ChatRequest, Completion, OnDelta
from polar_gym.engines import EngineError
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.errors import ConfigError
from polar_gym.evaluators import EvaluationContext, ToolAnswer
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.node.state import Key
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.registry import Options
from polar_gym.runtimes import Runtime, Sandbox, SandboxError, SandboxRequest
from polar_gym.runtimes.bubblewrap import Bubblewrap
from polar_gym.schema import (
    Budget,
    BuilderSpec,
    EvaluationResult,
    EvaluatorSpec,
    HarnessSpec,
    PluginSpec,
    RuntimeSpec,
    Sampling,
    Session,
    StartFrom,
    Status,
)
from tests.lifecycle.nodes import node_here, order
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking, node, task


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    need_bubblewrap()


async def test_a_call_in_flight_when_the_time_is_up_is_in_the_fidelity(tmp_path: Path) -> None:
    """Guards against building the trajectory before the calls that the deadline cut off are recorded."""
    async with node(tmp_path, delay_seconds=600) as local:
        episode = await local.rollout(task(timeout_seconds=6))
    assert episode.session.truncated_by == "time"
    (call,) = read_journal(Path(str(episode.artifacts.journal)))
    assert call.outcome == "abandoned"
    assert episode.trajectory.fidelity.calls == 1


class Endless(EmbeddedEngine):
    """Sends a whole answer and does not end it, as a policy in a loop."""

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        await super().chat(request, sampling, on_delta)
        return await asyncio.Event().wait()  # type: ignore[return-value]


async def test_an_answer_that_the_end_of_the_time_cut_is_excluded_as_such(tmp_path: Path) -> None:
    """Guards against a policy in a loop whose tokens look like those of a harness that hung up: the harness is killed,
    which closes the connection, too."""
    engine = Endless(EmbeddedOptions(scripts=[Script(final_message="word " * 20)]))
    async with Node(engine, cache=tmp_path / "cache", state=tmp_path / "state") as local:
        episode = await local.rollout(task(timeout_seconds=20))
    (call,) = read_journal(Path(str(episode.artifacts.journal)))
    assert (episode.session.truncated_by, call.outcome, call.error_kind) == ("time", "abandoned", "time")
    assert episode.trajectory.fidelity.excluded == {"time": len(call.response_ids)}
    assert len(call.response_ids)


async def test_a_client_outside_of_the_sandbox_is_cut_off_with_the_session(tmp_path: Path) -> None:
    """Guards against a call that goes on after its session, and is written to a closed journal."""
    async with node(tmp_path, delay_seconds=60) as local, aiohttp.ClientSession() as http:
        async with local.session(task()) as life:
            life.capture.running = True
            body = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
            headers = {"Authorization": f"Bearer {life.capture.key}"}
            url = f"{local.url}/v1/chat/completions"
            asking = asyncio.create_task(http.post(url, json=body, headers=headers))
            while not life.capture.admitted:  # noqa: ASYNC110 - the request comes in its own time
                await asyncio.sleep(0.01)
        assert [call.outcome for call in life.capture.calls] == ["abandoned"]
        with pytest.raises(aiohttp.ClientError):
            await asyncio.wait_for(asking, 60)


async def test_an_answer_cut_by_the_token_budget_ends_the_session_also_if_the_harness_stops(tmp_path: Path) -> None:
    """Guards against an episode that looks complete although its last answer was cut by the budget."""
    async with node(tmp_path) as local:
        episode = await local.rollout(task(budget=Budget(max_sampled_tokens=5)))
    assert episode.session.truncated_by == "tokens"
    assert episode.trajectory.fidelity.sampled_tokens == 5


class Hiccup(EmbeddedEngine):
    """Fails two of three calls: as a server that starts again, and in the middle of an answer, as one with new weights.
    A request with stop strings is at fault itself."""

    asked = 0

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        self.asked += 1
        if request.stop:
            raise EngineError(400, "no stop strings", kind="invalid_request")
        if self.asked % 3 == 1:
            raise EngineError(503, "it starts again", kind="overloaded")
        completion = await super().chat(request, sampling, on_delta)
        return replace(completion, finish_reason="abort") if self.asked % 3 == 2 else completion


async def test_calls_that_the_engine_failed_are_not_of_the_budget(tmp_path: Path) -> None:
    """Guards against an outage that uses the budget up, and is the agent's failure; the harness tried each call again.
    They are not of a resumed session's budget either, which has one more refusal."""
    rest = """
def tried(times=1000, **more):
    for _ in range(times):
        try:
            return ask(**more)
        except urllib.error.HTTPError as error:
            if error.code == 403:
                sys.exit("the budget is used up")
for call in (1, 2):
    tried(messages=[{"role": "user", "content": str(call)}])
tried(1, stop=["x"])
"""
    engine = Hiccup(EmbeddedOptions(scripts=[Script(final_message="word " * 20)]))
    request = task(agent=asking(rest), budget=Budget(max_calls=3))
    async with Node(engine, cache=tmp_path / "cache", state=tmp_path / "state") as local:
        first = await local.rollout(request)
        start = StartFrom(record=str(Path(str(first.artifacts.journal)).parent), owned=True)
        resumed = await local.rollout(request.model_copy(update={"start_from": start, "budget": Budget(max_calls=4)}))
        spent = await local.rollout(request.model_copy(update={"budget": Budget(max_calls=2)}))
    for episode in (first, resumed):
        assert (episode.session.truncated_by, episode.session.failure) == (None, None)
        assert len(episode.trajectory.delivered) == 2
    assert first.trajectory.fidelity.calls == 7, "four that the engine failed, and one that was at fault"
    assert spent.session.truncated_by == "calls", "the third one counts"


async def test_parallel_calls_share_one_token_budget(tmp_path: Path) -> None:
    """Guards against every call in flight getting the whole of what is left."""
    rest = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    list(pool.map(lambda _: ask(), range(4)))
"""
    async with node(tmp_path, delay_seconds=0.3) as local:
        episode = await local.rollout(task(agent=asking(rest), budget=Budget(max_sampled_tokens=30)))
    assert episode.session.truncated_by == "tokens"
    assert 0 < episode.trajectory.fidelity.sampled_tokens <= 30


@pytest.mark.parametrize(
    "fields",
    [
        {"evaluator": EvaluatorSpec(name="nope")},
        {"evaluator": EvaluatorSpec.model_validate({"name": "session_completion", "wings": 2})},
        {"evaluator": EvaluatorSpec(name="test_on_output")},
        {"builder": BuilderSpec(name="nope")},
        {"builder": BuilderSpec.model_validate({"name": "prefix_merging", "wings": 2})},
        {"runtime": RuntimeSpec(name="nope")},
        {"agent": HarnessSpec(name="nope")},
        {"agent": HarnessSpec(name="command")},
    ],
    ids=str,
)
async def test_a_request_that_cannot_be_carried_out_is_refused_before_anything_starts(
    tmp_path: Path, fields: dict[str, PluginSpec]
) -> None:
    """Guards against an unknown evaluator that is found when the harness has already run, and against open files."""
    async with node(tmp_path) as local:
        before = open_files()
        with pytest.raises(ConfigError):
            local.open_session(task(**fields))
        assert open_files() == before
        assert local.proxy._captures == {}
        assert not (tmp_path / "state").exists()


async def test_queued_sessions_hold_no_files(tmp_path: Path) -> None:
    """Guards against running out of file descriptors: a run begins with thousands of queued sessions."""
    async with node(tmp_path) as local:
        before = open_files()
        lives = [local.open_session(task()) for _ in range(20)]
        assert open_files() == before
        for life in lives:
            await local.close_session(life)


async def test_a_node_without_a_state_directory_keeps_the_last_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an environment or a NeMo Gym server of many days, whose journals fill the temporary directory."""
    engine = EmbeddedEngine(EmbeddedOptions(scripts=[Script(final_message="Done.")]))
    async with Node(engine, cache=tmp_path / "cache") as local:
        monkeypatch.setattr("polar_gym.gateway.node.node.KEEP_BYTES", 0)
        journals = [Path(str((await local.rollout(task())).artifacts.journal)) for _ in range(2)]
        assert [journal.exists() for journal in journals] == [True, True], "no consumer has had the time to read them"
        monkeypatch.setattr("polar_gym.gateway.node.node.KEEP_SECONDS", 0.0)
        journals.append(Path(str((await local.rollout(task())).artifacts.journal)))
        assert [journal.parent.exists() for journal in journals] == [False, False, True]


async def test_a_cancelled_session_says_so(tmp_path: Path) -> None:
    seen: list[Status] = []

    def watch(session: Session) -> None:
        seen.append(session.status)
        if session.status is Status.RUNNING:
            running.set()

    running = asyncio.Event()
    async with node(tmp_path, delay_seconds=60) as local:
        rollout = asyncio.create_task(local.rollout(task(), on_change=watch))
        await running.wait()
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
    assert seen[-1] is Status.CANCELLED


async def test_cancelling_while_a_sandbox_comes_up_leaves_nothing_behind(tmp_path: Path, scratch: Path) -> None:
    """Guards against a thread that goes on copying the workspace after whoever would remove it has gone."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(2000):
        (source / str(number)).touch()
    request = SandboxRequest(session_id="s", spec=RuntimeSpec(name="bubblewrap"), workspace=source)
    starting = asyncio.create_task(Bubblewrap(Bubblewrap.Options()).start(request))
    while not list(scratch.iterdir()):  # noqa: ASYNC110 - a thread makes them
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert list(scratch.iterdir()) == []


class BrokenEvaluator:
    def __init__(self, options: Options) -> None: ...

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        raise ZeroDivisionError("no tests")


class HangingEvaluator(BrokenEvaluator):
    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        await asyncio.sleep(60)
        raise AssertionError


@pytest.mark.parametrize(
    ("evaluator", "says"), [("BrokenEvaluator", "ZeroDivisionError"), ("HangingEvaluator", "not done within 3 seconds")]
)
async def test_an_evaluator_that_breaks_or_hangs_costs_its_own_session_only(
    tmp_path: Path, evaluator: str, says: str
) -> None:
    """Guards against a grader's bug that ends the whole run with a traceback, and against one that never returns."""
    spec = EvaluatorSpec(name=f"{__name__}:{evaluator}", timeout_seconds=0.1)
    async with node(tmp_path) as local:
        episode = await local.rollout(
            task(evaluator=spec, runtime=RuntimeSpec(name="bubblewrap", init_timeout_seconds=2.9))
        )
    assert episode.reward is None
    assert episode.session.failure is not None
    assert (episode.session.failure.kind, episode.session.status) == ("evaluator_error", Status.ERROR)
    assert says in episode.session.failure.message
    assert episode.trajectory.fidelity.trainable_tokens > 0


async def test_a_zero_byte_never_becomes_an_option_of_the_sandbox(tmp_path: Path) -> None:
    """Guards against a way out: a sandbox's options are separated by zero bytes, and a task chooses some of them."""
    secret = tmp_path / "secret"
    secret.write_text("treasure")
    environment = {"X": f"x\0--ro-bind\0{secret}\0/stolen"}
    command = HarnessSpec.model_validate({"name": "command", "command": "cat /stolen"})
    async with node(tmp_path) as local:
        episode = await local.rollout(
            task(agent=command, runtime=RuntimeSpec(name="bubblewrap", environment=environment))
        )
    assert episode.artifacts.stdout == ""
    assert episode.session.failure is not None
    assert "zero byte" in episode.session.failure.message


class SlowToStop:
    """Bubblewrap, but stopping waits until it is allowed; or fails."""

    Options = Options
    stopping: asyncio.Event
    go_on: asyncio.Event
    stopped: bool
    error: Exception | None = None

    def __init__(self, options: Options) -> None:
        self._real = Bubblewrap(Bubblewrap.Options())

    async def start(self, request: SandboxRequest) -> Sandbox:
        sandbox = await self._real.start(request)
        really = sandbox.stop

        async def stop() -> None:
            type(self).stopping.set()
            if self.error is None:
                await self.go_on.wait()
            await really()
            type(self).stopped = True
            if self.error is not None:
                raise self.error

        sandbox.stop = stop  # pyright: ignore[reportAttributeAccessIssue]
        return sandbox

    def check(self) -> list[str]:
        return []

    def caveats(self) -> list[str]:
        return []

    async def prepare(self, images: Collection[str]) -> None: ...

    async def reap(self, session_ids: Collection[str]) -> int:
        return 0

    async def close(self) -> None:
        await self._real.close()


def slow_to_stop(error: Exception | None = None) -> RuntimeSpec:
    SlowToStop.stopping, SlowToStop.go_on = asyncio.Event(), asyncio.Event()
    SlowToStop.stopped, SlowToStop.error = False, error
    return RuntimeSpec(name=f"{__name__}:SlowToStop")


async def test_cancelling_while_a_sandbox_is_removed_still_removes_it(tmp_path: Path, scratch: Path) -> None:
    """Guards against forgetting the sandbox before it is gone: Ctrl-C often comes at the end."""
    async with node(tmp_path) as local:
        rollout = asyncio.create_task(local.rollout(task(runtime=slow_to_stop())))
        await SlowToStop.stopping.wait()
        rollout.cancel()
        await asyncio.sleep(0)
        SlowToStop.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        assert SlowToStop.stopped


@pytest.mark.parametrize("error", [SandboxError, RuntimeError])
async def test_a_sandbox_that_cannot_be_removed_does_not_cost_the_episode(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    """Guards against a hiccup of the runtime that throws away a finished episode, and with it the whole run."""
    async with node(tmp_path) as local:
        episode = await local.rollout(task(runtime=slow_to_stop(error("the daemon is busy"))))
    assert episode.reward == 1.0
    assert "the daemon is busy" in caplog.text


class Unending:
    """An environment without tools, whose end fails."""

    tools: Sequence[Mapping[str, Any]] = ()

    async def open(self) -> None: ...

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        raise NotImplementedError

    async def close(self) -> None:
        raise RuntimeError("the session is closed")


class Unended:
    """An evaluator with such an environment."""

    Options = Options

    def __init__(self, options: Options) -> None:
        self.environment = Unending()

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        return EvaluationResult(evaluator="unended", reward=0.5)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_part_that_cannot_be_ended_costs_neither_the_episode_nor_other_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cancelled: bool
) -> None:
    """Guards against an error at the end that took the reward back, ended a whole run, or left a sample hanging."""
    name = f"{__name__}:Unended"
    delay = 60.0 if cancelled else 0.0
    async with node_here(tmp_path, imports=[name], delay_seconds=delay) as (gateway, client):
        await client.put(order(evaluator=EvaluatorSpec(name=name)))
        if cancelled:
            await client.until("RUNNING")
            gateway.service.cancel(Key("s", 0))
        episode = await client.episode()
        assert gateway.service.node.census.held == {}
    assert (episode.reward, episode.session.failure) == (None if cancelled else 0.5, None)
    assert "the session is closed" in caplog.text


_: type[Runtime] = SlowToStop
