"""Sessions of a node: cancelled in every stage, broken by every part of the machinery, graded in a prepared sandbox."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from polar_gym.config.run_config import Pools
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.evaluators import EvaluationContext
from polar_gym.gateway.node.node import Node
from polar_gym.harnesses import Harness, Launch, LaunchContext
from polar_gym.registry import Options
from polar_gym.runtimes import Sandbox, SandboxError, SandboxRequest
from polar_gym.runtimes.bubblewrap import Bubblewrap, BubblewrapSandbox
from polar_gym.schema import (
    BuilderSpec,
    Episode,
    EvaluationResult,
    EvaluatorSpec,
    HarnessSpec,
    ModelCall,
    RuntimeSpec,
    Session,
    Status,
    TaskRequest,
    Trace,
)
from tests.lifecycle.nodes import node_here, order
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking, task


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    need_bubblewrap()


class Watched:
    """Bubblewrap, which counts its sandboxes, and may be held up or break."""

    Options = Options
    go_on: ClassVar[asyncio.Event]
    started: ClassVar[list[bool]]
    """Of each sandbox that came up, whether it is the agent's."""
    running: ClassVar[int]
    grading_breaks: ClassVar[bool]

    def __init__(self, options: Options) -> None:
        self._real = Bubblewrap(Bubblewrap.Options())

    async def start(self, request: SandboxRequest) -> Sandbox:
        await self.go_on.wait()
        if request.serve is None and self.grading_breaks:
            raise OSError("no room")
        sandbox = await self._real.start(request)
        really, cls = sandbox.stop, type(self)
        cls.started.append(request.serve is not None)
        cls.running += 1
        stopped = False

        async def stop() -> None:
            nonlocal stopped
            await really()
            cls.running -= not stopped
            stopped = True

        sandbox.stop = stop  # pyright: ignore[reportAttributeAccessIssue]
        return sandbox

    def check(self) -> list[str]:
        return []

    async def reap(self, session_ids: Collection[str]) -> int:
        return 0

    async def close(self) -> None:
        await self._real.close()


@pytest.fixture
def watched() -> RuntimeSpec:
    Watched.go_on, Watched.started, Watched.running, Watched.grading_breaks = asyncio.Event(), [], 0, False
    Watched.go_on.set()
    return RuntimeSpec(name=f"{__name__}:Watched")


GRADED = EvaluatorSpec.model_validate({"name": "test_on_output", "command": "true"})
SLOWLY_GRADED = EvaluatorSpec.model_validate({"name": "test_on_output", "command": "sleep 60"})
WORKING = asking("ask(); import time; time.sleep(60)")


async def test_cancelling_ends_a_session_in_whatever_stage_it_is(
    tmp_path: Path, scratch: Path, watched: RuntimeSpec
) -> None:
    """One session in each stage, behind places that others hold; each comes back with what it had captured."""
    pools = {"init": 1, "ready": 1, "run": 1, "postrun": 1}
    async with node_here(tmp_path, pools=pools, imports=[watched.name]) as (gateway, node):
        held = gateway.service.node.stages

        async def add(session_id: str, status: str, **fields: Any) -> None:
            await node.put(order(session_id, runtime=watched, **fields))
            await node.until(status, session_id)

        await add("evaluating", "EVALUATING", evaluator=SLOWLY_GRADED)
        await add("waits-for-postrun", "RUNNING", evaluator=SLOWLY_GRADED)
        async with asyncio.timeout(60):
            while not held.postrun.waiting:  # noqa: ASYNC110 - the harness takes its time
                await asyncio.sleep(0.01)
        await add("running", "RUNNING", agent=WORKING)
        async with asyncio.timeout(60):
            while gateway.service.node.proxy.calls["delivered"] < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await add("ready", "READY")
        Watched.go_on.clear()
        await add("initializing", "INITIALIZING")
        await add("queued", "QUEUED")
        calls = {
            "queued": 0,
            "initializing": 0,
            "ready": 0,
            "running": 1,
            "waits-for-postrun": 1,
            "evaluating": 1,
        }
        for session_id in calls:
            assert (await node.ask("DELETE", f"/v1/sessions/{session_id}/0"))[0] == 204
            assert (await node.ask("DELETE", f"/v1/sessions/{session_id}/0"))[0] == 204, "twice is once"
        assert (await node.ask("DELETE", "/v1/sessions/nobody/0"))[0] == 204
        for session_id, captured in calls.items():
            episode = await node.episode(session_id)
            assert (episode.session.status, episode.reward) == (Status.CANCELLED, None), session_id
            fidelity = episode.trajectory.fidelity
            assert (fidelity.calls, len(episode.trajectory.traces), fidelity.exact) == (captured, captured, True)
        assert not any(held.held.model_dump().values())
        assert Watched.running == 0
        Watched.go_on.set()
        await node.put(order("after", runtime=watched))
        assert (await node.episode("after")).session.status is Status.COMPLETED, "no place was lost"
    assert list(scratch.iterdir()) == []


def broken_builder(calls: Sequence[ModelCall], excluded: Mapping[str, str]) -> list[Trace]:
    raise ZeroDivisionError("built nothing")


def launch_nothing(context: LaunchContext) -> Launch:
    raise KeyError(f"no launch with {context.api_key}")


UNLAUNCHABLE = Harness(launch=launch_nothing)
RELATIVE = Harness(launch=lambda context: Launch(argv=["true"], files={".config/x.json": "{}"}))


def local_node(tmp_path: Path, pools: Pools | None = None) -> Node:
    engine = EmbeddedEngine(EmbeddedOptions(scripts=[Script(commands=[], final_message="All done.")]))
    return Node(engine, cache=tmp_path / "cache", state=tmp_path / "state", pools=pools)


@pytest.mark.parametrize(
    ("fields", "kind", "stage", "says"),
    [
        (
            {"builder": BuilderSpec(name=f"{__name__}:broken_builder")},
            "gateway_error",
            Status.BUILDING,
            "ZeroDivisionError",
        ),
        (
            {"agent": HarnessSpec(name=f"{__name__}:UNLAUNCHABLE")},
            "harness_error",
            Status.RUNNING,
            "no launch with [session key]",
        ),
        (
            {"agent": HarnessSpec(name=f"{__name__}:RELATIVE")},
            "harness_error",
            Status.RUNNING,
            "'.config/x.json' is a relative path",
        ),
    ],
    ids=["builder", "harness", "path"],
)
async def test_a_plugin_that_raises_ends_its_own_session_only(
    tmp_path: Path, fields: dict[str, Any], kind: str, stage: Status, says: str
) -> None:
    """Guards against a third party's bug that ends the whole run with a traceback."""
    async with local_node(tmp_path) as node:
        broken, whole = await asyncio.gather(node.rollout(task(**fields)), node.rollout(task()))
    assert whole.session.status is Status.COMPLETED
    failure = broken.session.failure
    assert failure is not None
    assert (failure.kind, failure.stage, broken.reward) == (kind, stage, None)
    assert says in failure.message
    fidelity = broken.trajectory.fidelity
    assert fidelity.exact
    assert sum(fidelity.excluded.values()) == fidelity.sampled_tokens


class TooLarge:
    """An evaluator whose score is a number that no JSON of 64 bits holds."""

    Options = Options

    def __init__(self, options: Options) -> None:
        pass

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        return EvaluationResult.model_construct(evaluator="too large", reward=2**64)


async def test_an_episode_that_cannot_be_written_ends_without_a_trajectory(tmp_path: Path) -> None:
    """Guards against a session that never ends, as its task does then, because of one value of its episode."""
    evaluator = EvaluatorSpec(name=f"{__name__}:TooLarge")
    async with node_here(tmp_path, imports=[evaluator.name]) as (_, node):
        await node.put(order(evaluator=evaluator))
        episode = await node.episode()
    assert (episode.session.status, episode.reward, episode.trajectory.traces) == (Status.ERROR, None, [])
    failure = episode.session.failure
    assert failure is not None
    assert (failure.kind, "cannot be written" in failure.message) == ("gateway_error", True), failure


async def test_a_disk_that_is_full_ends_the_session_and_counts_the_call(tmp_path: Path) -> None:
    """Guards against a harness that goes on for hours with calls that nobody can record."""

    async def rollout(node: Node) -> Episode:
        async with node.session(task(agent=asking("[ask() for _ in range(1000)]"))) as life:
            life.capture.journal.path.unlink()
            life.capture.journal.path.symlink_to("/dev/full")
            return await node.conduct(life)

    async with local_node(tmp_path) as node:
        episode = await rollout(node)
    failure = episode.session.failure
    assert failure is not None
    assert (failure.kind, "could not be written to" in failure.message) == ("gateway_error", True), failure
    fidelity = episode.trajectory.fidelity
    assert (fidelity.calls >= 1, fidelity.exact, fidelity.sampled_tokens > 0) == (True, True, True)
    assert fidelity.trainable_tokens == 0


async def graded(tmp_path: Path, watched: RuntimeSpec, prewarm: int = 1, **fields: Any) -> Episode:
    request = task(**{"runtime": watched, "evaluator": GRADED, "agent": asking("ask()"), **fields})
    async with local_node(tmp_path, Pools(prewarm=prewarm)) as node:
        episode = await node.rollout(request)
    assert Watched.running == 0
    return episode


@pytest.mark.parametrize("prewarm", [0, 1])
async def test_grading_takes_the_sandbox_that_came_up_beside_the_agent(
    tmp_path: Path, watched: RuntimeSpec, prewarm: int
) -> None:
    up_at_the_end: list[int] = []

    def watch(session: Session) -> None:
        if session.status is Status.EVALUATING:
            up_at_the_end.append(len(Watched.started))

    agent = asking("ask(); import time; time.sleep(1)")
    async with local_node(tmp_path, Pools(prewarm=prewarm)) as node:
        episode = await node.rollout(task(runtime=watched, evaluator=GRADED, agent=agent), on_change=watch)
    assert (episode.reward, Watched.started) == (1.0, [True, False])
    assert up_at_the_end == [1 + prewarm], "before the evaluation began"
    assert Watched.running == 0


async def test_a_prepared_sandbox_that_nobody_needs_is_removed(tmp_path: Path, watched: RuntimeSpec) -> None:
    fails = asking("import time; time.sleep(1); sys.exit(3)")
    episode = await graded(tmp_path, watched, agent=fails)
    assert episode.session.failure is not None
    assert Watched.started == [True, False]


async def test_an_evaluator_that_needs_no_sandbox_gets_none(tmp_path: Path, watched: RuntimeSpec) -> None:
    agent = asking("ask(); import time; time.sleep(1)")
    await graded(tmp_path, watched, evaluator=EvaluatorSpec(name="session_completion"), agent=agent)
    assert Watched.started == [True]


async def test_a_sandbox_that_could_not_be_prepared_is_the_evaluations_concern(
    tmp_path: Path, watched: RuntimeSpec, caplog: pytest.LogCaptureFixture
) -> None:
    Watched.grading_breaks = True
    episode = await graded(tmp_path, watched)
    assert "no sandbox could be prepared for grading: no room" in caplog.text
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "evaluator_error"


async def test_what_a_harness_said_is_kept_also_when_its_time_is_up(tmp_path: Path) -> None:
    agent = asking("print('so far', flush=True); ask(); import time; time.sleep(600)")
    request: TaskRequest = task(agent=agent, timeout_seconds=6)
    async with local_node(tmp_path) as node:
        episode = await node.rollout(request)
    assert (episode.session.truncated_by, episode.artifacts.stdout) == ("time", "so far\n")


async def test_finished_sessions_are_evicted_by_age_and_by_size(tmp_path: Path) -> None:
    async with node_here(tmp_path, keep_seconds=1000, keep_bytes=10**9) as (gateway, node):
        service = gateway.service
        for number in range(4):
            await node.put(order(f"s{number}"))
            await node.episode(f"s{number}")
        sessions = tmp_path / "state" / "sessions"
        await service.evict()
        assert len(list(sessions.iterdir())) == 4
        old = (sessions / "s2.0" / "episode.json").stat().st_mtime - 2000
        os.utime(sessions / "s2.0" / "episode.json", (old, old))
        await service.evict()
        assert {path.name for path in sessions.iterdir()} == {"s0.0", "s1.0", "s3.0"}
        one = sum(path.stat().st_size for path in (sessions / "s0.0").iterdir())
        service.settings.keep_bytes = int(one * 1.5)
        await service.evict()
        assert {path.name for path in sessions.iterdir()} == {"s3.0"}, "the oldest go first"
        assert [session.session_id for session in service.sessions] == ["s3"]


class Clinging(Bubblewrap):
    """Its sandboxes cannot be removed."""

    stops: ClassVar[list[Callable[[], Awaitable[None]]]]
    reaped: ClassVar[list[str]]

    async def start(self, request: SandboxRequest) -> BubblewrapSandbox:
        sandbox = await super().start(request)
        self.stops.append(sandbox.stop)

        async def stop() -> None:
            raise SandboxError("it clings")

        sandbox.stop = stop
        return sandbox

    async def reap(self, session_ids: Collection[str]) -> int:
        self.reaped.extend(session_ids)
        return len(session_ids)


async def test_the_next_process_removes_what_an_ended_session_left(tmp_path: Path, scratch: Path) -> None:
    """Guards against sandboxes that stayed for ever where a process ended before it could remove them: the next one
    looked at sessions without an episode only."""
    Clinging.stops, Clinging.reaped = [], []
    runtime = RuntimeSpec(name=f"{__name__}:Clinging")
    for reaped in ([], ["s.0"], ["s.0"]):
        async with node_here(tmp_path, imports=[runtime.name]) as (_, node):
            assert Clinging.reaped == reaped
            await node.put(order(runtime=runtime))
            assert (await node.episode()).session.status is Status.COMPLETED
    for stop in Clinging.stops:
        await stop()
