"""One `bwrap` process from its start, with the command held back, until nothing of it is left.

The command waits (`--block-fd`) until its limits are set and the gateway listens. The options are passed by file
descriptor and not on the command line, where every user of the machine could read the session's key. The filter of
system calls (`--seccomp`) holds for the command and for all processes that it starts. `bwrap` reports on another
descriptor (`--json-status-fd`): first the sandbox's PID 1, and at the end the command's exit code. It reports the exit
code only if the command was started, which tells a broken sandbox from a failed command.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import signal
from collections.abc import Iterator, Sequence

from polar_gym.runtimes import SandboxError, output, processes
from polar_gym.runtimes.kernel import seccomp
from polar_gym.runtimes.output import Output


class BwrapProcess:
    """A running `bwrap`, made by `spawn`. The caller must call `end`."""

    def __init__(self, process: asyncio.subprocess.Process, status: int, release: int) -> None:
        self._process = process
        self._status = status
        self._release = release
        self._init: int | None = None
        """A pidfd of the sandbox's PID 1: readable when the whole PID namespace is gone."""
        self._unread = b""
        self._exit_code: int | None = None

    @classmethod
    async def spawn(cls, bwrap: Sequence[str], options: Sequence[str], argv: Sequence[str]) -> BwrapProcess:
        """Start `bwrap`, the last part of the argv `bwrap`; the command does not run before `release`.

        Raises `SandboxError`.
        """
        if broken := [part for part in (*options, *argv) if "\0" in part]:  # a NUL ends an option, and begins another
            raise SandboxError(f"a zero byte in an argument or a variable of a command: {broken[0][:200]!r}")
        with contextlib.ExitStack() as after_start, contextlib.ExitStack() as on_error:
            content = b"".join(os.fsencode(option) + b"\0" for option in options)
            arguments = after_start.enter_context(_memory_file("bwrap-arguments", content))
            calls = after_start.enter_context(system_call_filter())
            status, status_write = os.pipe()
            after_start.callback(os.close, status_write)
            on_error.callback(os.close, status)
            block, release = os.pipe()
            after_start.callback(os.close, block)
            on_error.callback(os.close, release)
            passed = {
                **{"--args": arguments, "--seccomp": calls},
                **{"--json-status-fd": status_write, "--block-fd": block},
            }
            flags = [part for flag, descriptor in passed.items() for part in (flag, str(descriptor))]

            async def undo(process: asyncio.subprocess.Process) -> None:
                on_error.pop_all()
                after_start.close()
                await cls(process, status, release).end()

            try:
                # `--die-with-parent` follows the thread that forks, which here is the event loop's own.
                process = await processes.start(
                    [*bwrap, *flags, "--", *argv],
                    undo=undo,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=list(passed.values()),
                    env={},
                )
            except OSError as error:
                raise SandboxError(f"{bwrap[-1]} could not be started: {error}") from error
            on_error.pop_all()
            return cls(process, status, release)

    async def pid(self) -> int:
        """Return the sandbox's PID 1 as the host counts. Raises `SandboxError` when the sandbox could not be made.

        A `bwrap` that fails may have ended before or after the PID of its child was read.
        """
        report = await self._next_report()
        if report:
            pid = json.loads(report)["child-pid"]
            with contextlib.suppress(ProcessLookupError):
                self._init = os.pidfd_open(pid)
                return pid
        assert self._process.stderr is not None
        said = (await self._process.stderr.read()).decode(errors="replace").strip()
        raise SandboxError(f"bwrap failed: {said or 'it was killed from outside before its command could start'}")

    def release(self) -> None:
        """Let the command start. Where `bwrap` has failed already, its exit says so."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._release, b"\0")

    async def communicate(self, stdin: bytes, stdout: Output, stderr: Output) -> None:
        await output.communicate(self._process, stdin, stdout, stderr)

    async def drain(self, stdout: Output, stderr: Output) -> None:
        await output.drain(self._process, stdout, stderr)

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def end(self) -> None:
        """Kill what still runs, and wait until the kernel has removed all processes."""
        if self._init is None:
            with contextlib.suppress(SandboxError):
                await self.pid()
        self.kill()
        os.close(self._release)
        if self._init is not None:
            # `--die-with-parent` sends the same signal, but only once the sandbox has come far enough to ask for it.
            # A sandbox whose `bwrap` was killed before that would never end, and hold the pipes open.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            await _readable(self._init)
            os.close(self._init)
        await self._process.wait()
        if report := await self._next_report():
            self._exit_code = json.loads(report).get("exit-code")
        os.close(self._status)

    def exit_code(self, stderr: bytes, *, out_of_memory: bool) -> int:
        """Return the command's exit code. Raises `SandboxError` when `bwrap` failed before it started the command.

        `out_of_memory`: whether the command used up the sandbox's memory. `bwrap` may be what the kernel killed then.
        """
        if self._exit_code is not None:
            return self._exit_code
        if out_of_memory and self._process.returncode == -signal.SIGKILL:
            return 128 + signal.SIGKILL
        message = stderr.decode(errors="replace").strip()
        if message.startswith("bwrap: execvp"):
            return 127  # the exit code of a shell for a program that it does not find
        raise SandboxError(f"bwrap failed: {message or f'exit code {self._process.returncode}'}")

    async def _next_report(self) -> bytes:
        """Return the next line of the status descriptor, which may come in pieces; b"" at its end."""
        while b"\n" not in self._unread:
            await _readable(self._status)
            piece = os.read(self._status, 4096)
            if not piece:
                break
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def system_call_filter() -> contextlib.AbstractContextManager[int]:
    """Return a descriptor for `--seccomp`. Raises `SandboxError`."""
    return _memory_file("bwrap-seccomp", seccomp.program(platform.machine()))


@contextlib.contextmanager
def _memory_file(name: str, content: bytes) -> Iterator[int]:
    descriptor = os.memfd_create(name, 0)
    try:
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(descriptor)
