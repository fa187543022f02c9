"""The sandboxes of one session: its harness's own, and fresh ones for grading."""

from __future__ import annotations

import asyncio
import logging

from polar_gym.gateway.session.preparation import Prepared, brings_workspace
from polar_gym.runtimes import Runtime, Sandbox, SandboxError, SandboxRequest, Serve
from polar_gym.schema import RuntimeSpec, Session
from polar_gym.workspaces.history import set_base

log = logging.getLogger(__name__)

STOP_SECONDS = 120.0


class Sandboxes:
    """Starts and removes sandboxes; their workspace is as before the agent, and its git history ends there."""

    def __init__(self, runtime: Runtime, spec: RuntimeSpec, session: Session) -> None:
        self._runtime = runtime
        self._spec = spec
        self._session = session
        self._up: list[Sandbox] = []
        """The harness's sandbox, until it is removed."""

    async def start_for_harness(self, prepared: Prepared, serve: Serve) -> Sandbox:
        """Start the sandbox that `close` removes. Raises `SandboxError`."""
        sandbox = await self._start(prepared, serve)
        self._up.append(sandbox)
        return sandbox

    async def start_for_grading(self, prepared: Prepared) -> Sandbox:
        """Start a sandbox without a gateway, which the caller must stop. Raises `SandboxError`."""
        return await self._start(prepared, None)

    async def _start(self, prepared: Prepared, serve: Serve | None) -> Sandbox:
        request = SandboxRequest(
            session_id=self._session.session_id,
            node=self._session.node or "",
            spec=self._spec,
            workspace=prepared.repository,
            mounts=prepared.mounts,
            serve=serve,
        )
        sandbox = await self._runtime.start(request)
        try:
            if brings_workspace(self._spec):
                await set_base(sandbox, self._spec.workspace, for_agent=serve is not None)
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def close(self) -> None:
        """Remove the harness's sandbox. May be called again, also where a call was cancelled."""
        for sandbox in self._up:
            await self.stop(sandbox)
        self._up.clear()

    async def stop(self, sandbox: Sandbox) -> None:
        """Remove a sandbox. One that cannot be removed is logged: it does not affect the episode."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await sandbox.stop()
        except (SandboxError, OSError) as error:
            log.error("session %s: a sandbox could not be removed: %s", self._session.session_id, error)
