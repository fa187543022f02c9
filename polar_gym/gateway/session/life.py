"""The life of one session: INIT -> READY -> RUNNING -> BUILDING -> EVALUATING -> done.

`initialize` prepares the sandbox, `run` runs the harness in it, `finish` rebuilds the trajectory, evaluates and tears
down. What the agent did is scored; what the machinery did wrong is a `Failure`, and the episode has no reward. Either
way the captured calls become a trajectory.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from polar_gym.evaluators import EvaluationContext, EvaluatorError
from polar_gym.evaluators.judge import judge
from polar_gym.gateway.proxy.capture import SessionCapture
from polar_gym.gateway.proxy.generation import GenerationGate
from polar_gym.gateway.session.building import build
from polar_gym.gateway.session.grading_sandboxes import GradingSandboxes
from polar_gym.gateway.session.harness_run import NO_OUTPUT, blame, run_harness
from polar_gym.gateway.session.plugins import Plugins
from polar_gym.harnesses import Launch, LaunchContext
from polar_gym.harnesses.install import InstallError, toolchain_mounts
from polar_gym.harnesses.today import told_today
from polar_gym.runtimes import (
    HOME,
    Mount,
    Runtime,
    Sandbox,
    SandboxError,
    SandboxRequest,
    Serve,
)
from polar_gym.runtimes.agent import PATH
from polar_gym.runtimes.threads import to_its_end
from polar_gym.schema import (
    Artifacts,
    EngineInfo,
    Episode,
    EvaluationResult,
    Failure,
    Session,
    Status,
    TaskRequest,
    Trajectory,
)
from polar_gym.workspaces.diff import UnreadableWorkspaceError, left_behind, snapshot_diff
from polar_gym.workspaces.history import pack_baseline, set_base
from polar_gym.workspaces.repository import WorkspaceError, make_repository, pack_git_dir
from polar_gym.workspaces.venv import VenvError, ensure_venv, inside, variables

log = logging.getLogger(__name__)

OUTPUT_TAIL = 64 * 1024
"""Bytes of the harness's stdout and stderr that an episode keeps."""

DIFF_SECONDS = 600.0
STOP_SECONDS = 120.0

INFRASTRUCTURE_ERRORS = (SandboxError, InstallError, VenvError, WorkspaceError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a session needs of its node."""

    runtime: Runtime
    serve: Callable[[SessionCapture], Serve]
    generation: GenerationGate
    weight_version: Callable[[], str | None]
    engine: EngineInfo
    cache: Path
    scratch: Path


class SessionLife:
    """One session, stage by stage, as `polar_gym.gateway.session.stages` takes it. `close` always ends it; `cancel` may
    be called at any time, and whoever conducts the session then calls `abandon`."""

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
        self.capture = capture
        self._around = surroundings
        self._on_change = on_change
        self._plugins = plugins
        self.cancelled: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        """Done when the session is no longer wanted: with the status that it ends in."""
        self._scratch = surroundings.scratch / f"{session.session_id}.{session.attempt}"
        self._repository = self._scratch / "repository"
        self._git_dir = b""
        self._mounts: list[Mount] = []
        self._executable: list[str] = []
        self._sandbox: Sandbox | None = None
        self._grading = GradingSandboxes(session.session_id, lambda: self._start_sandbox(None), self._stop)
        self._output = NO_OUTPUT
        self._diff_problem = ""
        self._not_carried: list[str] = []
        self._waits_since = time.monotonic()

    def enter(self, status: Status) -> None:
        self.session.status = status
        self._on_change(self.session)

    def fail(self, stage: Status, kind: str, message: str) -> None:
        """The first failure is the one that is kept: later ones are mostly its consequences."""
        if self.session.failure is None:
            self.session.failure = Failure(stage=stage, kind=kind, message=self._without_key(message))

    def cancel(self, status: Status = Status.CANCELLED) -> None:
        if not self.cancelled.done():
            self.cancelled.set_result(status)

    @contextmanager
    def _failing(self, stage: Status, limit: float) -> Iterator[None]:
        """Whatever is raised inside costs this session only, never the others of its node."""
        try:
            yield
        except INFRASTRUCTURE_ERRORS as error:
            self.fail(stage, "runtime_error", _say(error, limit))
        except Exception as error:
            log.exception("session %s failed while %s", self.session.session_id, stage)
            self.fail(stage, "gateway_error", repr(error))

    # INIT -------------------------------------------------------------------------------------------------------------

    async def initialize(self) -> bool:
        """Bring up the sandbox with workspace and harness. Where that fails: False, and why in `session.failure`."""
        self.enter(Status.INITIALIZING)
        started = time.monotonic()
        self.session.timing.queued = started - self._waits_since
        limit = self.request.runtime.init_timeout_seconds
        with self._failing(Status.INITIALIZING, limit):
            async with asyncio.timeout(limit):
                await self._prepare_files()
                self._sandbox = await self._start_sandbox(self._around.serve(self.capture))
                if self.request.runtime.workspace.source is None and self.request.runtime.image is not None:
                    self._git_dir = await pack_baseline(self._sandbox, self.request.runtime.workspace.path)
        self._waits_since = time.monotonic()
        self.session.timing.init = self._waits_since - started
        return self.session.failure is None

    def ready(self) -> None:
        self.enter(Status.READY)

    async def _prepare_files(self) -> None:
        """Everything on the gateway's machine: the harness, the repository at its base commit, the environment."""
        workspace = self.request.runtime.workspace
        cache = self._around.cache
        mounts, self._executable = await asyncio.to_thread(toolchain_mounts, self._plugins.harness, cache)
        self._mounts = list(mounts)
        self._scratch.mkdir(parents=True)
        if workspace.source is not None:
            await to_its_end(make_repository, Path(workspace.source), self._repository)
            self._git_dir = await asyncio.to_thread(pack_git_dir, self._repository)
        if workspace.python_requirements:
            venv = await asyncio.to_thread(ensure_venv, workspace.python_requirements, cache)
            self._mounts.append(Mount(venv, inside(venv)))
            environment = self.request.runtime.environment
            environment |= variables(venv, environment.get("PATH", PATH))

    async def _start_sandbox(self, serve: Serve | None) -> Sandbox:
        """A sandbox with the workspace as it is before the agent, whose git history ends there."""
        sandbox = await self._around.runtime.start(self._sandbox_request(serve))
        try:
            if self.request.runtime.workspace.source is None and self.request.runtime.image is not None:
                await set_base(sandbox, self.request.runtime.workspace, for_agent=serve is not None)
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    def _sandbox_request(self, serve: Serve | None) -> SandboxRequest:
        return SandboxRequest(
            session_id=self.session.session_id,
            node=self.session.node or "",
            spec=self.request.runtime,
            workspace=self._repository if self.request.runtime.workspace.source is not None else None,
            mounts=self._mounts,
            serve=serve,
        )

    # RUNNING ----------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the harness to its end, or to the end of a budget."""
        if self.session.failure is not None or self._sandbox is None:
            return
        self.session.weight_version = self._around.weight_version()
        self.enter(Status.RUNNING)
        started = time.monotonic()
        self.session.timing.ready = started - self._waits_since
        self.capture.running = True
        with self._failing(Status.RUNNING, self.request.timeout_seconds):
            try:
                self._output = await run_harness(
                    self._launch(self._sandbox),
                    self._sandbox,
                    self.request,
                    self.session,
                    self.capture,
                    self._around.generation,
                )
            finally:
                await self.capture.end()
                self.session.timing.running = time.monotonic() - started
            failure = await blame(self.session, self.request, self.capture.calls, self._output, self._sandbox)
            if failure is not None:
                self.fail(failure.stage, failure.kind, failure.message)

    def _launch(self, sandbox: Sandbox) -> Launch:
        context = LaunchContext(
            spec=self.request.agent,
            base_url=sandbox.base_url,
            api_key=self.capture.key,
            context_length=self._around.engine.max_model_len,
            instruction=self.request.instruction,
            home=HOME,
            workdir=self.request.runtime.workspace.path,
            executable=self._executable,
        )
        return told_today(self._plugins.harness, self._plugins.harness.launch(context), context)

    # POSTRUN ----------------------------------------------------------------------------------------------------------

    async def finish(self) -> Episode:
        """Rebuild the trajectory, evaluate, and put the episode together. The sandbox is gone when it returns."""
        self.enter(Status.BUILDING)
        started = time.monotonic()
        trajectory = await self._build_trajectory()
        diff = b""
        with self._failing(Status.BUILDING, DIFF_SECONDS):
            async with asyncio.timeout(DIFF_SECONDS):
                diff = await self._take_diff()
        await self._stop_sandbox()
        self.session.timing.building = time.monotonic() - started
        evaluation = None
        if self.session.failure is None:
            self.enter(Status.EVALUATING)
            started = time.monotonic()
            evaluation = await self._evaluate(diff)
            self.session.timing.evaluating = time.monotonic() - started
        await self.close()
        return self._episode(trajectory, evaluation, diff)

    async def abandon(self, status: Status) -> Episode:
        """The episode of a session that was cancelled, at whatever stage: its calls as a trajectory, and no reward."""
        await self.close()
        if status is Status.INTERRUPTED:
            self.fail(self.session.status, "interrupted", "the gateway was stopped while the session was under way")
        return self._episode(await self._build_trajectory(), None, b"", status)

    async def _build_trajectory(self) -> Trajectory:
        trajectory, problem = await build(self.capture.calls, self.request.builder)
        if problem:
            self.fail(Status.BUILDING, "gateway_error", problem)
        return trajectory

    async def _take_diff(self) -> bytes:
        """The agent's changes; notes what is not among them, and, in `_diff_problem`, why there are none."""
        if self._sandbox is None:
            return b""
        path = self.request.runtime.workspace.path
        try:
            self._not_carried = await left_behind(self._sandbox, path)
            return await snapshot_diff(self._sandbox, path, self._git_dir) if self._git_dir else b""
        except UnreadableWorkspaceError as error:
            self._diff_problem = str(error)
        except INFRASTRUCTURE_ERRORS as error:
            self.fail(Status.BUILDING, "runtime_error", f"the agent's changes could not be read: {error}")
        return b""

    async def _evaluate(self, diff: bytes) -> EvaluationResult | None:
        spec = self.request.evaluator
        context = EvaluationContext(
            request=self.request,
            session=self.session,
            calls=self.capture.calls,
            diff=diff,
            diff_problem=self._diff_problem,
            final_message=self.final_message,
            fresh_sandbox=self._grading.fresh,
        )
        try:
            return await judge(
                self._plugins.evaluator, context, self.request.runtime.init_timeout_seconds + spec.timeout_seconds
            )
        except EvaluatorError as error:
            self.fail(Status.EVALUATING, "evaluator_error", str(error))
            return None

    async def prewarm(self) -> None:
        """Have a sandbox for grading at hand when the agent is done, where the evaluator says that it will need one."""
        if getattr(self._plugins.evaluator, "needs_sandbox", False):
            await self._grading.prewarm()

    @property
    def final_message(self) -> str:
        """The text of the last answer that the harness received."""
        for call in reversed(self.capture.calls):
            if call.outcome == "delivered" and call.response is not None:
                return str(call.response.get("content") or "")
        return ""

    def _episode(
        self,
        trajectory: Trajectory,
        evaluation: EvaluationResult | None,
        diff: bytes,
        status: Status | None = None,
    ) -> Episode:
        reward = evaluation.reward if evaluation is not None and self.session.failure is None else None
        for trace in trajectory.traces:
            trace.reward = reward
        self.enter(status or (Status.COMPLETED if self.session.failure is None else Status.ERROR))
        return Episode(
            session=self.session,
            request=self.request,
            engine=self._around.engine,
            trajectory=trajectory,
            reward=reward,
            evaluation=evaluation,
            artifacts=Artifacts(
                final_message=self.final_message,
                diff=diff.decode(errors="replace"),
                not_carried=self._not_carried,
                stdout=self._without_key(self._output.stdout[-OUTPUT_TAIL:].decode(errors="replace")),
                stderr=self._without_key(self._output.stderr[-OUTPUT_TAIL:].decode(errors="replace")),
                journal=str(self.capture.journal.path),
            ),
        )

    def _without_key(self, text: str) -> str:
        """Harnesses print their environment, and quote the key that was refused."""
        return text.replace(self.capture.key, "[session key]")

    async def close(self) -> None:
        """Remove the sandbox and the scratch files, at whatever stage the session is. May be called twice."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._close_journal)
            stack.push_async_callback(asyncio.to_thread, shutil.rmtree, self._scratch, ignore_errors=True)
            stack.push_async_callback(self._stop_sandbox)
            await self.capture.end()

    async def _close_journal(self) -> None:
        try:
            await asyncio.to_thread(self.capture.journal.close)
        except OSError as error:  # the episode has all that is in it
            log.error("%s could not be closed: %s", self.capture.journal.path, error)

    async def _stop_sandbox(self) -> None:
        if self._sandbox is None:
            return
        await self._stop(self._sandbox)
        self._sandbox = None

    async def _stop(self, sandbox: Sandbox) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await sandbox.stop()
        except (SandboxError, OSError) as error:  # the episode is as good as without it
            log.error("session %s: a sandbox could not be removed: %s", self.session.session_id, error)


def _say(error: BaseException, limit: float) -> str:
    return f"not done within {limit:g} seconds" if isinstance(error, TimeoutError) else str(error)
