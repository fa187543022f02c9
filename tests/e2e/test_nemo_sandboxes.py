"""Sandboxes of the real NeMo Gym 0.7's providers, in its own environment: whole sessions of a real harness, also with
their streams cut. `make show-remote` shows more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.nemo_gym import INSTALL, installed
from tests.e2e.vllm_server import CHECKOUT
from tests.support import apptainer
from tests.support.docker_daemon import docker_host
from tests.support.requirements import need, need_node

__all__ = ["docker_host"]


@pytest.mark.parametrize("provider", ["docker", "apptainer"])
def test_sessions_in_sandboxes_of_nemo_gyms_providers(
    provider: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    need_node()
    need(installed("0.7.0"), "NeMo Gym 0.7.0", INSTALL)
    need(os.geteuid() == 0, "root", "sudo")
    environment = dict(os.environ)
    if provider == "docker":
        environment["DOCKER_HOST"] = request.getfixturevalue("docker_host")
    elif provider == "apptainer":
        apptainer.program()
    few = ("--harness", "pi", "--tasks", "1", "--starts", "2", "--no-laws", "--results", tmp_path / "results.json")
    shown = [sys.executable, "-m", "tests.show.remote", "--provider", provider, *few]
    done = subprocess.run(shown, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert all(results["laws"].values())
    assert results["figures"][provider]["pi"]["whole"].startswith("1 ")
