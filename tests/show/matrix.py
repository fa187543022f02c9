"""Run every harness in every runtime on a bundled task, with the scripted policy: `make show-matrix`.

The harness, its requests, the sandbox, the capture and the grading are real; the policy plays the reference solution.
A cell shows the reward and the seconds of the run itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from polar_gym.config.loading import load_config
from polar_gym.gateway.node.assemble import load_tasks, make_node, make_request
from polar_gym.schema import Episode
from tests.show.result import HARNESSES, Result, make_parser, parse
from tests.support import apptainer
from tests.support.docker_daemon import own_daemon, running_daemon

RUNTIMES = ("docker", "apptainer", "bubblewrap")
(SOLVED,) = LAWS = ("every harness is rewarded for the reference solution in every runtime",)


async def run(harness: str, runtime: Mapping[str, Any]) -> Episode:
    """Return the episode of one session of the harness on the first bundled task."""
    with tempfile.TemporaryDirectory(prefix="polar-gym-matrix-") as state:
        rollout = {"state": state, "timeout_seconds": 300}
        config = load_config(settings={"harness": harness, "runtime": dict(runtime), "rollout": rollout})
        task = load_tasks(config)[0]
        async with make_node(config, [task]) as node:
            return await node.rollout(make_request(config, task))


def runtime_settings(name: str, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Return the runtime's settings, after its program or daemon is found or started."""
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


async def show(harnesses: Sequence[str], runtimes: Sequence[str], result: Result) -> Table:
    """Run every harness in every runtime, one after the other."""
    table = Table("harness", *runtimes, title="Reward and seconds, on a bundled task with the scripted policy")
    with contextlib.ExitStack() as stack:
        settings = {name: runtime_settings(name, stack) for name in runtimes}
        for harness in harnesses:
            episodes = {name: await run(harness, settings[name]) for name in runtimes}
            cells = {name: cell(episode) for name, episode in episodes.items()}
            table.add_row(harness, *cells.values())
            result.figures[harness] = cells
            wrong = [name for name, episode in episodes.items() if episode.reward != 1.0]
            result.check(SOLVED, [f"{harness} in {name}: {cells[name]}" for name in wrong])
    return table


def main() -> int:
    parser = make_parser("matrix", __doc__, quick="docker, apptainer, and all harnesses except pi and codex")
    parser.add_argument("--harness", action="append", choices=HARNESSES, help="only this one; may be given repeatedly")
    parser.add_argument("--runtime", action="append", choices=RUNTIMES, help="only this one; may be given repeatedly")
    parser.set_defaults(harness=HARNESSES, runtime=RUNTIMES)
    options = parse(parser, quick={"harness": ["pi", "codex"], "runtime": ["bubblewrap"]})
    result = Result("matrix", LAWS, options)
    Console(width=120).print(asyncio.run(show(options.harness, options.runtime, result)))
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
