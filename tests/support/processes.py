"""The command of polar-gym, its processes and free ports, for tests that start processes."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

POLAR_GYM = [sys.executable, "-c", "from polar_gym.cli import main; main()"]


def free_port() -> int:
    """Return a port of loopback that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def running(command: str) -> bool:
    """Return whether a process of this machine, in a sandbox or outside, was started by exactly this command."""
    argv = command.replace(" ", "\0").encode() + b"\0"
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            if process.read_bytes() == argv:
                return True
    return False
