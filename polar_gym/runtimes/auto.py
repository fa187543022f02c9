"""The runtime of configs that choose none: docker where a daemon answers, else bubblewrap.

Without a daemon, a task with an image runs in apptainer. The choice is made at the first sandbox, because asking a
daemon blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

from polar_gym.registry import Names
from polar_gym.runtimes import RUNTIMES, Runtime, Sandbox, SandboxError, SandboxRequest
from polar_gym.runtimes.limits import LimitOptions
from polar_gym.schema import PluginSpec

log = logging.getLogger(__name__)

CANDIDATES = ("docker", "apptainer", "bubblewrap")


class AutoOptions(LimitOptions):
    """The options that all runtimes take; the chosen runtime gets them."""

    scratch: Annotated[Path | None, Names.OTHER] = None
    """The directory of the sandboxes' files on the gateway's machine. Default: the system's temporary directory."""


class Auto:
    """Makes the other runtimes, and starts sandboxes with the first one that lacks nothing."""

    Options = AutoOptions
    shows_usr = True

    def __init__(self, options: AutoOptions) -> None:
        self._all: Sequence[Runtime] = [
            RUNTIMES.make(PluginSpec.model_validate({"name": name, **options.model_dump()})) for name in CANDIDATES
        ]
        self._docker, self._apptainer, self._bubblewrap = self._all
        self._lacks: dict[Any, list[str]] = {}
        self._plain: Runtime | None = None
        """The runtime of sandboxes without an image, chosen at the first one."""
        self._asking = asyncio.Lock()

    def check(self) -> list[str]:
        """Return what bubblewrap, the last resort, lacks; nothing where docker can be used."""
        return self._bubblewrap.check() if self._docker.check() else []

    def caveats(self) -> list[str]:
        return (self._bubblewrap if self._docker.check() else self._docker).caveats()

    async def prepare(self, images: Collection[str]) -> None:
        await (await self._choose(image=True)).prepare(images)

    async def start(self, request: SandboxRequest) -> Sandbox:
        return await (await self._choose(image=request.spec.image is not None)).start(request)

    async def reap(self, session_ids: Collection[str]) -> int:
        """Remove what is left of these sessions in every runtime that works here, and return how many there were.

        Each removes all of their scratch directories. So those come first that find more by a directory: Apptainer its
        instances and control groups, bubblewrap control groups. All are asked; then the first error is raised.
        """
        removed, failed = 0, list[SandboxError]()
        for runtime in (self._apptainer, self._bubblewrap, self._docker):
            try:
                removed += 0 if await self._lacking(runtime) else await runtime.reap(session_ids)
            except SandboxError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return removed

    async def close(self) -> None:
        for runtime in self._all:
            await runtime.close()

    async def _choose(self, *, image: bool) -> Runtime:
        """Return the runtime of a sandbox. Those without an image stay where the first one was. A sandbox with an image
        for which there is none asks again: a daemon may have been starting."""
        if not image:
            self._plain = self._plain or (self._bubblewrap if await self._lacking(self._docker) else self._docker)
            return self._plain
        for again in (False, True):
            for runtime in (self._docker, self._apptainer):
                if not await self._lacking(runtime, again=again):
                    return runtime
        return self._bubblewrap

    async def _lacking(self, runtime: Runtime, *, again: bool = False) -> list[str]:
        """Return what this runtime lacks. The question is asked once, off the event loop; `again`: anew."""
        async with self._asking:
            if runtime not in self._lacks or again:
                self._lacks[runtime] = await asyncio.to_thread(runtime.check)
                log.info("runtime=auto: %s lacks %s", type(runtime).__name__, self._lacks[runtime] or "nothing")
            return self._lacks[runtime]


RUNTIME = Auto
