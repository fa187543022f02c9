"""Sandboxes without a daemon and without root, from container images: each is one Apptainer instance.

The instance is a set of namespaces, in which the image, a writable overlay and the scratch directory's home, /tmp and
workspace are mounted; its PID 1 only waits. Commands join these namespaces (`nsenter`: a few milliseconds). They run as
the agent's uid where the gateway is root, else as the gateway's own uid. They have no rights and no way to get any, and
run under the filter of system calls that commands of bubblewrap have. An instance is recorded only in its scratch
directory, which also holds Apptainer's own configuration. So a process that finds that directory after a gateway's
death can end the instance.

With `network: full` the sandbox shares the machine's network, its loopback included.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from pydantic import Field

from polar_gym.paths import cache_dir
from polar_gym.registry import Names
from polar_gym.runtimes import Command, SandboxError, SandboxRequest, processes, sandbox_files, scratch_directory
from polar_gym.runtimes.apptainer import seccomp
from polar_gym.runtimes.apptainer.images import Form, Image, Images
from polar_gym.runtimes.apptainer.instance import Instance, end_instances
from polar_gym.runtimes.apptainer.sandbox import ApptainerSandbox, process_limits
from polar_gym.runtimes.glibc import NodeCheck
from polar_gym.runtimes.kernel.disk import Disk
from polar_gym.runtimes.kernel.listener import serve_on_host
from polar_gym.runtimes.limits import LimitOptions
from polar_gym.runtimes.threads import to_its_end


class ApptainerOptions(LimitOptions):
    scratch: Annotated[Path | None, Names.OTHER] = None
    """The directory of the sandboxes' files on the gateway's machine. Default: the system's temporary directory."""
    program: Annotated[str, Names.OTHER] = "apptainer"
    """Apptainer's own program: a name on PATH, or a path."""
    images: Annotated[Path | None, Names.OTHER] = None
    """The directory of converted images. Default: `images` in polar-gym's cache."""
    form: Form = "directory"
    """The form that images are converted to: directories start faster, SIF files are one file each."""
    file_mb: int = Field(default=4096, gt=0)
    """The largest size of one file."""


class Apptainer:
    """Starts sandboxes as Apptainer instances."""

    Options = ApptainerOptions
    shows_usr = True

    def __init__(self, options: ApptainerOptions) -> None:
        self.options = options
        # Apptainer's commands get a PATH of their own, in which a name would not be found.
        self._program = shutil.which(options.program) or options.program
        self._images = Images(self._program, options.images or cache_dir() / "images", options.form)
        self._node_check = NodeCheck()

    def check(self) -> list[str]:
        missing = processes.missing({"nsenter": "util-linux", "prlimit": "util-linux", "tar": "tar"})
        if not shutil.which(self._program):
            missing.append(
                f"{self.options.program} is missing; install it from https://apptainer.org/docs/admin/latest/"
                "installation.html, and name it with runtime.program where it is not on PATH"
            )
            return missing
        done = subprocess.run([self._program, "--version"], capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            missing.append(f"{self.options.program} does not run: {done.stderr.strip()}")
        return missing + seccomp.check()

    def caveats(self) -> list[str]:
        return sandbox_files.caveats(self.options)

    async def start(self, request: SandboxRequest) -> ApptainerSandbox:
        if not shutil.which(self._program):
            raise SandboxError(f"{self.options.program} is missing; see: polar-gym doctor")
        image = await to_its_end(self._images.get, request.spec.image)
        scratch, claim = await sandbox_files.make(request.session_id, self.options.scratch)
        instance = Instance(self._program, scratch, self._images.cache, claim)
        limits = process_limits(self.options.memory_mb, self.options.file_mb)
        sandbox = ApptainerSandbox(instance, image, request, limits)
        try:
            sandbox.cgroup = await to_its_end(sandbox_files.limit, scratch, self.options)
            sandbox.disk = own = await sandbox_files.own_disk(scratch, self.options, claim)
            await self._start_instance(instance, image, request, own)
            if request.served is not None and request.spec.network == "full":
                sandbox.base_url, sandbox.server = await serve_on_host(request.served)
            elif request.served is not None:
                sandbox.server = await request.served(await instance.listen())
            await self._node_check.check(
                request, image.name, str(image.path), lambda argv: sandbox.exec(Command(argv=argv, workdir="/"))
            )
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def prepare(self, images: Collection[str]) -> None:
        """Convert these images before the first sandbox asks for one. Raises `SandboxError`."""
        for image in images:
            await to_its_end(self._images.get, image)

    async def reap(self, session_ids: Collection[str]) -> int:
        """End what a killed gateway left of these sessions, and return how many scratch directories there were."""
        orphans = scratch_directory.orphans(session_ids, self.options.scratch)
        for scratch in orphans:
            await to_its_end(end_instances, scratch)
            await to_its_end(sandbox_files.remove, scratch)
        return len(orphans)

    async def close(self) -> None:
        """Do nothing: the runtime holds nothing between sandboxes."""

    async def _start_instance(self, instance: Instance, image: Image, request: SandboxRequest, own: Disk) -> None:
        """Start the instance with its workspace. A view of the workspace ends here: the instance has it mounted."""
        view, claim = None, instance.claim
        if request.workspace is None:
            if request.spec.image is not None:
                content = await to_its_end(self._images.read, image, request.spec.workspace.path)
                await to_its_end(sandbox_files.unpack_workspace, content, own, claim)
        elif os.geteuid() == 0:
            view = await sandbox_files.show_workspace(request.workspace, own, claim, request.own_files)
        else:  # in the user namespace that Apptainer makes, the view would belong to root
            await sandbox_files.copy_workspace(request.workspace, own, claim)
        try:
            await instance.start(image, request, (view or own).enter)
        finally:
            if view is not None:
                await view.close()


RUNTIME = Apptainer
