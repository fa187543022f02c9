"""Limits for a sandbox as a whole, by the kernel's control groups, where this process may make them.

Both versions of the kernel's interface are supported: one tree with all controllers (version 2), and one tree for each
controller (version 1). A sandbox's group has the name of the sandbox's scratch directory: a process that finds one of
them after a gateway's death finds the other. All functions block, mostly for microseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from polar_gym.runtimes.limits import MEBIBYTE, LimitOptions

CONTROLLERS = ("memory", "pids", "cpu")
PERIOD = 100_000
"""The period in microseconds over which the kernel shares out processor time."""
SWAP = ("memory.swap.max", "memory.memsw.limit_in_bytes")
"""Files that a kernel lacks if it was built without them."""
_MEMORY_ENDS = {"memory.events": "oom", "memory.oom_control": "oom_kill"}
"""Files of versions 2 and 1 -> the count of `Cgroup.memory_ends`."""
REMOVE_SECONDS = 5.0


class CgroupError(Exception):
    """This process may not limit sandboxes here. The message says why."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A sandbox's group: one directory in version 2, one for each controller in version 1."""

    directories: tuple[Path, ...]

    @property
    def enter(self) -> tuple[str, ...]:
        """Return the argv prefix that puts a command, and all that it starts, under the limits."""
        script = 'for group in $0; do echo $$ > "$group/cgroup.procs"; done && exec "$@"'
        return ("/bin/sh", "-c", script, " ".join(map(str, self.directories)))

    def memory_ends(self) -> int:
        """Return how often the memory of the group ran out. In version 1 that is how many of its processes the kernel
        killed, which it may also do where the memory of the machine ran out."""
        for directory, (name, count) in product(self.directories, _MEMORY_ENDS.items()):
            if (file := directory / name).exists():
                return int(dict(line.split() for line in file.read_text().splitlines())[count])
        return 0

    def remove(self) -> None:
        """Kill the processes that are left inside, and remove the group.

        Raises `OSError` where the kernel does not remove it within `REMOVE_SECONDS`.
        """
        deadline = time.monotonic() + REMOVE_SECONDS
        for directory in self.directories:
            while directory.exists():
                for pid in (directory / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                try:
                    directory.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.005)


def make(name: str, limits: LimitOptions) -> Cgroup:
    """Make a group with these limits. Raises `CgroupError`."""
    try:
        unified = _mounts().get("")
        if unified is not None and "memory" in (unified / "cgroup.controllers").read_text().split():
            values = _unified(_own_parent(unified), name, limits)
        else:
            values = _separate(_mounts(), name, limits)
        group = Cgroup(tuple(sorted({file.parent for file in values})))
        try:
            for directory in group.directories:
                directory.mkdir()
            for file, value in values.items():
                if file.name not in SWAP or file.exists():
                    file.write_text(value)
        except BaseException:
            group.remove()
            raise
    except OSError as error:
        raise CgroupError(f"no control group can be made here ({error.strerror})") from error
    return group


def find(name: str) -> Cgroup:
    """Return the group of this name, with the directories that exist."""
    mounts = _mounts()
    places = {mount / name for mount in mounts.values()}
    if (unified := mounts.get("")) is not None:
        places.add(_own_parent(unified) / name)
    return Cgroup(tuple(sorted(place for place in places if place.exists())))


def _unified(parent: Path, name: str, limits: LimitOptions) -> dict[Path, str]:
    """Return the files of a group of version 2, with their values."""
    handed_down = (parent / "cgroup.subtree_control").read_text().split()
    if lacking := [f"+{controller}" for controller in CONTROLLERS if controller not in handed_down]:
        (parent / "cgroup.subtree_control").write_text(" ".join(lacking))
    own = parent / name
    cpu = {} if limits.cpus is None else {own / "cpu.max": f"{int(limits.cpus * PERIOD)} {PERIOD}"}
    memory = {own / "memory.max": str(limits.memory_mb * MEBIBYTE), own / "memory.swap.max": "0"}
    return {**memory, own / "pids.max": str(limits.pids), **cpu}


def _separate(mounts: dict[str, Path], name: str, limits: LimitOptions) -> dict[Path, str]:
    """Return the files of a group of version 1, with their values."""
    if lacking := [controller for controller in CONTROLLERS if controller not in mounts]:
        raise CgroupError(f"the kernel's control groups lack {', '.join(lacking)} here")
    memory, pids, cpu = (mounts[controller] / name for controller in CONTROLLERS)
    bytes_ = str(limits.memory_mb * MEBIBYTE)
    quota = "-1" if limits.cpus is None else str(int(limits.cpus * PERIOD))  # -1: no limit
    return {
        memory / "memory.limit_in_bytes": bytes_,
        memory / "memory.memsw.limit_in_bytes": bytes_,
        pids / "pids.max": str(limits.pids),
        cpu / "cpu.cfs_period_us": str(PERIOD),
        cpu / "cpu.cfs_quota_us": quota,
    }


def _mounts() -> dict[str, Path]:
    """Return the directory at which each controller's tree is mounted; the key "" is the tree of version 2."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.setdefault("", Path(where))
        elif kind == "cgroup":
            found |= {name: Path(where) for name in options.split(",") if name in CONTROLLERS}
    return found


def _own_parent(unified: Path) -> Path:
    """Return the parent of this process's own group.

    The groups of sandboxes stand beside the own group, because a group that holds processes, except the root, hands no
    controllers down. Where a user's login session has groups delegated to it, the parent belongs to the user.
    """
    own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    path = unified / own.removeprefix("0::").lstrip("/")
    return path.parent if path != unified and path.is_dir() else unified
