"""NeMo Gym kills an agent server one second after SIGINT. Its sandboxes and files must not stay."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import docker
import pytest

from tests.support.processes import running
from tests.support.requirements import need_bubblewrap

SECONDS = 60
"""The most that starting or removing a sandbox takes."""


@pytest.mark.parametrize("kind", ["docker", "bubblewrap"])
def test_a_killed_agent_server_leaves_no_sandbox(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    directories = [tmp_path / "scratch", tmp_path / "temporary"]
    for directory in directories:
        directory.mkdir(mode=0o755)
    runtime = {"name": kind, "scratch": str(directories[0])}
    if kind == "docker":
        runtime["host"] = request.getfixturevalue("docker_host")
    else:
        need_bubblewrap()
    sleep = f"sleep {1000 + secrets.randbelow(10**6) / 1000}"
    polar = {"engine": "embedded", "runtime": runtime, "harness": {"name": "command", "command": sleep.split()}}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.lifecycle.held_agent_server", json.dumps(polar)],
        env=os.environ | {"TMPDIR": str(directories[1])},
    )
    try:
        wait_for(lambda: running(sleep))
        held = containers(runtime, sleep)
        assert len(held) == (kind == "docker")
    finally:
        server.kill()
        server.wait()
    wait_for(lambda: not running(sleep))
    wait_for(lambda: not held & containers(runtime))
    wait_for(lambda: not [path for directory in directories for path in directory.iterdir()])


def containers(runtime: dict[str, str], command: str | None = None) -> set[str]:
    """Return the containers of the daemon; with `command`, those in which the command runs."""
    if "host" not in runtime:
        return set()
    with contextlib.closing(docker.DockerClient(base_url=runtime["host"])) as client:
        return {
            each.id or ""
            for each in client.containers.list(all=command is None, ignore_removed=True)
            if command is None or command in str(each.top())
        }


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
