"""How many files a node's process may have open at once."""

from __future__ import annotations

import resource

WANTED = 65_536
"""Enough for thousands of sessions. One that runs holds some 16, most of them pipes to the processes of its sandbox."""


def allow_open_files() -> None:
    """Raise the limit of open files of this process, and of those that it starts, to `WANTED`, as far as the hard limit
    lets it. Under the usual 1,024, some of 64 sessions at once start no sandbox, and have no reward."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
