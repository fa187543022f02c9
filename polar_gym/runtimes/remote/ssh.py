"""The provider `ssh`: a user of a machine that answers SSH, with the calls of NeMo Gym's sandbox protocol that we use.

A sandbox is no more than that user's files and processes, so there is one at a time on each machine, and what it
reaches is for the machine's operator to limit.
"""

from __future__ import annotations

import asyncio
import shlex
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar_gym.runtimes import processes

OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15")
FAILED = 255
"""The exit code of `ssh` itself."""


@dataclass(frozen=True)
class SshHandle:
    sandbox_id: str
    provider_name: str = "ssh"
    raw: Any = None


@dataclass(frozen=True)
class SshResult:
    stdout: str | None
    stderr: str | None
    return_code: int
    error_type: str | None = None


class SshProvider:
    """Gives the user of one machine as the only sandbox."""

    name = "ssh"
    shares_machine = True

    def __init__(self, *, host: str, options: Sequence[str] = (), program: str = "ssh") -> None:
        """`host`: `user@machine`; `options`: further arguments of `ssh`, such as `-p 2222 -i KEY`."""
        self._ssh = (program, *OPTIONS, *options, host)

    def stream_argv(self, handle: SshHandle, command: str) -> list[str]:
        return [*self._ssh, command]

    async def create(self, spec: Any) -> SshHandle:
        if spec.image is not None:
            raise ValueError(f"image={spec.image!r}: a machine has no images; leave it out")
        handle = SshHandle(f"ssh-{uuid.uuid4().hex[:12]}")
        await self._checked(handle, "true", b"")
        return handle

    async def exec(
        self,
        handle: SshHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
    ) -> SshResult:
        if user is not None:
            raise ValueError(f"user={user!r}: commands run as the user that the host names")
        there = "" if cwd is None else f"cd {shlex.quote(cwd)} && "
        with_env = "".join(f"export {shlex.quote(f'{name}={value}')}; " for name, value in (env or {}).items())
        try:
            code, stdout, stderr = await processes.run([*self._ssh, f"{with_env}{there}{command}"], seconds=timeout_s)
        except TimeoutError:
            return SshResult(None, f"not done within {timeout_s} s", FAILED, "timeout")
        error = "sandbox" if code == FAILED else None
        return SshResult(stdout.decode(errors="replace"), stderr.decode(errors="replace"), code, error)

    async def upload_file(self, handle: SshHandle, source_path: Path, target_path: str) -> None:
        target = shlex.quote(target_path)
        content = await asyncio.to_thread(source_path.read_bytes)
        await self._checked(handle, f'mkdir -p "$(dirname {target})" && cat > {target}', content)

    async def status(self, handle: SshHandle) -> str:
        return "running" if (await self.exec(handle, "true", timeout_s=60)).return_code == 0 else "unknown"

    async def serialize_handle(self, handle: SshHandle, *, scope: str | None = None) -> dict[str, Any]:
        return {"sandbox_id": handle.sandbox_id}

    async def connect(self, descriptor: dict[str, Any]) -> SshHandle:
        return SshHandle(descriptor["sandbox_id"])

    async def close(self, handle: SshHandle) -> None:
        """Do nothing: the machine stays."""

    async def aclose(self) -> None:
        """Do nothing: each command has a connection of its own."""

    async def _checked(self, handle: SshHandle, command: str, stdin: bytes) -> None:
        code, _, stderr = await processes.run(self.stream_argv(handle, command), stdin)
        if code != 0:
            raise RuntimeError(f"{shlex.join(self._ssh)} exited with {code}: {stderr.decode(errors='replace').strip()}")
