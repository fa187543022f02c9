"""Sandboxes of providers, on other machines: one adapter for all that speak NeMo Gym's sandbox protocol.

`provider` is the protocol and finds providers by name, `streams` opens a stream of bytes into a sandbox, `layers` packs
what other runtimes mount, and `sandbox` is one sandbox. `ssh` is a provider of our own.

The gateway needs no address that a sandbox could reach: a relay in the sandbox (`polar_gym.runtimes.relay`) carries the
harness's connections over a stream that the gateway opens. So a sandbox can do without any network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from polar_gym.errors import ConfigError
from polar_gym.registry import Names
from polar_gym.runtimes import Command, SandboxError, SandboxRequest, scratch_directory
from polar_gym.runtimes.glibc import NodeCheck
from polar_gym.runtimes.limits import LimitOptions
from polar_gym.runtimes.remote.layers import LARGE, Layer, fill, pack
from polar_gym.runtimes.remote.provider import Connectable, Handle, Provider, closing_all, find, labels, spec_of
from polar_gym.runtimes.remote.sandbox import HANDLE, RemoteSandbox, end
from polar_gym.runtimes.remote.shell import Shell
from polar_gym.runtimes.remote.streams import DEFAULTS, as_os_errors, is_streamed, stream
from polar_gym.runtimes.remote.volumes import added, volumes
from polar_gym.runtimes.threads import finish, to_its_end

log = logging.getLogger(__name__)

WAYS = (
    "docker exec, apptainer exec, a session with pipes (create_pty), a program of its own (stream_argv), or a route "
    "for WebSockets (endpoint)"
)
FILL_SECONDS = 900.0
"""The age at which a sandbox ends that fills volumes, where its gateway died."""
SESSION, SANDBOX, NODE = "polar-gym.session", "polar-gym.sandbox", "polar-gym.node"
"""The metadata of each sandbox."""

NOT_ISOLATED = "isolates nothing: a harness may read and change all that this user may, and reaches the network"


def _shares_its_machine(name: str, provider: object) -> bool:
    """Return whether a provider's sandboxes are no more than a user of a machine that has others."""
    return name == "local" or getattr(provider, "shares_machine", False)


class RemoteOptions(LimitOptions):
    provider: Annotated[str, Names.OTHER] = Field(min_length=1)
    """The provider's name: `ssh`, one of NeMo Gym's (docker, apptainer, opensandbox, local), or an entry point of the
    group nemo_gym.sandbox_providers."""
    config: Annotated[dict[str, Any], Names.OTHER] = Field(default_factory=dict)
    """The arguments of the provider's constructor. For docker and apptainer, those that shut the network are set."""
    options: Annotated[dict[str, Any], Names.OTHER] = Field(default_factory=dict)
    """The `provider_options` of each sandbox."""
    ttl_seconds: float | None = Field(default=None, gt=0)
    """The age at which the provider ends a sandbox by itself, where it can. Default: what the budgets of the
    session's stages allow."""
    accept_no_isolation: Annotated[bool, Names.OTHER] = Field(default=False, validate_default=True)
    """Must be true for a provider that isolates nothing (local)."""
    scratch: Annotated[Path | None, Names.OTHER] = None
    """The directory of the gateway's sockets. Default: the system's temporary directory."""

    @field_validator("provider")
    @classmethod
    def _has_a_stream(cls, name: str) -> str:
        if not is_streamed(name, find(name)):
            raise ValueError(f"this provider gives no stream of bytes into a sandbox; one of these is needed: {WAYS}")
        return name

    @field_validator("accept_no_isolation")
    @classmethod
    def _accepted(cls, value: bool, info: ValidationInfo) -> bool:
        if info.data.get("provider") == "local" and not value:
            raise ValueError(
                f"runtime.provider=local {NOT_ISOLATED}; set runtime.accept_no_isolation=true to accept that"
            )
        return value


class Remote:
    """Starts sandboxes of a provider."""

    Options = RemoteOptions
    confined = True

    def __init__(self, options: RemoteOptions) -> None:
        self.options = options
        limits = {"create": {"pids_limit": options.pids}} if options.provider == "docker" else {}
        config = _merged(_merged(DEFAULTS.get(options.provider, {}), limits), options.config)
        try:
            self._provider: Provider = find(options.provider)(**config)
        except Exception as error:
            raise ConfigError(
                f"runtime.provider={options.provider}: cannot be made with runtime.config={json.dumps(config)}: {error}"
            ) from error
        self._stream = stream(options.provider, self._provider)
        self._close_all = closing_all(options.provider, self._provider)
        self.confined = not _shares_its_machine(options.provider, self._provider)
        self._turn = None if self.confined else asyncio.Lock()
        """Held by the sandbox that has the paths of a shared machine."""
        self._node_check = NodeCheck()
        self._volumes = volumes(options.provider, self._provider) if self.confined else None
        self._full: set[str] = set()
        """The hashes of layers that the provider keeps."""
        self._filling = asyncio.Lock()

    def check(self) -> list[str]:
        """Return nothing: what a provider lacks is told by its constructor."""
        return []

    def caveats(self) -> list[str]:
        found = ["limits and the network are the provider's; its protocol limits no number of processes"]
        if not self.confined:
            found.append(f"runtime.provider={self.options.provider} {NOT_ISOLATED}")
        found_again = isinstance(self._provider, Connectable)
        if self._close_all is None and (self.confined or not found_again):
            which = "whose creation was not answered" if found_again else "of a dead gateway"
            found.append(
                f"a sandbox {which} lives until runtime.ttl_seconds, where the provider keeps to that: "
                f"{self.options.provider} cannot find it again"
            )
        return found

    async def prepare(self, images: Collection[str]) -> None:
        """Do nothing: the provider gets images where its sandboxes run."""

    async def start(self, request: SandboxRequest) -> RemoteSandbox:
        if request.spec.network == "full":
            raise SandboxError("runtime.network=full: runtime=remote opens no network; set runtime.network=gateway")
        layers = await pack(request.mounts)
        lifetime = self.options.ttl_seconds or request.lifetime_seconds
        async with contextlib.AsyncExitStack() as undo:
            if self._turn is not None:
                await undo.enter_async_context(self._turn)
            scratch = scratch_directory.make(request.session_id, self.options.scratch)
            undo.push_async_callback(to_its_end, scratch_directory.remove, scratch)
            kept = await self._filled(request, layers)
            until = time.time() + lifetime
            handle = await self._create(request, kept, lifetime)
            sandbox = RemoteSandbox(self._provider, handle, request, layers, scratch, self._turn, until)
            undo.pop_all()
            undo.push_async_callback(sandbox.give_up)
            await sandbox.start(*self._stream)
            image = str(request.spec.image)
            await self._node_check.check(
                request, image, image, lambda argv: sandbox.exec(Command(argv=argv, workdir="/"))
            )
            undo.pop_all()
            return sandbox

    async def _filled(self, request: SandboxRequest, layers: Sequence[Layer]) -> Mapping[str, Any]:
        """Return the `provider_options` that give a sandbox the layers that the provider keeps, once it has them."""
        kept = {each.digest: each for each in layers if each.archive.stat().st_size >= LARGE}
        if self._volumes is None or not kept:
            return {}
        async with self._filling:
            if not kept.keys() <= self._full:
                handle = await self._create(request, self._volumes.options(list(kept), True), FILL_SECONDS)
                try:
                    await fill(Shell(self._provider, handle), list(kept.values()))
                finally:
                    await end(self._provider, handle)
                self._full |= kept.keys()
        return self._volumes.options(list(kept), False)

    async def _create(self, request: SandboxRequest, kept: Mapping[str, Any], lifetime: float) -> Handle:
        """Return a new sandbox; where this is cancelled, none is left. Raises `SandboxError`."""
        options, own = self.options, {SANDBOX: uuid.uuid4().hex}
        metadata = {SESSION: request.session_id, **own, **({NODE: request.node} if request.node else {})}
        named = {"run_args": labels(metadata)} if options.provider == "docker" else {}
        spec = spec_of(
            image=request.spec.image,
            ttl_s=lifetime,
            ready_timeout_s=request.spec.init_timeout_seconds,
            metadata=metadata | dict(self._volumes.metadata if self._volumes else {}),
            resources={
                "cpu": options.cpus,
                "memory_mib": options.memory_mb,
                "disk_gib": options.disk_mb and math.ceil(options.disk_mb / 1024),
            },
            provider_options=added(added(options.options, kept), named),
            ports=tuple(port for port in self._stream[1:] if port),
        )
        creating = asyncio.ensure_future(self._provider.create(spec))
        try:
            with as_os_errors():
                return await finish(creating)
        except BaseException as error:
            await self._undo(creating, own)
            if not isinstance(error, OSError):
                raise
            raise SandboxError(f"runtime.provider={options.provider} made no sandbox: {error}") from error

    async def _undo(self, creating: asyncio.Future[Handle], own: Mapping[str, str]) -> None:
        """End the sandbox of a creation that was cancelled, or that failed: it may be there all the same."""
        try:
            with as_os_errors():
                if not creating.cancelled() and creating.exception() is None:
                    await self._provider.close(creating.result())
                elif self._close_all is not None:
                    await self._close_all(own)
        except OSError as error:
            log.error("a sandbox of runtime.provider=%s may be left: %s", self.options.provider, error)

    async def reap(self, session_ids: Collection[str]) -> int:
        """End the sandboxes that a killed gateway left of these sessions, and return how many were ended."""
        ended = 0
        try:
            with as_os_errors():
                if self._close_all is not None:
                    ended = sum([await self._close_all({SESSION: session_id}) for session_id in session_ids])
                for scratch in scratch_directory.orphans(session_ids, self.options.scratch):
                    if self._close_all is None and (scratch / HANDLE).exists():
                        ended += await self._end(**json.loads((scratch / HANDLE).read_text()))
                    await to_its_end(scratch_directory.remove, scratch)
        except OSError as error:
            raise SandboxError(f"sandboxes of {', '.join(session_ids)} could not be ended: {error}") from error
        return ended

    async def _end(self, handle: Mapping[str, Any], until: float, taken: Sequence[str] = ()) -> bool:
        """End the sandbox that another gateway described, and return whether it was there. A gateway of an earlier
        version described nothing that is `taken`."""
        assert isinstance(self._provider, Connectable)
        try:
            await end(self._provider, await self._provider.connect(handle), taken)
        except Exception:
            if time.time() < until:
                raise
            return False  # the provider has ended it at its deadline
        return True

    async def close(self) -> None:
        with as_os_errors():
            await self._provider.aclose()


def _merged(first: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `first` with the values of `over`, mapping by mapping."""
    merged = dict(first)
    for key, value in over.items():
        mine = merged.get(key)
        merged[key] = _merged(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return merged


RUNTIME = Remote
