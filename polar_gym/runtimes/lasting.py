"""Sandboxes that outlive their commands and run them one at a time, each ended with all that it started."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from abc import ABC, abstractmethod
from typing import Any

from polar_gym.runtimes import PROXY_PORT, Command, ExecResult, SandboxError, SandboxRequest, agent
from polar_gym.runtimes.kernel.uids import Claim
from polar_gym.runtimes.output import Output
from polar_gym.runtimes.threads import finish

log = logging.getLogger(__name__)

KILL_ATTEMPTS = 10


class LastingSandbox(ABC):
    """A running sandbox; a subclass says how it runs one command, and how it ends."""

    def __init__(self, request: SandboxRequest, claim: Claim) -> None:
        self.base_url = f"http://127.0.0.1:{PROXY_PORT}"
        self.server: asyncio.Server | None = None
        """The gateway, once it listens."""
        self.stopped = False
        """Whether the sandbox is being removed, with everything in it."""
        self.claim = claim
        self._request = request
        self._one_at_a_time = asyncio.Lock()

    @abstractmethod
    async def run(self, command: Command, stdout: Output, stderr: Output) -> int | None:
        """Run a command whose first argument is the seconds after which it ends without the gateway (`agent.RUN`).

        Return its exit code, also where it was killed; None where the sandbox was stopped.
        """

    @abstractmethod
    async def kill_agent(self) -> None:
        """Kill every process that the agent has now. Raises `SandboxError`, also where the agent prevents that."""

    @abstractmethod
    async def end(self) -> None:
        """End the sandbox, with everything in it."""

    @abstractmethod
    async def remove(self) -> None:
        """Remove what an ended sandbox has left on the machine."""

    async def exec(self, command: Command) -> ExecResult:
        stdout, stderr = Output(command.output_limit), Output(command.output_limit)
        resolved = dataclasses.replace(
            command,
            argv=[str(math.ceil(command.timeout_seconds) + agent.BACKSTOP_SECONDS), *command.argv],
            environment={**agent.IDENTITY, **self._request.spec.environment, **command.environment},
            workdir=command.workdir or self._request.spec.workspace.path,
        )
        async with self._one_at_a_time:
            self.check("is stopped")
            running = asyncio.create_task(self.run(resolved, stdout, stderr))
            timed_out = await self._until_its_end(running, command)
        self.check("was stopped during a command")
        code = None if timed_out else running.result()
        return ExecResult(exit_code=code, stdout=stdout.value(), stderr=stderr.value(), timed_out=timed_out)

    async def stop(self) -> None:
        self.stopped = True
        if self.server is not None:
            self.server.close()
        await self.end()
        await self.remove()
        self.claim.release()

    def check(self, state: str) -> None:
        if self.stopped:
            raise SandboxError(f"the sandbox of session {self._request.session_id} {state}")

    async def _until_its_end(self, running: asyncio.Task[Any], command: Command) -> bool:
        """Wait for a running command, and return whether it had to be killed; cancelling this kills it too.

        Raises what the command raises, and `SandboxError` where the command, or what it left, cannot be killed.
        """
        ending = asyncio.create_task((command.end or asyncio.Event()).wait())
        try:
            limit = command.timeout_seconds
            await asyncio.wait({running, ending}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            killed = not running.done()
            if killed:
                await self._kill(running)
            elif running.exception() is None and (command.untrusted or (running.result() or 0) > 128):
                await finish(self._kill_rest())
        await running
        return killed

    async def _kill(self, running: asyncio.Task[Any]) -> None:
        """Kill every process of the agent, until the running command ends.

        More than once, because the command may only be about to start. Where that does not help, end the sandbox and
        raise `SandboxError`: no process of an agent outlives its limit.
        """
        for _ in range(KILL_ATTEMPTS):
            if self.stopped:
                await asyncio.wait({running})
                return
            foiled = False
            try:
                await self.kill_agent()
            except SandboxError as error:
                log.warning("session %s: a command could not be killed yet: %s", self._request.session_id, error)
                foiled = True
            await asyncio.wait({running}, timeout=1)
            if running.done():
                if foiled and running.exception() is None:  # the agent ended the command, and may be alive
                    await self._kill_rest()
                return
        await self.end()
        raise SandboxError("a command could not be killed at its time limit; its sandbox was ended")

    async def _kill_rest(self) -> None:
        """Kill what a command left. The agent may have killed the shell that was to do so, or have made it end with 0.

        Where that does not help, end the sandbox and raise `SandboxError`: no process of an agent sees the grading.
        """
        for _ in range(KILL_ATTEMPTS):
            if self.stopped:
                return
            try:
                return await self.kill_agent()
            except SandboxError as error:
                log.warning("session %s: what a command left still runs: %s", self._request.session_id, error)
            await asyncio.sleep(1)
        await self.end()
        raise SandboxError("what a command left could not be killed; its sandbox was ended")
