"""Threads for blocking work, which most of the time waits."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path

from rich.console import Console

from polar_gym.config.loading import load_config
from polar_gym.gateway.node.state import StateDirectory
from polar_gym.runs.run import run_samples
from tests.lifecycle.nodes import engine_settings, node_here

INSTALLS = 40
"""More than the 32 threads at most that an event loop has by itself."""


async def wait_for_each_other() -> None:
    """Run as many functions at once as sessions may wait for an install; each needs a thread of its own."""
    together = threading.Barrier(INSTALLS)
    await asyncio.gather(*(asyncio.to_thread(together.wait, 30) for _ in range(INSTALLS)))


async def test_a_node_inside_another_process_has_threads_enough(tmp_path: Path) -> None:
    """Guards against `serve` and Ray's actors, whose sessions waited for an install and kept saves from any thread."""
    async with node_here(tmp_path):
        await wait_for_each_other()


async def test_a_run_of_the_command_line_has_threads_enough(tmp_path: Path) -> None:
    """Guards against `rollout`, whose sessions waited for an install and kept all other work from any thread."""
    config = load_config(settings={"engine": engine_settings()}).with_rollout(output=tmp_path / "run.jsonl")
    await run_samples(config, [], [], Console(file=io.StringIO()), StateDirectory(tmp_path / "state"))
    await wait_for_each_other()
