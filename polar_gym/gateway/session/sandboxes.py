"""The sandboxes of one session: the harness's own, and fresh ones for grading."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from polar_gym.config.run_config import Pools
from polar_gym.evaluators import EVALUATORS
from polar_gym.gateway.session.preparation import Prepared, brings_workspace
from polar_gym.gateway.session.work import READ_SECONDS
from polar_gym.runtimes import Runtime, Sandbox, SandboxRequest, Serve
from polar_gym.runtimes.threads import finish
from polar_gym.schema import EvaluatorSpec, Session, TaskRequest
from polar_gym.workspaces.history import set_base

log = logging.getLogger(__name__)

STOP_SECONDS = 120.0
AGAIN_SECONDS = 60.0
"""The time between two attempts to remove what could not be removed."""

PAUSED_SECONDS = 3600.0
"""How long generation may be paused, in all, before a session's sandboxes may end."""


def lifetime(request: TaskRequest, pools: Pools) -> float:
    """Return the seconds for which the stages of a session may need a sandbox: the sum of the budgets, with those of
    sessions like it for whose places it waits: `ready + init` of them for RUN, and `run` of them for POSTRUN.

    No bound: sessions of other tasks take their turns, and any number may wait for POSTRUN.
    """
    replay = request.timeout_seconds if request.start_from is not None else 0.0
    grading = grading_seconds(request.evaluator, request.runtime.init_timeout_seconds)
    running = request.runtime.init_timeout_seconds + replay + request.timeout_seconds + READ_SECONDS
    for_a_run = math.ceil((pools.ready + pools.init) / pools.run) * (replay + request.timeout_seconds)
    for_grading = math.ceil(pools.run / pools.postrun) * grading
    return running + grading + for_a_run + for_grading + PAUSED_SECONDS


def grading_seconds(spec: EvaluatorSpec, start_seconds: float) -> float:
    """Return the time of one grading, the start of its sandbox included. The parts of a `composite` are graded one
    after the other, each within its own time."""
    parts: Mapping[str, EvaluatorSpec] = getattr(EVALUATORS.options(spec), "components", {})
    return sum(grading_seconds(part, start_seconds) for part in parts.values()) or start_seconds + spec.timeout_seconds


class Census:
    """The sandboxes of a node: those that its sessions hold, and those that should be gone and are left."""

    def __init__(self) -> None:
        self.held: dict[int, Sandbox] = {}
        self.left: dict[int, tuple[Sandbox, str]] = {}
        """With the labels of their sessions."""

    def has_left(self, label: str) -> bool:
        """Return whether a sandbox of this session should be gone and is left."""
        return label in (of for _, of in self.left.values())

    async def remove(self, sandbox: Sandbox, label: str) -> None:
        """Remove a sandbox, also when this is cancelled. One that cannot be removed is logged, and tried again: it does
        not affect the episode."""
        await finish(self._remove(sandbox, label))

    async def _remove(self, sandbox: Sandbox, label: str) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await sandbox.stop()
        except Exception as error:  # noqa: BLE001 - a runtime may be a third party's
            self.left[id(sandbox)] = sandbox, label
            log.error("session %s: a sandbox could not be removed: %r", label, error)
        else:
            self.left.pop(id(sandbox), None)
        self.held.pop(id(sandbox), None)

    async def remove_left(self) -> None:
        for sandbox, label in list(self.left.values()):
            await self.remove(sandbox, label)

    async def keep_removing(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_SECONDS)
            await self.remove_left()


class Sandboxes:
    """Starts and removes sandboxes. Their workspace is as before the agent, and its git history ends there."""

    def __init__(self, runtime: Runtime, request: TaskRequest, session: Session, pools: Pools, census: Census) -> None:
        self.session = session
        self._runtime = runtime
        self._spec = request.runtime
        self._lifetime = lifetime(request, pools)
        self._census = census
        self._up: list[Sandbox] = []
        """The harness's sandbox, until it is removed."""

    async def start_for_harness(self, prepared: Prepared, serve: Serve) -> Sandbox:
        """Start the sandbox that `close` removes. Raises `SandboxError`."""
        sandbox = await self.start(prepared, serve)
        self._up.append(sandbox)
        return sandbox

    async def start(self, prepared: Prepared, serve: Serve | None = None, image: str | None = None) -> Sandbox:
        """Start a sandbox that the caller must stop; without `serve` it is for grading. Raises `SandboxError`.

        `image`: None: the request's. Another one is of files that a harness left, and gets no toolchain.
        """
        request = SandboxRequest(
            session_id=self.session.label,
            node=self.session.node or "",
            spec=self._spec.model_copy(
                update={"image": image or self._spec.image, "environment": prepared.environment}
            ),
            workspace=None if prepared.repository is None else prepared.repository.path,
            own_files=True,
            mounts=prepared.mounts if image is None else (),
            serve=serve,
            lifetime_seconds=self._lifetime,
        )
        sandbox = await self._runtime.start(request)
        self._census.held[id(sandbox)] = sandbox
        try:
            if brings_workspace(self._spec):
                await set_base(sandbox, self._spec.workspace, for_agent=serve is not None)
        except BaseException:
            await self.stop(sandbox)
            raise
        return sandbox

    async def close(self) -> None:
        """Remove the harness's sandbox. May be called again, also where a call was cancelled."""
        for sandbox in self._up:
            await self.stop(sandbox)
        self._up.clear()

    async def stop(self, sandbox: Sandbox) -> None:
        await self._census.remove(sandbox, self.session.label)


class GradingSandboxes:
    """Fresh sandboxes for grading. The first one, the spare one, may be made while the harness still runs."""

    def __init__(self, sandboxes: Sandboxes, prepared: Prepared) -> None:
        self._sandboxes = sandboxes
        self._prepared = prepared
        self._spare: asyncio.Future[Sandbox | None] | None = None
        """The sandbox that comes up, or is up. The result is None where the sandbox could not be made."""
        self._asked = asyncio.Event()
        """Set once grading has asked for a sandbox: grading then has the spare one, or one of its own."""

    async def prewarm(self) -> None:
        """Make the spare sandbox, and return when grading takes it. When cancelled before that, remove it."""
        if self._asked.is_set():
            return
        self._spare = spare = asyncio.get_running_loop().create_future()
        sandbox = None
        try:
            sandbox = await self._sandboxes.start(self._prepared)
            spare.set_result(sandbox)
            await self._asked.wait()
        except Exception as error:  # noqa: BLE001 - grading starts one of its own, and says why if that cannot be
            session_id = self._sandboxes.session.session_id
            log.warning("session %s: no sandbox could be prepared for grading: %s", session_id, error)
        finally:
            if not spare.done():
                spare.set_result(None)
            if sandbox is not None and not self._asked.is_set():
                await self._sandboxes.stop(sandbox)

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[Sandbox]:
        """Give a sandbox that nothing has run in, and remove it afterwards. Raises what the runtime raises."""
        spare, self._spare = self._spare, None
        sandbox = await spare if spare is not None else None
        self._asked.set()
        if sandbox is None:
            sandbox = await self._sandboxes.start(self._prepared)
        try:
            yield sandbox
        finally:
            await self._sandboxes.stop(sandbox)

    @asynccontextmanager
    async def of(self, image: str) -> AsyncIterator[Sandbox]:
        """Give a sandbox of another image, and remove it afterwards. Raises what the runtime raises."""
        sandbox = await self._sandboxes.start(self._prepared, image=image)
        try:
            yield sandbox
        finally:
            await self._sandboxes.stop(sandbox)
