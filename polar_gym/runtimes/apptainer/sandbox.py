"""Commands in an Apptainer instance: one at a time, each ended with all that it started."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from polar_gym.runtimes import (
    PROXY_PORT,
    Command,
    ExecResult,
    SandboxError,
    SandboxRequest,
    agent,
    processes,
    sandbox_files,
)
from polar_gym.runtimes.apptainer.images import Image
from polar_gym.runtimes.apptainer.instance import Instance
from polar_gym.runtimes.kernel import cgroups, disk
from polar_gym.runtimes.limits import MEBIBYTE
from polar_gym.runtimes.output import Output, feed_stdin
from polar_gym.runtimes.threads import to_its_end
from polar_gym.runtimes.time_limit import until_its_end

INSIDE = f'{agent.SET_ENVIRONMENT}; cd "$1" || exit 126; shift; {agent.RUN}'


@dataclass(kw_only=True)
class ApptainerSandbox:
    """A running instance."""

    instance: Instance
    image: Image
    request: SandboxRequest
    limits: Sequence[str]
    """Argv prefix that limits each process of a command."""
    base_url: str = f"http://127.0.0.1:{PROXY_PORT}"
    cgroup: cgroups.Cgroup | None = None
    disk: disk.Disk | None = None
    """The sandbox's disk; None before `start` has made it."""
    server: asyncio.Server | None = None
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    stopped: bool = False

    async def exec(self, command: Command) -> ExecResult:
        values = {**self.image.environment, **agent.IDENTITY, **self.request.spec.environment, **command.environment}
        backstop = str(math.ceil(command.timeout_seconds) + agent.BACKSTOP_SECONDS)
        workdir = command.workdir or self.request.spec.workspace.path
        argv = ["/bin/sh", "-c", INSIDE, "sh", workdir, backstop, *command.argv]
        stdout, stderr = Output(command.output_limit), Output(command.output_limit)
        async with self._one_at_a_time:
            running = asyncio.create_task(self._run(argv, values, command.stdin, stdout, stderr))
            timed_out = await until_its_end(running, command, self)
        if self.stopped:
            raise SandboxError(f"the sandbox of session {self.request.session_id} was stopped during a command")
        self.instance.enter()  # raises when the instance died, and the command with it
        if self.disk is not None:
            await sandbox_files.settle(self.disk)
        code = running.result()
        return ExecResult(
            exit_code=None if timed_out else code if code >= 0 else 128 - code,
            stdout=stdout.value(),
            stderr=stderr.value(),
            timed_out=timed_out,
        )

    async def stop(self) -> None:
        self.stopped = True
        if self.server is not None:
            self.server.close()
        await self.end()
        if self.disk is not None and self.disk.view is not None:
            await self.disk.view.close()
        await to_its_end(sandbox_files.remove, self.instance.scratch)
        self.instance.claim.release()

    async def _run(
        self, argv: Sequence[str], environment: dict[str, str], stdin: bytes, stdout: Output, stderr: Output
    ) -> int:
        process = await self._spawn(argv, environment)
        await _communicate(process, stdin, stdout, stderr)
        return process.returncode or 0

    async def _spawn(self, argv: Sequence[str], environment: dict[str, str]) -> asyncio.subprocess.Process:
        if self.stopped:
            raise SandboxError(f"the sandbox of session {self.request.session_id} is stopped")
        through = [*(self.cgroup.enter if self.cgroup is not None else ()), *self.limits, *self.instance.enter()]
        try:
            return await processes.start(
                [*through, *argv],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={"PATH": agent.PATH, agent.EXPORTS: agent.exports(environment)},
                cwd="/",
            )
        except (OSError, ValueError) as error:  # too long, or a zero byte
            raise SandboxError(f"a command could not be started: {error}") from error

    async def kill_agent(self) -> None:
        killer = await self._spawn(agent.KILL, {})
        await killer.communicate()

    async def end(self) -> None:
        await to_its_end(self.instance.end)


def process_limits(memory_mb: int, file_mb: int) -> list[str]:
    """Return `ApptainerSandbox.limits` for these limits."""
    values = {"data": memory_mb * MEBIBYTE, "fsize": file_mb * MEBIBYTE, "core": 0}
    return ["prlimit", *(f"--{name}={value}" for name, value in values.items()), "--"]


async def _communicate(process: asyncio.subprocess.Process, stdin: bytes, stdout: Output, stderr: Output) -> None:
    """Write the input and collect the output until the command has ended and all its pipes are closed."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    await asyncio.gather(
        feed_stdin(process.stdin, stdin), stdout.read(process.stdout), stderr.read(process.stderr), process.wait()
    )
