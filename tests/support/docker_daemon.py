"""A Docker daemon for tests: the one that is running, else one of the test's own, stopped at the end.

Tests use the fixture `docker_host`; other commands are run with

    python -m tests.support.docker_daemon -- COMMAND...
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
import requests
from docker import errors

from tests.support.requirements import need

USUAL_HOST = "unix:///var/run/docker.sock"
INSTALL = "apt-get install docker.io"


def answers(host: str) -> bool:
    try:
        with contextlib.closing(docker.DockerClient(base_url=host, timeout=5)) as client:
            return client.ping()
    except (errors.DockerException, requests.RequestException):
        return False


def running_daemon() -> str | None:
    """Return the DOCKER_HOST of a daemon that answers, or None."""
    return next((host for host in (os.environ.get("DOCKER_HOST"), USUAL_HOST) if host and answers(host)), None)


@contextlib.contextmanager
def own_daemon() -> Iterator[str]:
    """Run a daemon with directories of its own and without any network, and give its DOCKER_HOST."""
    root = Path(tempfile.mkdtemp(prefix="pg-docker-", dir="/tmp"))  # a socket's path has 107 characters at most
    host = f"unix://{root}/docker.sock"
    command = [
        *("dockerd", "--host", host, "--data-root", f"{root}/data", "--exec-root", f"{root}/exec"),
        *("--pidfile", f"{root}/dockerd.pid", "--bridge=none", "--iptables=false", "--ip-forward=false"),
    ]
    with (root / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not answers(host):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"dockerd did not start:\n{(root / 'log').read_text()[-4000:]}")
            time.sleep(0.1)
        yield host
    finally:
        daemon.terminate()
        daemon.wait(60)
        for mount in reversed(Path("/proc/mounts").read_text().splitlines()):
            point = mount.split()[1]
            if point.startswith(f"{root}/"):
                subprocess.run(["umount", "--lazy", point], check=True)
        shutil.rmtree(root)


@pytest.fixture(scope="session")
def docker_host() -> Iterator[str]:
    """The DOCKER_HOST of a running daemon."""
    if host := running_daemon():
        yield host
        return
    need(shutil.which("dockerd"), "dockerd", INSTALL)
    need(os.geteuid() == 0, "a running Docker daemon, or root to start one", f"{INSTALL}; dockerd &")
    with own_daemon() as host:
        yield host


def main() -> int:
    """Run a command with DOCKER_HOST set, and return its exit code."""
    if sys.argv[1:2] != ["--"] or not sys.argv[2:]:
        sys.exit(f"usage: {sys.executable} -m tests.support.docker_daemon -- COMMAND...")
    if not shutil.which("dockerd") and running_daemon() is None:
        sys.exit(f"no Docker daemon answers, and dockerd is missing; install it with: {INSTALL}")
    with contextlib.ExitStack() as stack:
        host = running_daemon() or stack.enter_context(own_daemon())
        return subprocess.run(sys.argv[2:], env={**os.environ, "DOCKER_HOST": host}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
