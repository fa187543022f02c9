"""A plain user's subordinate uids and gids, and the user namespace in which the gateway has root's rights over them.

A machine gives such uids to a user in /etc/subuid and /etc/subgid. Two setuid programs map them into a user namespace,
where they have the same numbers as outside, and where 0 is the user. One small process holds the namespace for all
sandboxes of a gateway. That process ends when its standard input does, and so with the gateway.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from polar_gym.runtimes import SandboxError, processes


@dataclass(frozen=True, slots=True)
class Namespace:
    """A user namespace with subordinate uids and the gids of the same numbers."""

    holder: subprocess.Popen[bytes]
    uids: range
    enter: tuple[str, ...]
    """The argv prefix of a command that has root's rights over the uids."""


def namespace() -> Namespace:
    """Return this process's namespace, which is made at the first call, and again where its holder was killed. Blocks.

    Raises `SandboxError` where this user has no subordinate uids, or may not use them.
    """
    with _making:
        try:
            if _made().holder.poll() is not None:
                _made.cache_clear()
            return _made()
        except (OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise SandboxError(f"no subordinate uids can be used: {' '.join(said.split())}") from error


_making = threading.Lock()


@cache
def _made() -> Namespace:
    if missing := processes.missing({"newuidmap": "uidmap", "nsenter": "util-linux"}):
        raise OSError("; ".join(missing))
    uids, pipe = _given(), subprocess.PIPE
    holder = subprocess.Popen(["unshare", "--user", "sh", "-c", "echo ready; exec cat"], stdin=pipe, stdout=pipe)
    enter = (str(shutil.which("nsenter")), "--target", str(holder.pid), "--user", "--")
    mine = {"newuidmap": os.geteuid(), "newgidmap": os.getegid()}
    maps = [[each, *map(str, (holder.pid, 0, own, 1, uids[0], uids[0], len(uids)))] for each, own in mine.items()]
    trial = [*enter, "unshare", "--mount", "--net", "true"]  # a kernel may give the namespace and refuse its rights
    try:
        assert holder.stdout is not None
        holder.stdout.readline()  # empty where `unshare` failed; then there is no process to map for
        for argv in (*maps, trial):
            subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60)
    except BaseException:
        holder.kill()
        holder.communicate()
        raise
    return Namespace(holder, uids, enter)


def _given() -> range:
    """Return the longest range that is this user's in both files. Raises `OSError`, `KeyError` or `ValueError`."""
    user = pwd.getpwuid(os.geteuid())
    uids, gids = (Path("/etc", name).read_text().splitlines() for name in ("subuid", "subgid"))
    mine = [line.split(":") for line in uids if line in gids and line.split(":")[0] in (user.pw_name, str(user.pw_uid))]
    if not mine:
        grant = f"usermod --add-subuids FIRST-LAST --add-subgids FIRST-LAST {user.pw_name}"
        raise OSError(f"{user.pw_name} has no range in both /etc/subuid and /etc/subgid; give one with: {grant}")
    return max((range(int(first), int(first) + int(count)) for _, first, count in mine), key=len)
