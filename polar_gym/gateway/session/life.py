"""The life of one session: INIT -> READY -> RUNNING -> BUILDING -> EVALUATING -> done.

`initialize` prepares the sandbox, and returns the value that the later stages take. `run` runs the harness. `finish`
rebuilds the trajectory, evaluates and tears down. What the agent did is scored; a fault of the machinery is a
`Failure`, and the episode has no reward. Either way the captured calls become a trajectory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from polar_gym.config.run_config import Pools
from polar_gym.engines.replicas import Replicas
from polar_gym.engines.weights import INITIAL
from polar_gym.evaluators import Environment, EvaluationContext, Evaluator, EvaluatorError
from polar_gym.evaluators.blame import judge
from polar_gym.gateway.proxy.capture import SessionCapture
from polar_gym.gateway.proxy.proxy import Proxy
from polar_gym.gateway.session.building import build, final_message
from polar_gym.gateway.session.harness_run import HarnessRun, LaunchError
from polar_gym.gateway.session.preparation import base_of, prepare, project_settings
from polar_gym.gateway.session.sandboxes import Census, GradingSandboxes, Sandboxes
from polar_gym.gateway.session.starting import RecordError, check_vocabulary, read_recording
from polar_gym.gateway.session.work import READ_SECONDS, Work, read_work
from polar_gym.harnesses import Harness
from polar_gym.harnesses.install import InstallError
from polar_gym.runtimes import Runtime, Sandbox, SandboxError, Serve, is_confined
from polar_gym.schema import (
    Artifacts,
    Episode,
    EvaluationResult,
    Failure,
    Session,
    Status,
    TaskRequest,
    Trajectory,
)
from polar_gym.splicing.recording import DivergenceError
from polar_gym.workspaces.repository import WorkspaceError
from polar_gym.workspaces.shared import Repositories
from polar_gym.workspaces.venv import VenvError

log = logging.getLogger(__name__)

OUTPUT_TAIL = 64 * 1024
"""Bytes of the harness's stdout and stderr that an episode keeps."""

NAMED = 50
"""How many refused fields an episode names: an agent can send any number."""

INFRASTRUCTURE_ERRORS = (SandboxError, InstallError, VenvError, WorkspaceError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugins:
    """The plug-ins that a request names. All options are checked, and nothing is started."""

    harness: Harness
    evaluator: Evaluator
    runtime: Runtime

    @property
    def environment(self) -> Environment | None:
        return getattr(self.evaluator, "environment", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The parts of a node that a session uses."""

    serve: Callable[[SessionCapture], Serve]
    proxy: Proxy
    cache: Path
    repositories: Repositories
    pools: Pools
    census: Census


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The result of INIT: a sandbox that is up, and the other values that the later stages use."""

    sandbox: Sandbox
    executable: Sequence[str]
    """Argv prefix that starts the harness."""
    base: bytes | Path
    """The tar of the `.git` that the agent's changes are read against, or its file; empty: no changes are read."""
    grading: GradingSandboxes
    since: float


class SessionLife:
    """One session, stage by stage, as `polar_gym.gateway.session.stages` takes it.

    `session` and `artifacts` are the parts of the episode that the stages fill in. `close` always ends the session.
    `cancel` may be called at any time; the caller that conducts the session then calls `abandon`.
    """

    def __init__(
        self,
        request: TaskRequest,
        session: Session,
        plugins: Plugins,
        capture: SessionCapture,
        surroundings: Surroundings,
        on_change: Callable[[Session], None],
    ) -> None:
        self.request = request
        self.session = session
        self.artifacts = Artifacts(journal=str(capture.journal.path))
        self.capture = capture
        self.cancelled: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        """Done when the session is no longer wanted. The result is the status in which the session ends."""
        self._plugins = plugins
        self._around = surroundings
        self._on_change = on_change
        self._key = session.label
        self._sandboxes = Sandboxes(plugins.runtime, request, session, surroundings.pools, surroundings.census)
        self._queued_since = time.monotonic()
        self.began = time.time()  # Unix time

    @property
    def confined(self) -> bool:
        """Whether the sandboxes keep anything apart (`Runtime`)."""
        return is_confined(self._plugins.runtime)

    def enter(self, status: Status) -> None:
        self.session.status = status
        self._on_change(self.session)

    def fail(self, stage: Status, kind: str, message: str) -> None:
        """Note a failure. Only the first one is kept: later ones are mostly its consequences."""
        if self.session.failure is None:
            self.session.failure = Failure(stage=stage, kind=kind, message=self._without_key(message))

    def cancel(self, status: Status = Status.CANCELLED) -> None:
        if not self.cancelled.done():
            self.cancelled.set_result(status)

    @contextmanager
    def failing(self, stage: Status, limit: float) -> Iterator[None]:
        """Fail this session when the body raises; the other sessions of the node go on."""
        try:
            yield
        except TimeoutError:
            self.fail(stage, "runtime_error", f"not done within {limit:g} seconds")
        except INFRASTRUCTURE_ERRORS as error:
            self.fail(stage, "runtime_error", str(error))
        except EvaluatorError as error:
            self.fail(stage, "evaluator_error", str(error))
        except (DivergenceError, RecordError) as error:
            self.fail(stage, "diverged", str(error))
        except LaunchError as error:
            self.fail(stage, "harness_error", str(error))
        except Exception as error:
            log.exception("session %s failed while %s", self.session.session_id, stage)
            self.fail(stage, "gateway_error", repr(error))

    # INIT -------------------------------------------------------------------------------------------------------------

    async def initialize(self) -> Ready | None:
        """Bring up the sandbox with workspace and harness. None: that failed, and `session.failure` says why."""
        self.enter(Status.INITIALIZING)
        started = time.monotonic()
        self.session.timing.queued = started - self._queued_since
        limit = self.request.runtime.init_timeout_seconds
        ready = None
        with self.failing(Status.INITIALIZING, limit):
            async with asyncio.timeout(limit):
                ready = await self._bring_up()
        self.session.timing.init = time.monotonic() - started
        return ready

    async def _bring_up(self) -> Ready:
        spec, engine = self.request.runtime, self._around.proxy.engine
        recording = await asyncio.to_thread(read_recording, self.request, self._plugins.harness, engine.info)
        if recording is not None:
            await check_vocabulary(recording, engine)
            self.capture.start_from(recording)
        if self.capture.environment is not None:
            await self.capture.environment.open()
        prepared = await prepare(
            spec,
            self._plugins.harness,
            cache=self._around.cache,
            repositories=self._around.repositories,
            user=self._key,
        )
        sandbox = await self._sandboxes.start_for_harness(prepared, self._around.serve(self.capture))
        self.artifacts.project_settings = await project_settings(sandbox, self.request, self._plugins.harness)
        return Ready(
            sandbox=sandbox,
            executable=prepared.executable,
            base=await base_of(sandbox, spec, prepared),
            grading=GradingSandboxes(self._sandboxes, prepared),
            since=time.monotonic(),
        )

    def ready(self) -> None:
        self.enter(Status.READY)

    # RUNNING ----------------------------------------------------------------------------------------------------------

    async def run(self, ready: Ready) -> None:
        self.session.weight_version = self._first_version()
        self.enter(Status.RUNNING)
        started = time.monotonic()
        self.session.timing.ready = started - ready.since
        self.capture.running = True
        harness = HarnessRun(
            sandbox=ready.sandbox,
            request=self.request,
            session=self.session,
            capture=self.capture,
            proxy=self._around.proxy,
        )
        with self.failing(Status.RUNNING, self.request.timeout_seconds):
            try:
                launch = harness.launch(ready.executable, self._around.proxy.engine.info.max_model_len)
                output = await harness.to_its_end(launch)
                self.artifacts.stdout = self._tail(output.stdout)
                self.artifacts.stderr = self._tail(output.stderr)
            finally:
                await self.capture.end()
                self.session.timing.running = time.monotonic() - started
            if (failure := await harness.blame(output)) is not None:
                self.fail(failure.stage, failure.kind, failure.message)

    def _first_version(self) -> str | None:
        """Return the version of the weights that sample the session's first token: a resumed session's, as recorded."""
        recording = self.capture.recording
        calls = recording.calls if recording is not None and recording.owned else []
        versions = [span.version for call in calls if call.frozen is None for span in call.weight_versions]
        if not versions:
            engine = self._around.proxy.engine
            if isinstance(engine, Replicas):  # an update gives the weights to one replica after another
                engine = engine.of(self.session.session_id)
            return engine.weight_version
        return None if versions[0] == INITIAL else versions[0]

    async def prewarm(self, ready: Ready) -> None:
        """Make a sandbox for grading while the harness runs, where the evaluator says that it will need one."""
        if getattr(self._plugins.evaluator, "needs_sandbox", False):
            await ready.grading.prewarm()

    # POSTRUN ----------------------------------------------------------------------------------------------------------

    async def finish(self, ready: Ready | None) -> Episode:
        """Rebuild the trajectory, evaluate, and put the episode together. The sandbox is gone when it returns.

        `ready`: what `initialize` returned.
        """
        self.enter(Status.BUILDING)
        started = time.monotonic()
        trajectory = await self._build_trajectory()
        work = await self._read_work(ready) if ready is not None else Work()
        if not work.image:
            await self._sandboxes.close()
        self.session.timing.building = time.monotonic() - started
        evaluation = None
        if ready is not None and self.session.failure is None:
            self.enter(Status.EVALUATING)
            started = time.monotonic()
            evaluation = await self._evaluate(ready.grading, work)
            self.session.timing.evaluating = time.monotonic() - started
        await self.close()
        self.artifacts.diff = work.diff.decode(errors="replace")
        return self._episode(trajectory, evaluation)

    async def abandon(self, status: Status) -> Episode:
        """Return the episode of a session that was cancelled at any stage: its calls as a trajectory, and no reward."""
        await self.close()
        if status is Status.INTERRUPTED:
            self.fail(self.session.status, "interrupted", "the gateway was stopped while the session was under way")
        return self._episode(await self._build_trajectory(), None, status)

    async def _build_trajectory(self) -> Trajectory:
        await self.capture.end_passes()
        trajectory, problem = await build(self.capture.calls, self.request.builder)
        if problem:
            self.fail(Status.BUILDING, "gateway_error", problem)
        if mismatch := self.capture.scoring.mismatch(trajectory.fidelity.scores):
            self.fail(Status.BUILDING, "logprobs_mismatch", mismatch)
        return trajectory

    async def _read_work(self, ready: Ready) -> Work:
        work = Work()
        with self.failing(Status.BUILDING, READ_SECONDS):
            spec = self.request.runtime
            work = await read_work(
                ready.sandbox, spec.workspace.path, ready.base, self.artifacts, whole=spec.scope == "container"
            )
            if work.failure:
                self.fail(Status.BUILDING, "runtime_error", work.failure)
        return work

    async def _evaluate(self, grading: GradingSandboxes, work: Work) -> EvaluationResult | None:
        limit = self.request.runtime.init_timeout_seconds + self.request.evaluator.timeout_seconds
        context = EvaluationContext(
            request=self.request,
            session=self.session,
            calls=self.capture.calls,
            diff=work.diff,
            diff_problem=work.problem,
            final_message=final_message(self.capture.calls),
            fresh_sandbox=grading.fresh,
            left_sandbox=partial(grading.of, work.image) if work.image else None,
        )
        try:
            evaluation = await judge(self._plugins.evaluator, context, limit)
            if not self.confined:
                evaluation.trust = "low"
            return evaluation
        except EvaluatorError as error:
            self.fail(Status.EVALUATING, "evaluator_error", str(error))
            return None

    def _episode(
        self, trajectory: Trajectory, evaluation: EvaluationResult | None, status: Status | None = None
    ) -> Episode:
        reward = evaluation.reward if evaluation is not None and self.session.failure is None else None
        of_calls = evaluation.call_rewards if evaluation is not None and reward is not None else {}
        for trace in trajectory.traces:
            trace.reward = reward
            for turn in trace.turns:
                turn.reward = of_calls.get(turn.call_id)
        self.artifacts.final_message = final_message(self.capture.calls)
        self.artifacts.refused_fields = sorted(self.capture.refused_fields)[:NAMED]
        self.enter(status or (Status.COMPLETED if self.session.failure is None else Status.ERROR))
        return Episode(
            session=self.session,
            request=self.request,
            engine=self._around.proxy.engine.info,
            trajectory=trajectory,
            reward=reward,
            evaluation=evaluation,
            artifacts=self.artifacts,
        )

    def _tail(self, output: bytes) -> str:
        return self._without_key(output[-OUTPUT_TAIL:].decode(errors="replace"))

    def _without_key(self, text: str) -> str:
        """Return the text without the session's key: harnesses print their environment, and quote a refused key."""
        return text.replace(self.capture.key, "[session key]")

    async def close(self) -> None:
        """Remove the sandbox, and give the repository back, at whatever stage the session is. May be called twice."""
        environment = self.capture.environment
        parts: list[Callable[[], Awaitable[object]]] = [
            self.capture.end,
            partial(self.capture.end_passes, cancel=True),
            self._sandboxes.close,
            *(() if environment is None else (environment.close,)),
            partial(self._around.repositories.give_back, self._key),
            partial(asyncio.to_thread, self.capture.journal.close),
        ]
        async with AsyncExitStack() as stack:  # which ends the other parts also where this is cancelled
            for part in reversed(parts):
                stack.push_async_callback(self._end, part)

    async def _end(self, part: Callable[[], Awaitable[object]]) -> None:
        """End a part of the session. An error is logged, and costs the episode nothing of what the session has done."""
        try:
            await part()
        except Exception:
            log.exception("session %s: a part of it could not be ended", self.session.session_id)
