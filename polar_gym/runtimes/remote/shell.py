"""Scripts and files for a sandbox whose relay is not up yet: through the provider."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

from polar_gym.runtimes import SandboxError
from polar_gym.runtimes.remote.provider import Handle, Provider
from polar_gym.runtimes.remote.streams import as_os_errors

SECONDS = 300.0


class Shell:
    """Runs scripts in one sandbox, and sends files to it."""

    def __init__(self, provider: Provider, handle: Handle, user: str | None = "root") -> None:
        """`user`: whose scripts they are; None: the provider's own user."""
        self._provider = provider
        self._handle = handle
        self._user = user

    async def run(self, script: str, *arguments: str, problem: str = "its image needs sh, tar and gzip") -> str:
        """Return what a script prints. Raises `SandboxError`."""
        command = shlex.join(["sh", "-c", script, "sh", *arguments])
        try:
            with as_os_errors():
                result = await self._provider.exec(self._handle, command, timeout_s=SECONDS, user=self._user)
        except OSError as error:
            raise SandboxError(f"the sandbox {self._handle.sandbox_id} runs no command: {error}") from error
        if result.error_type:
            said = f"{result.error_type}, exit code {result.return_code}: {(result.stderr or '').strip()}"
            raise SandboxError(f"the sandbox {self._handle.sandbox_id} runs no command: {said}")
        if result.return_code != 0:
            said = " ".join(f"{result.stdout or ''} {result.stderr or ''}".split()) or f"exit code {result.return_code}"
            raise SandboxError(f"the sandbox {self._handle.sandbox_id} could not be prepared ({said}): {problem}")
        return (result.stdout or "").strip()

    async def send(self, content: bytes | Path, inside: str) -> None:
        """Write a file. Raises `SandboxError`."""
        try:
            with tempfile.NamedTemporaryFile() as file, as_os_errors():
                if isinstance(content, bytes):
                    file.write(content)
                    file.flush()
                source = content if isinstance(content, Path) else Path(file.name)
                await self._provider.upload_file(self._handle, source, inside)
        except OSError as error:
            raise SandboxError(f"{inside} could not be sent to the sandbox: {error}") from error
