"""A writable view of a directory that stays as it is: overlayfs where the kernel allows it.

The view is mounted in a mount namespace of its own, which a small process holds open and commands enter. The process
ends when its standard input does, so a killed gateway leaves no mount behind. As root, everything in the view is the
agent's: the mount maps root to the agent (`idmap`), which costs the same for any number of files. Where the kernel
cannot, or files may not be root's, they are given to the agent one by one, which copies names and modes but no content
(`metacopy`). Without root, the view is mounted in a user
namespace, in which the gateway's own files belong to the agent already.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polar_gym.runtimes import agent, processes
from polar_gym.runtimes.kernel import idmap

MOUNT = """
set -e
lower=$1 at=$2 options=$3 uid=$4
shift 4
mapped() {
    [ $# -gt 0 ] && "$@" "$lower" "$at" "$uid" &&
        mount -t overlay polar-gym -o "lowerdir=$at,$options" "$at"
}
given() {
    mount -t overlay polar-gym -o "lowerdir=$lower,$options" "$at"
    [ -z "$uid" ] || chown -R -h "$uid:$uid" "$at"
}
mapped "$@" 2> /dev/null || given
echo ready
exec cat
"""
"""The script that mounts a view; its arguments are those of `view`, and the program that maps owners, if any."""


class OverlayError(Exception):
    """This machine cannot mount such a view, or another file system. The message says why."""


@dataclass(frozen=True, slots=True)
class View:
    """A mounted view; commands that start with `enter` see it."""

    holder: asyncio.subprocess.Process
    enter: tuple[str, ...]

    async def close(self) -> None:
        if self.holder.returncode is None:
            self.holder.kill()
        await self.holder.wait()


async def view(
    lower: Path, upper: Path, work: Path, at: Path, *, uid: int, through: Sequence[str] = (), roots: bool = False
) -> View:
    """Show `lower` at `at`, and keep in `upper` what is written there. All four directories must exist.

    `uid`: the agent's, to whom everything in the view is given as root. `through`: an argv prefix, behind which the
    directories are seen. `roots`: all files of `lower` are root's, if this user is root. Raises `OverlayError`.
    """
    if any(character in f"{lower}{upper}{work}{at}" for character in ",:\\"):
        raise OverlayError(f"no overlay can be made of a path with a comma, colon or backslash: {lower}")
    root = os.geteuid() == 0
    options = f"upperdir={upper},workdir={work},{'metacopy=on' if root else 'userxattr'}"
    mapping = (sys.executable, "-I", "-S", idmap.__file__) if root and roots else ()
    return await hold(through, MOUNT, str(lower), str(at), options, str(uid) if root else "", *mapping)


async def hold(through: Sequence[str], script: str, *arguments: str) -> View:
    """Run a script of `sh -c` that mounts, prints "ready" and lasts as `cat` does, in a mount namespace of its own.

    Raises `OverlayError`.
    """
    unshare, nsenter = shutil.which("unshare"), shutil.which("nsenter")
    if unshare is None or nsenter is None:
        raise OverlayError("unshare and nsenter are missing; install them with: apt-get install util-linux")
    root = os.geteuid() == 0
    user = () if root else ("--user", "--map-root-user")
    spaces = (*user, "--mount", "--propagation", "slave")
    holder = await processes.start(
        [*through, unshare, *spaces, "/bin/sh", "-c", script, "sh", *arguments],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": agent.PATH, "LC_ALL": "C.UTF-8"},
    )
    assert holder.stdout is not None
    assert holder.stderr is not None
    namespaces = () if root else ("--user", "--preserve-credentials")
    made = View(holder, (nsenter, "--target", str(holder.pid), "--mount", *namespaces, "--"))
    try:
        if await holder.stdout.readline() != b"ready\n":
            raise OverlayError((await holder.stderr.read()).decode(errors="replace").strip())
    except BaseException:
        await made.close()
        raise
    return made
