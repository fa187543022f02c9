"""A container's PID 1 ends at the container's deadline, and not before."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from polar_gym.runtimes.docker.sandbox import WAIT
from tests.support.requirements import need

SLEEP = "sleep() { exec /bin/sh -c 'echo $$; exec sleep $0' \"$1\"; }\n"
"""The same as sleep, but says its pid when it begins."""
SECONDS = 2


@pytest.fixture(params=["dash", "bash", "busybox sh"])
def first(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """PID 1, which ends in `SECONDS`."""
    shell = request.param.split()
    need(shutil.which(shell[0]), shell[0], f"apt-get install {shell[0]}")
    argv = [*shell, "-c", SLEEP + WAIT, "container", str(SECONDS)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_it_starts_one_process_only(first: subprocess.Popen[bytes]):
    """It started one each minute, and ended where the agent had left it none: the session was masked, not graded."""
    assert first.stdout is not None
    assert first.wait(50) == 0
    assert len(first.stdout.readlines()) == 1


def test_it_stays_where_an_agent_that_is_root_kills_all_else(first: subprocess.Popen[bytes]):
    assert first.stdout is not None
    begun = time.monotonic()
    os.kill(int(first.stdout.readline()), signal.SIGKILL)
    assert first.wait(50) == 0
    assert time.monotonic() - begun > SECONDS - 1.5
    assert len(first.stdout.readlines()) == 1
