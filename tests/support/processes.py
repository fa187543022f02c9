"""The command of polar-gym, and free ports, for tests that start processes."""

from __future__ import annotations

import socket
import sys

POLAR_GYM = [sys.executable, "-c", "from polar_gym.cli import main; main()"]


def free_port() -> int:
    """Return a port of loopback that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
