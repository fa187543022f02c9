"""Reads the work that an agent left, before its sandbox is removed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from polar_gym.runtimes import LeftoverError, Sandbox, SandboxError, WholeSandbox
from polar_gym.schema import Artifacts
from polar_gym.workspaces.diff import UnreadableWorkspaceError, left_behind, snapshot_diff

READ_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work that an agent left in its sandbox."""

    diff: bytes = b""
    """The agent's changes to its workspace."""
    problem: str = ""
    """Why no diff could be taken, through the agent's own doing."""
    failure: str = ""
    """Why no diff could be taken, through a fault of the sandbox."""
    image: str = ""
    """The image of all files that the agent left, instead of a diff, where the sandbox has the scope `container`."""


async def read_work(
    sandbox: Sandbox, workspace_path: str, base: bytes | Path, artifacts: Artifacts, *, whole: bool = False
) -> Work:
    """Return the agent's work. `base`: see `workspaces.diff.snapshot_diff`, or its file; empty: no changes are read.

    The files that no diff carries are noted in `artifacts` first, and stay there if the session is then cancelled.
    """
    limit = asyncio.timeout(READ_SECONDS)
    try:
        if isinstance(sandbox, WholeSandbox) and whole:
            return Work(image=await sandbox.keep())  # which has a limit of its own, by the size of the files
        async with limit:
            artifacts.not_carried = await left_behind(sandbox, workspace_path)
            archive = await asyncio.to_thread(base.read_bytes) if isinstance(base, Path) else base
            diff = await snapshot_diff(sandbox, workspace_path, archive) if archive else b""
    except (UnreadableWorkspaceError, LeftoverError) as error:
        return Work(problem=str(error))
    except (SandboxError, OSError) as error:  # a runtime may raise a TimeoutError of its own
        late, unread = f"not done within {READ_SECONDS:g} seconds", f"the agent's changes could not be read: {error}"
        return Work(failure=late if limit.expired() else unread)
    return Work(diff=diff)
