"""What a provider of sandboxes offers: NeMo Gym's protocol (0.7), and how a provider is found by its name.

The protocol is `nemo_gym/sandbox/providers/base.py`. What we call of it is repeated here because nemo-gym 0.7 runs on
few Pythons, and providers of other packages need not import it. Where NeMo Gym is loaded, providers get its own
records.
"""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from polar_gym.runtimes import processes
from polar_gym.runtimes.remote.ssh import SshProvider

GROUP = "nemo_gym.sandbox_providers"
BASE = "nemo_gym.sandbox.providers.base"
REGISTRY = "nemo_gym.sandbox.providers.registry"
NEEDS = "nemo-gym >= 0.7, which asks for Python >= 3.13.14"


@dataclass(frozen=True)
class Resources:
    """NeMo Gym's `SandboxResources`."""

    cpu: float | None = None
    memory_mib: int | None = None
    disk_gib: int | None = None
    gpu: int | None = None
    gpu_type: str | None = None


@dataclass(frozen=True)
class Spec:
    """NeMo Gym's `SandboxSpec`."""

    image: str | None = None
    ttl_s: float | None = None
    ready_timeout_s: float | None = None
    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    resources: Resources = field(default_factory=Resources)
    entrypoint: list[str] | None = None
    provider_options: dict[str, Any] = field(default_factory=dict)
    ports: tuple[int, ...] = ()


@dataclass(frozen=True)
class PtySpec:
    """NeMo Gym's `SandboxPtySpec`."""

    command: str | None = None
    cwd: str | None = None
    env: dict[str, str] | None = None
    rows: int = 24
    cols: int = 80
    user: str | int | None = None
    pty: bool = True


class Handle(Protocol):
    """A sandbox; `raw` is the provider's own."""

    sandbox_id: str
    provider_name: str
    raw: Any


class ExecResult(Protocol):
    @property
    def stdout(self) -> str | None: ...
    @property
    def stderr(self) -> str | None: ...
    @property
    def return_code(self) -> int: ...
    @property
    def error_type(self) -> str | None: ...


class Provider(Protocol):
    name: str

    async def create(self, spec: Any) -> Handle: ...
    async def exec(
        self,
        handle: Handle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
    ) -> ExecResult: ...
    async def upload_file(self, handle: Handle, source_path: Path, target_path: str) -> None: ...
    async def status(self, handle: Handle) -> Any: ...
    async def close(self, handle: Handle) -> None: ...
    async def aclose(self) -> None: ...


class PtySession(Protocol):
    async def read(self, *, timeout_s: float | None = None) -> bytes: ...
    async def write(self, data: bytes) -> None: ...
    async def close(self) -> None: ...


@runtime_checkable
class SupportsPty(Protocol):
    """NeMo Gym's `SupportsSandboxPty`."""

    async def create_pty(self, handle: Any, spec: Any) -> PtySession: ...


@runtime_checkable
class SupportsStream(Protocol):
    """A capability outside of NeMo Gym's protocol: a program of this machine whose input and output are a command's."""

    def stream_argv(self, handle: Any, command: str) -> Sequence[str]:
        """Return the program's argv; `command` is for the sandbox's shell."""
        ...


class Endpoint(Protocol):
    """NeMo Gym's `SandboxEndpoint`."""

    @property
    def endpoint(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...


@runtime_checkable
class SupportsEndpoint(Protocol):
    """NeMo Gym's `SupportsSandboxEndpoint`."""

    async def endpoint(self, handle: Any, port: int) -> Endpoint: ...


@runtime_checkable
class SupportsSharedStorage(Protocol):
    """NeMo Gym's `SupportsSandboxSharedStorage`."""

    def shared_volume_options(
        self, source: str | None, target: str, *, read_only: bool = False
    ) -> Mapping[str, Sequence[Any]]: ...
    def shared_volume_metadata(self) -> Mapping[str, str]: ...


@runtime_checkable
class Connectable(Protocol):
    """NeMo Gym's `ConnectableProvider`."""

    async def serialize_handle(self, handle: Any, *, scope: str | None = None) -> dict[str, Any]: ...
    async def connect(self, descriptor: Any) -> Handle: ...


@runtime_checkable
class SupportsCloseAll(Protocol):
    """A capability outside of NeMo Gym's protocol: sandboxes by their metadata, also those whose `create` never
    answered, and of which nobody has a handle."""

    async def close_all(self, metadata: Mapping[str, str]) -> int:
        """End all sandboxes that have these metadata, and return how many there were."""
        ...


CloseAll = Callable[[Mapping[str, str]], Awaitable[int]]


def closing_all(name: str, provider: object) -> CloseAll | None:
    """Return what ends this provider's sandboxes by their metadata; None: it cannot, and the protocol cannot either."""
    if isinstance(provider, SupportsCloseAll):
        return provider.close_all
    return _close_containers if name == "docker" else None


def labels(metadata: Mapping[str, str]) -> list[str]:
    """Return `run_args` of NeMo Gym's docker that keep the metadata, which it drops."""
    return [part for item in metadata.items() for part in ("--label", "=".join(item))]


async def _close_containers(metadata: Mapping[str, str]) -> int:
    wanted = [part for item in metadata.items() for part in ("--filter", f"label={'='.join(item)}")]
    _, found, problem = await processes.run(["docker", "ps", "--all", "--quiet", *wanted])
    if names := found.split():
        _, _, problem = await processes.run(["docker", "rm", "--force", "--volumes", *map(bytes.decode, names)])
    if problem:
        raise RuntimeError(problem.decode(errors="replace").strip())
    return len(names)


def find(name: str) -> type[Any]:
    """Return the class of a provider. Raises `ValueError` with what to do about it."""
    if name == SshProvider.name:
        return SshProvider
    offered = entry_points(group=GROUP)
    if name in offered.names:
        return offered[name].load()
    try:
        registry = importlib.import_module(REGISTRY)
    except ImportError as error:
        known = ", ".join(sorted({SshProvider.name, *offered.names}))
        raise ValueError(
            f"no installed package offers this provider (known, with entry points {GROUP}: {known}), and NeMo Gym's "
            f"own need {NEEDS}; this is Python {platform.python_version()}, where {error}"
        ) from error
    try:
        return registry.get_provider_class(name)
    except (ValueError, ImportError) as error:
        raise ValueError(str(error)) from error


def spec_of(resources: dict[str, Any], **values: Any) -> Any:
    """Return the description of a sandbox to create, as NeMo Gym's record where NeMo Gym is loaded."""
    base = sys.modules.get(BASE)
    if base is None:
        return Spec(resources=Resources(**resources), **values)
    return base.SandboxSpec(resources=resources, **values)


def pty_spec_of(command: str) -> Any:
    """Return the description of a command of root's with plain pipes."""
    base = sys.modules.get(BASE)
    return (PtySpec if base is None else base.SandboxPtySpec)(command=command, user="root", pty=False)
