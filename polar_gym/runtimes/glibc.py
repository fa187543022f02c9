"""What a program that was built for glibc needs in an image that has none (musl, or a bare static busybox).

The harness toolchain is mounted from the gateway's machine, and so can be the loader and the libraries it was linked
with, at the paths where that loader looks for them by itself. Programs of the image never look there, so nothing of
theirs changes; an image that has glibc keeps its own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from polar_gym.runtimes import TOOLCHAIN, Mount

LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")
"""Where programs expect glibc's loader: one of these exists in an image that has it."""

GIT = "/usr/bin/git"

FAMILY = ("libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "libresolv.so.2", "librt.so.1", "libutil.so.1")
"""glibc's own parts, for programs inside packages, which are not looked at."""


def support(mounts: Sequence[Mount], *, git: bool) -> list[Mount]:
    """More mounts, with which the programs among these start without the image's help; `git`: it is needed too, as the
    image has none, and changes to a workspace are read with it. Blocks."""
    more = [Mount(Path(found).resolve(), GIT)] if git and (found := shutil.which("git")) else []
    programs = [mount.host for mount in (*mounts, *more) if mount in more or is_toolchain(mount)]
    needed = {path for program in (Path("/bin/sh"), *programs) if program.is_file() for path in _needed(program)}
    for library in [path for path in needed if path.name == "libc.so.6"]:
        needed |= {sibling for name in FAMILY if (sibling := library.with_name(name)).exists()}
    return [*more, *(Mount(path.resolve(), str(path)) for path in sorted(needed))]


def is_toolchain(mount: Mount) -> bool:
    return mount.inside.startswith(f"{TOOLCHAIN}/")


@cache
def _needed(program: Path) -> tuple[Path, ...]:
    """The loader and the libraries of a program; none where it is static, or a script."""
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, timeout=60, check=False)
    return tuple(Path(path) for path in re.findall(r"(?:=> |^\s*)(/\S+) \(0x", done.stdout, re.MULTILINE))


def node_advice(image: str, said: str) -> str:
    """What to say of an image in which the toolchain's node does not start."""
    return (
        f"runtime.image: the harness's node does not start in {image!r} ({said}); an image needs a glibc as new as "
        "node was built for (2.28 for the builds of nodejs.org) with libstdc++, or none at all (musl, busybox)"
    )
