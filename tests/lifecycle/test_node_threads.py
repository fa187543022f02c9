"""Threads for blocking work, which most of the time waits."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path

from rich.console import Console

from polar_gym.config.loading import load_config
from polar_gym.envs.sessions import Sessions
from polar_gym.gateway.node.assemble import make_node
from polar_gym.gateway.node.state import StateDirectory
from polar_gym.nemo.rollouts import AgentSettings, Rollouts
from polar_gym.runs.run import run_samples
from tests.lifecycle.nodes import engine_settings, node_here
from tests.lifecycle.service_fixtures import rollout_server

INSTALLS = 40
"""More than the 32 threads at most that an event loop has by itself."""
SETTINGS = {"engine": engine_settings(), "runtime": "bubblewrap"}


async def wait_for_each_other() -> None:
    """Run as many functions at once as sessions may wait for an install; each needs a thread of its own."""
    together = threading.Barrier(INSTALLS)
    await asyncio.gather(*(asyncio.to_thread(together.wait, 30) for _ in range(INSTALLS)))


async def test_a_node_inside_another_process_has_threads_enough(tmp_path: Path) -> None:
    """Guards against `serve` and Ray's actors, whose sessions waited for an install and kept saves from any thread."""
    async with node_here(tmp_path):
        await wait_for_each_other()


async def test_a_rollout_server_without_nodes_has_threads_enough(tmp_path: Path) -> None:
    async with rollout_server(tmp_path):
        await wait_for_each_other()


async def test_nodes_of_a_nemo_gym_server_have_threads_enough() -> None:
    rollouts = Rollouts(AgentSettings(polar=SETTINGS))
    try:
        await rollouts._machinery()
        await wait_for_each_other()
    finally:
        await rollouts.close()


def test_an_environment_has_threads_enough() -> None:
    sessions = Sessions(make_node(load_config(settings=SETTINGS), []))
    try:
        sessions._running_loop().run(wait_for_each_other())
    finally:
        sessions.close()


async def test_a_node_beside_its_server_has_the_threads_of_the_server(tmp_path: Path) -> None:
    """Guards against a second pool in the place of the first, whose threads stay."""
    async with rollout_server(tmp_path / "server"):
        before = asyncio.get_running_loop()._default_executor  # pyright: ignore[reportAttributeAccessIssue]
        async with node_here(tmp_path / "node"):
            assert asyncio.get_running_loop()._default_executor is before  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_run_of_the_command_line_has_threads_enough(tmp_path: Path) -> None:
    """Guards against `rollout`, whose sessions waited for an install and kept all other work from any thread."""
    config = load_config(settings={"engine": engine_settings()}).with_rollout(output=tmp_path / "run.jsonl")
    await run_samples(config, [], [], Console(file=io.StringIO()), StateDirectory(tmp_path / "state"))
    await wait_for_each_other()
