"""Sandboxes of a provider of the real NeMo Gym 0.7, in its own environment: whole sessions of a real harness."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import docker

from polar_gym.runtimes import agent, skeleton
from tests.e2e.nemo_gym import INSTALL, installed, venv_directory
from tests.e2e.vllm_server import CHECKOUT
from tests.support.docker_daemon import docker_host
from tests.support.requirements import need, need_node

__all__ = ["docker_host"]


def test_containers_of_nemo_gym_reach_nothing_but_the_gateway(docker_host: str, tmp_path: Path) -> None:
    need_node()
    need(installed("0.7.0"), "NeMo Gym 0.7.0", INSTALL)
    client = docker.DockerClient(base_url=docker_host)
    skeleton.import_skeleton(client, tag := skeleton.skeleton_tag())
    volumes = ["/usr:/usr:ro", *(f"{path.resolve()}:{path}:ro" for path in agent.host_etc())]
    output = tmp_path / "episodes.jsonl"
    settings = [
        *("runtime=remote", "runtime.provider=docker", f"runtime.image={tag}"),
        f"runtime.options={{volumes: {json.dumps(volumes)}}}",
        "runtime.config={create: {use_init: false}}",  # the skeleton's /sbin is a link, at which Docker has no init
        *("harness=pi", "tasks.limit=2", f"rollout.output={output}"),
    ]
    python = venv_directory("0.7.0") / "bin" / "python"
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "DOCKER_HOST": docker_host}
    done = subprocess.run(
        [python, "-m", "polar_gym", "demo", *settings], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    episodes = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(each["reward"], each["evaluation"]["trust"]) for each in episodes] == [(1.0, "high")] * 2
    assert client.containers.list(all=True, filters={"label": "nemo-gym.sandbox"}) == []
    client.close()
