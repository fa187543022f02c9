"""The files of a session on the gateway's machine, from which its sandboxes are made."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar_gym.harnesses import Harness
from polar_gym.harnesses.install import toolchain_mounts
from polar_gym.runtimes import Command, Mount, Sandbox
from polar_gym.runtimes.agent import PATH
from polar_gym.runtimes.sandbox_files import say_once
from polar_gym.schema import RuntimeSpec, TaskRequest
from polar_gym.workspaces.history import pack_baseline
from polar_gym.workspaces.shared import Repositories, Repository
from polar_gym.workspaces.venv import ensure_venv, inside, variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The files of one session on the gateway's machine."""

    executable: Sequence[str]
    """Argv prefix that starts the harness inside a sandbox; empty where the harness is no package."""
    mounts: Sequence[Mount]
    """The harness, and the virtual environment of the task's packages."""
    repository: Repository | None
    """The workspace at its base commit; None: the image has the workspace."""
    environment: Mapping[str, str]
    """The variables in its sandboxes: the request's, and those of the virtual environment."""


async def prepare(
    spec: RuntimeSpec, harness: Harness, *, cache: Path, repositories: Repositories, user: str
) -> Prepared:
    """Make the files of a session: the harness, the repository, and the virtual environment of the task's packages.

    The session gives its repository back as this `user`. Raises `InstallError`, `WorkspaceError`, `VenvError` or
    `OSError`.
    """
    mounts, executable = await asyncio.to_thread(toolchain_mounts, harness, cache)
    mounts = list(mounts)
    source = None if spec.workspace.source is None else Path(spec.workspace.source)
    of_image = source is None and spec.image is not None
    repository = None if of_image else await repositories.take(source, user)
    environment = dict(spec.environment)
    if spec.workspace.python_requirements:
        venv = await asyncio.to_thread(ensure_venv, spec.workspace.python_requirements, cache)
        mounts.append(Mount(venv, inside(venv)))
        environment |= variables(venv, environment.get("PATH", PATH))
    return Prepared(executable=executable, mounts=mounts, repository=repository, environment=environment)


async def base_of(sandbox: Sandbox, spec: RuntimeSpec, prepared: Prepared) -> bytes | Path:
    """Return the tar of the `.git` that the agent's changes are read against, or its file; empty where nothing is to be
    read."""
    if brings_workspace(spec):
        return await pack_baseline(sandbox, spec.workspace.path)
    return b"" if prepared.repository is None else prepared.repository.base


async def project_settings(sandbox: Sandbox, request: TaskRequest, harness: Harness) -> list[str]:
    """Return the files of the workspace from which the harness takes settings, and warn of them once for a task.

    `sandbox`: as it is before the harness starts.
    """
    agent, lean = request.agent, harness.lean_project_settings
    obeyed = lean if lean is not None and agent.profile == "lean" else harness.project_settings
    if not obeyed:
        return []
    argv = ["/bin/sh", "-c", 'for each; do [ ! -e "$each" ] || echo "$each"; done', "sh", *obeyed]
    found = (await sandbox.exec(Command(argv=argv))).stdout.decode(errors="replace").splitlines()
    if found:
        escape = lean is not None and set(lean).isdisjoint(found)
        mend = "set harness.profile=lean, or remove them" if escape else "remove them"
        say_once(
            f"task {request.task_id}: its workspace has {', '.join(found)}, from which harness={agent.name} takes "
            f"settings (prompt, tools, limits) in place of ours; {mend} from the task's files if that is not wanted"
        )
    return found


def brings_workspace(spec: RuntimeSpec) -> bool:
    """Return whether the workspace is what the image has in its place, with a history that is cut."""
    return spec.workspace.source is None and spec.image is not None and spec.scope == "workspace"
