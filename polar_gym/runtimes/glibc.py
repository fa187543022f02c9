"""The parts of the gateway's machine that a sandbox needs because its image lacks them.

An image may have no glibc (musl, or a bare static busybox), and the harness toolchain was built for glibc. The
toolchain is mounted from the gateway's machine. The loader and the libraries that it was linked with are mounted too,
at the paths where that loader looks for them. Programs of the image never look there, so nothing changes for them. An
image that has glibc keeps its own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path

from polar_gym.runtimes import NODEJS, TOOLCHAIN, ExecResult, Mount, SandboxError, SandboxRequest, agent

LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")
"""The paths at which programs expect glibc's loader: one of them exists in an image with glibc."""

GIT = "/usr/bin/git"

FAMILY = ("libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "libresolv.so.2", "librt.so.1", "libutil.so.1")
"""glibc's own parts. They are always mounted, because the needs of programs inside packages are not looked up."""


def mounts_of(request: SandboxRequest, *, has_glibc: bool, has_git: bool) -> list[Mount]:
    """Return the mounts of a sandbox: the requested ones, and those that its image lacks. Blocks.

    Without an image, the latter are the machine's /usr and the files of /etc that its programs need.
    """
    mounts = list(request.mounts)
    if request.spec.image is None:
        mounts += [Mount(Path("/usr"), "/usr"), *(Mount(path.resolve(), str(path)) for path in agent.host_etc())]
    elif not has_glibc and any(map(_is_toolchain, mounts)):
        mounts += _support(mounts, git=not has_git)
    return mounts


def _support(mounts: Sequence[Mount], *, git: bool) -> list[Mount]:
    """Return more mounts, with which the programs among these mounts start without the image's help.

    `git`: mount git too, because the image has none, and changes to a workspace are read with git.
    """
    more = [Mount(Path(found).resolve(), GIT)] if git and (found := shutil.which("git")) else []
    programs = [mount.host for mount in (*mounts, *more) if mount in more or _is_toolchain(mount)]
    needed = {path for program in (Path("/bin/sh"), *programs) if program.is_file() for path in needed_by(program)}
    for library in [path for path in needed if path.name == "libc.so.6"]:
        needed |= {sibling for name in FAMILY if (sibling := library.with_name(name)).exists()}
    return [*more, *(Mount(path.resolve(), str(path)) for path in sorted(needed))]


def _is_toolchain(mount: Mount) -> bool:
    return mount.inside.startswith(f"{TOOLCHAIN}/")


@cache
def needed_by(program: Path) -> tuple[Path, ...]:
    """Return the loader and the libraries of a program; none where the program is static, or a script."""
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, timeout=60, check=False)
    return tuple(Path(path) for path in re.findall(r"(?:=> |^\s*)(/\S+) \(0x", done.stdout, re.MULTILINE))


class NodeCheck:
    """Asks whether the toolchain's node starts in an image; for each image in which it does, only once."""

    def __init__(self) -> None:
        self._starts_in: set[str] = set()

    async def check(
        self,
        request: SandboxRequest,
        name: str,
        image_id: str,
        run: Callable[[Sequence[str]], Awaitable[ExecResult]],
    ) -> None:
        """Raise `SandboxError` where node does not start in the image of this name and id.

        `run` runs a command in a sandbox of that image.
        """
        needed = request.spec.image is not None and any(mount.inside == NODEJS for mount in request.mounts)
        if not needed or image_id in self._starts_in:
            return
        result = await run([NODEJS, "--version"])
        if result.exit_code != 0:
            said = (result.stderr or result.stdout).decode(errors="replace").strip()
            raise SandboxError(
                f"runtime.image: the harness's node does not start in {name!r} ({said}); an image needs a glibc as "
                "new as node was built for (2.28 for the builds of nodejs.org) with libstdc++, or none at all (musl, "
                "busybox)"
            )
        self._starts_in.add(image_id)
