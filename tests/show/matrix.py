"""Every harness in every runtime on a bundled task, with the scripted policy: `make show-matrix`.

The harness, its requests, the sandbox, the capture and the grading are real; the policy plays the reference solution.
A cell shows the reward and the seconds of the run itself. Anything but 1.0 is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from polar_gym.config.loading import load_config
from polar_gym.gateway.node.assemble import load_tasks, make_node, make_request
from polar_gym.schema import Episode
from tests.support import apptainer
from tests.support.docker_daemon import own_daemon, running_daemon

HARNESSES = ("codex", "claude_code", "gemini_cli", "qwen_code", "opencode", "pi")
RUNTIMES = ("docker", "apptainer", "bubblewrap")


async def run(harness: str, runtime: Mapping[str, Any]) -> Episode:
    """One session of the harness on the first bundled task."""
    with tempfile.TemporaryDirectory(prefix="polar-gym-matrix-") as state:
        rollout = {"state": state, "timeout_seconds": 300}
        config = load_config(settings={"harness": harness, "runtime": dict(runtime), "rollout": rollout})
        task = load_tasks(config)[0]
        async with make_node(config, [task]) as node:
            return await node.rollout(make_request(config, task))


def runtime_settings(name: str, stack: contextlib.ExitStack) -> dict[str, Any]:
    """The runtime as a config says it, its real part found or started."""
    if name == "docker":
        return {"name": name, "host": running_daemon() or stack.enter_context(own_daemon())}
    if name == "apptainer":
        return {"name": name, "program": apptainer.program()}
    return {"name": name}


def cell(episode: Episode) -> str:
    if episode.reward is None:
        assert episode.session.failure is not None
        return f"failed: {episode.session.failure.message[:200]}"
    timing = episode.session.timing
    return f"{episode.reward:.1f}  {timing.running or 0:5.1f} s"


async def main() -> None:
    parser = argparse.ArgumentParser(prog="make show-matrix", description=__doc__)
    parser.add_argument("--harness", action="append", choices=HARNESSES, help="only this one; may be given repeatedly")
    parser.add_argument("--runtime", action="append", choices=RUNTIMES, help="only this one; may be given repeatedly")
    given = parser.parse_args()
    runtimes = given.runtime or RUNTIMES
    table = Table("harness", *runtimes, title="Reward and seconds, on a bundled task with the scripted policy")
    failed = []
    with contextlib.ExitStack() as stack:
        settings = {name: runtime_settings(name, stack) for name in runtimes}
        for harness in given.harness or HARNESSES:
            episodes = {name: await run(harness, settings[name]) for name in runtimes}
            table.add_row(harness, *map(cell, episodes.values()))
            failed += [f"{harness} in {name}" for name, episode in episodes.items() if episode.reward != 1.0]
    Console(width=120).print(table)
    if failed:
        sys.exit(f"not solved: {', '.join(failed)}")


if __name__ == "__main__":
    asyncio.run(main())
