"""A sandbox's share of the disk: a file system of its own, in a sparse file that is mounted for this sandbox alone.

The mounts are in a mount namespace that a small process holds open, as those of `copy_on_write`. So a killed gateway
leaves no mount and no loop device behind. Only root may mount such a file. Elsewhere the disk is shared, and a sandbox
that has filled it is found by the size of its files.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from polar_gym.runtimes import DiskFullError
from polar_gym.runtimes.kernel.copy_on_write import OverlayError, View, hold
from polar_gym.runtimes.limits import MEBIBYTE

LEAST_FREE = 64 * MEBIBYTE
"""The space that the disk must have for a sandbox to start. With less, the disk counts as full."""

SHARE = 8
"""No sandbox may write more than one part in so many of the space that is free when it starts."""

LEAST_SHARE = 512 * MEBIBYTE
"""No sandbox with a disk of its own starts where it may write less than this and less than `runtime.disk_mb`."""

RESERVE = 64 * MEBIBYTE
"""The largest reserve, which the agent does not get: a diff is taken inside the sandbox, and needs some space."""

AGENTS = ("home", "tmp", "workspace", "upper")
"""The agent's directories below `disk`; `upper` has what the agent writes to a workspace that is copied on write."""
ROOTS = ("work", "overlay/upper", "overlay/work")
"""Directories of the overlay of a workspace, and of that of an image."""

_LAYOUT = "-G 256 -O ^has_journal,^resize_inode,sparse_super2 -E lazy_itable_init=1,nodiscard,packed_meta_blocks=1"
"""A file system whose own blocks lie together: the image file has few pieces, and is quickly made and removed."""

_INODES = "-i 4096"
"""One for each block, so that small files use up the space, and not the inodes, which a diff needs too. The inodes take
1/16 of the space."""

MOUNT = f"""
set -e
cd "$1"
mkfs.ext4 -q -F -m 0 {_INODES} {_LAYOUT} -d disk image
mount -o loop,nosuid,nodev,discard,noinit_itable,nobarrier image disk
fallocate -l "$2" disk/reserve
echo ready
exec cat
"""
"""The script that mounts a copy of the directory `disk` over that directory. The file system is never read after a
crash, so no write waits for the machine's disk (`nobarrier`)."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk of one sandbox, below its scratch directory."""

    scratch: Path
    size: int
    """The bytes that the sandbox may write."""
    view: View | None = None
    """The sandbox's own file system; None: the sandbox writes to the machine's disk without a limit."""
    enter: tuple[str, ...] = ()
    """The argv prefix of a command that may use the sandbox's files."""

    def seen(self, path: Path) -> Path:
        """Return the path by which the gateway reaches a path that commands behind `enter` see."""
        return path if self.view is None else Path(f"/proc/{self.view.holder.pid}/root{path}")

    def settle(self) -> None:
        """Give the reserve to the commands that follow one that filled the sandbox's disk. Blocks.

        Raises `DiskFullError` where the machine's disk is full and this sandbox uses less than half of its share.
        """
        if self.view is not None:
            own = self.seen(self.scratch / "disk")
            if free(own) < _reserve(self.size):
                (own / "reserve").unlink(missing_ok=True)
        if free(self.scratch) < LEAST_FREE and self._used() < self.size // 2:
            raise DiskFullError(f"the disk of {self.scratch} is full, and this sandbox did not fill it")

    def _used(self) -> int:
        if self.view is not None:
            about = os.statvfs(self.seen(self.scratch / "disk"))
            return (about.f_blocks - about.f_bfree) * about.f_frsize
        done = subprocess.run([*self.enter, "du", "-sk", self.scratch], capture_output=True, text=True, check=False)
        return int((done.stdout or "0").split()[0]) * 1024


def free(path: Path) -> int:
    """Return the free bytes of the file system of a path."""
    about = os.statvfs(path)
    return about.f_bavail * about.f_frsize


def share(scratch: Path, limit_mb: int | None) -> int:
    """Return how many bytes a new sandbox may write. Raises `DiskFullError` where the disk is full."""
    here = free(scratch)
    if here < LEAST_FREE:
        raise DiskFullError(
            f"no sandbox can be made: {scratch} is on a disk with {here // MEBIBYTE} MiB free, and needs "
            f"{LEAST_FREE // MEBIBYTE}; free some space, or set runtime.scratch"
        )
    return here // SHARE if limit_mb is None else min(here // SHARE, limit_mb * MEBIBYTE)


async def limited(scratch: Path, size: int) -> Disk:
    """Return a disk of this size, whose file system is mounted. Raises `OverlayError`."""
    if os.geteuid() != 0:
        raise OverlayError("only root may mount one")
    with (scratch / "image").open("wb") as image:
        image.truncate(size)
    view = await hold((), MOUNT, str(scratch), str(_reserve(size)))
    return Disk(scratch, size, view, view.enter)


def _reserve(size: int) -> int:
    return min(RESERVE, size // 8)
