"""The uids of agents: each sandbox has a uid, and a gid of the same number, that no other sandbox on the machine has.

The kernel keeps some things for a uid and not for a sandbox: keyrings, the right to signal and to trace a process, and
how many inotify instances, message queues and pipes there may be. Two sandboxes of one uid would share them.

A claim on a uid is a lock on one byte of a file, which all gateways of a user open. The kernel drops a process's locks
when the process ends. So the uids of a killed gateway are free again. Each process begins at a random uid and takes the
next one each time. Thus a uid is not used again soon: the containers of a killed gateway still live then. Gateways that
see different files, such as those in containers, hardly ever choose the same uid.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from polar_gym.runtimes import SandboxError
from polar_gym.runtimes.kernel.subordinate import Namespace

RANGES = (range(2_000_000, 2_065_536), range(20_000, 52_768))
"""The uids of agents. The first range lies above the uids of users and containers, and below the largest number that
every tar can write. The second one is for a gateway whose own user namespace has no such uids, as in a container."""


@dataclass(frozen=True, eq=False, slots=True)
class Claim:
    """The uid of a sandbox, which is also the number of its gid."""

    uid: int
    owner: Uids | None = None
    """None: the uid was not claimed, and sandboxes may share it."""
    enter: tuple[str, ...] = ()
    """The argv prefix of a command that has root's rights over the uid; empty where the gateway has all there are."""

    def release(self) -> None:
        """Give the uid back. May be called twice."""
        if self.owner is not None:
            self.owner.release(self)


class Uids:
    """The uids that the gateways of one user of this machine share."""

    def __init__(self, file: Path) -> None:
        # Closing any descriptor of the file would drop all locks of this process: it is opened once and never closed.
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._mine: dict[int, Claim] = {}
        """The claims of this process, to which the kernel would give the same lock again."""
        self._turn = secrets.randbelow(1 << 20)
        self._changing = threading.Lock()

    def claim(self, uids: range, enter: tuple[str, ...]) -> Claim:
        """Return one of these uids that no sandbox has. Raises `SandboxError`."""
        with self._changing:
            for _ in uids:
                self._turn += 1
                uid = uids[self._turn % len(uids)]
                if uid not in self._mine and self._lock(uid):
                    self._mine[uid] = Claim(uid, self, enter)
                    with contextlib.suppress(OSError):
                        os.utime(self._file)  # systemd-tmpfiles removes what is old in /tmp
                    return self._mine[uid]
        raise SandboxError(f"all {len(uids)} uids of sandboxes are in use: start fewer sandboxes at once")

    def release(self, claim: Claim) -> None:
        with self._changing:
            if self._mine.get(claim.uid) is claim:
                del self._mine[claim.uid]
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, claim.uid)

    def _lock(self, uid: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, uid)
        except (BlockingIOError, PermissionError):  # the kernel may use either for a lock of another process
            return False
        return True


def claim(space: Namespace | None = None) -> Claim:
    """Return a uid that no sandbox on this machine has; `space` is a plain user's. Raises `SandboxError`."""
    uids, enter = (_existing(), ()) if space is None else (space.uids, space.enter)
    directory = Path("/run" if os.geteuid() == 0 else "/tmp")
    try:
        return _in_file(directory / f"polar-gym-uids-{os.geteuid()}").claim(uids, enter)
    except OSError as error:
        raise SandboxError(f"no uid could be claimed for a sandbox ({error}); make {directory} writable") from error


_in_file = cache(Uids)


def _existing() -> range:
    """Return the uids to choose from, which exist in this process's user namespace. Raises `SandboxError`."""
    maps = [Path(f"/proc/self/{kind}_map").read_text().splitlines() for kind in ("uid", "gid")]
    inside = [[(int(first), int(count)) for first, _, count in map(str.split, lines)] for lines in maps]
    for uids in RANGES:
        if all(any(first <= uids[0] and uids[-1] < first + count for first, count in each) for each in inside):
            return uids
    raise SandboxError(
        "the gateway's user namespace has no uids and gids for sandboxes; map "
        f"{RANGES[1][0]} to {RANGES[1][-1]} into it"
    )
