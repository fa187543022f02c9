"""Commands in an Apptainer instance."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from polar_gym.runtimes import Command, SandboxError, SandboxRequest, agent, processes, sandbox_files
from polar_gym.runtimes.apptainer.images import Image
from polar_gym.runtimes.apptainer.instance import Instance
from polar_gym.runtimes.kernel import cgroups, disk
from polar_gym.runtimes.lasting import LastingSandbox
from polar_gym.runtimes.limits import MEBIBYTE
from polar_gym.runtimes.output import Output, communicate
from polar_gym.runtimes.threads import to_its_end


class ApptainerSandbox(LastingSandbox):
    """A running instance."""

    def __init__(self, instance: Instance, image: Image, request: SandboxRequest, limits: Sequence[str]) -> None:
        """Take an argv prefix that limits each process of a command (`limits`)."""
        super().__init__(request, instance.claim)
        self.instance = instance
        self.cgroup: cgroups.Cgroup | None = None
        self.disk: disk.Disk | None = None
        """The sandbox's disk; None before `start` has made it."""
        self._image = image
        self._limits = limits

    async def run(self, command: Command, stdout: Output, stderr: Output) -> int | None:
        argv = ["/bin/sh", "-c", agent.RUN_AT, "sh", str(command.workdir), *command.argv]
        within = self.cgroup.enter if self.cgroup is not None else ()
        process = await self._spawn(argv, {**self._image.environment, **command.environment}, within)
        await communicate(process, command.stdin, stdout, stderr)
        if self.stopped:
            return None
        self.instance.enter()  # raises when the instance died, and the command with it
        if self.disk is not None:
            await sandbox_files.settle(self.disk)
        code = process.returncode or 0
        return code if code >= 0 else 128 - code

    async def kill_agent(self) -> None:
        """Kill the agent's processes from outside of the control group: the agent may have left no process in it."""
        killing = await self._spawn(agent.KILL, {})
        await killing.communicate()
        if killing.returncode not in (0, 1):  # 1: there was none
            raise SandboxError("the agent killed what was to kill its processes")

    async def end(self) -> None:
        await to_its_end(self.instance.end)

    async def remove(self) -> None:
        if self.disk is not None and self.disk.view is not None:
            await self.disk.view.close()
        await to_its_end(sandbox_files.remove, self.instance.scratch)

    async def _spawn(
        self, argv: Sequence[str], environment: Mapping[str, str], within: Sequence[str] = ()
    ) -> asyncio.subprocess.Process:
        self.check("is stopped")
        through = [*within, *self._limits, *self.instance.enter()]
        variables = {"PATH": agent.PATH, agent.EXPORTS: agent.exports(environment)}
        try:
            return await processes.start([*through, *argv], **processes.PIPES, env=variables, cwd="/")
        except (OSError, ValueError) as error:  # too long, or a zero byte
            raise SandboxError(f"a command could not be started: {error}") from error


def process_limits(memory_mb: int, file_mb: int) -> list[str]:
    """Return the argv prefix that sets these limits for each process of a command."""
    values = {"data": memory_mb * MEBIBYTE, "fsize": file_mb * MEBIBYTE, "core": 0}
    return ["prlimit", *(f"--{name}={value}" for name, value in values.items()), "--"]
