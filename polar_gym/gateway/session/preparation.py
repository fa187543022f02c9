"""The files of a session on the gateway's machine, from which its sandboxes are made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polar_gym.harnesses import Harness
from polar_gym.harnesses.install import toolchain_mounts
from polar_gym.runtimes import Mount, Sandbox
from polar_gym.runtimes.agent import PATH
from polar_gym.runtimes.threads import to_its_end
from polar_gym.schema import RuntimeSpec
from polar_gym.workspaces.history import pack_baseline
from polar_gym.workspaces.repository import make_repository, pack_git_dir
from polar_gym.workspaces.venv import ensure_venv, inside, variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The files of one session on the gateway's machine."""

    executable: Sequence[str]
    """Argv prefix that starts the harness inside a sandbox; empty where the harness is no package."""
    mounts: Sequence[Mount]
    """The harness, and the virtual environment of the task's packages."""
    repository: Path | None
    """The workspace at its base commit; None: the image has the workspace, or the workspace is empty."""
    git_dir: bytes
    """The tar of the repository's `.git`; empty where there is no repository."""


async def prepare(spec: RuntimeSpec, harness: Harness, *, cache: Path, scratch: Path) -> Prepared:
    """Make the files of a session: the harness, the repository, and the virtual environment of the task's packages.

    The variables of that environment are added to `spec.environment`. Raises `InstallError`, `WorkspaceError`,
    `VenvError` or `OSError`.
    """
    mounts, executable = await asyncio.to_thread(toolchain_mounts, harness, cache)
    mounts = list(mounts)
    scratch.mkdir(parents=True)
    repository, git_dir = None, b""
    if spec.workspace.source is not None:
        repository = scratch / "repository"
        await to_its_end(make_repository, Path(spec.workspace.source), repository)
        git_dir = await asyncio.to_thread(pack_git_dir, repository)
    if spec.workspace.python_requirements:
        venv = await asyncio.to_thread(ensure_venv, spec.workspace.python_requirements, cache)
        mounts.append(Mount(venv, inside(venv)))
        spec.environment |= variables(venv, spec.environment.get("PATH", PATH))
    return Prepared(executable=executable, mounts=mounts, repository=repository, git_dir=git_dir)


async def base_of(sandbox: Sandbox, spec: RuntimeSpec, prepared: Prepared) -> bytes:
    """Return the tar of the `.git` that the agent's changes are read against; empty where nothing is to be read."""
    return await pack_baseline(sandbox, spec.workspace.path) if brings_workspace(spec) else prepared.git_dir


def brings_workspace(spec: RuntimeSpec) -> bool:
    """Return whether the workspace is what the image has in its place, with a history that is cut."""
    return spec.workspace.source is None and spec.image is not None and spec.scope == "workspace"
