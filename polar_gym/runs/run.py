"""A whole run on one node in this process: every task of the config, `num_samples` times, with live progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from polar_gym.config.run_config import RunConfig
from polar_gym.episodes.output import set_aside
from polar_gym.episodes.progress import Progress
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.assemble import load_tasks, make_node, make_request
from polar_gym.gateway.node.node import Node
from polar_gym.harnesses import HARNESSES
from polar_gym.harnesses.install import InstallError, install, place
from polar_gym.paths import check_writable
from polar_gym.schema import Episode, TaskRequest
from polar_gym.tracking import Where, tracked


async def roll_out(config: RunConfig, console: Console) -> list[Episode]:
    """Run every sample, and write each episode to `config.rollout.output` as it ends.

    A file of an earlier run is kept under another name. Raises `polar_gym.errors.ConfigError` and
    `polar_gym.engines.EngineError` before any sandbox starts, and before that file is touched.
    """
    tasks = load_tasks(config)
    output = config.rollout.output
    check_writable("rollout.output", output)
    state = (
        config.rollout.state or output.parent / "state"
    ).absolute()  # episodes name it, and may be read in another directory
    config = config.with_rollout(state=state)
    requests = [make_request(config, task) for task in tasks]
    samples = list(_samples(requests))
    episodes: list[Episode] = []
    where, parameters = config.rollout.metrics, {**config.names, "num_samples": config.rollout.num_samples}
    async with _tracked(where, output, parameters, episodes), make_node(config, tasks) as node:
        await _check_runtimes(node, requests)
        await _install_harness(config.harness.name, node.cache, console)
        if kept := set_aside(output):
            console.print(Text(f"the episodes of an earlier run are kept in {kept}", "dim"), soft_wrap=True)
        with output.open("wb") as lines, Progress(console, total=len(samples)) as progress:
            async with asyncio.TaskGroup() as group:

                async def one(request: TaskRequest, sample_index: int) -> None:
                    episode = await node.rollout(request, sample_index, progress.update)
                    lines.write(episode.to_json() + b"\n")
                    lines.flush()
                    episodes.append(episode)
                    progress.done(episode)

                group.create_task(node.prepare(requests))
                for request, sample_index in samples:
                    group.create_task(one(request, sample_index))
    return episodes


@asynccontextmanager
async def _tracked(
    where: Where, output: Path, parameters: dict[str, Any], episodes: list[Episode]
) -> AsyncIterator[None]:
    """Log the figures of the episodes that are there at the end."""
    with tracked(where, output.stem, output.parent, parameters) as log:
        yield
        await asyncio.to_thread(log, figures(episodes), 0)


def figures(episodes: list[Episode]) -> dict[str, float]:
    """Return the figures of a run. A masked episode, which has no reward, is in no mean."""
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    fidelities = [episode.trajectory.fidelity for episode in episodes]
    counts = ("calls", "traces", "sampled_tokens", "trainable_tokens")
    return {
        "episodes": len(episodes),
        "masked": len(episodes) - len(rewards),
        "truncated": sum(episode.truncated for episode in episodes),
        **({"reward": sum(rewards) / len(rewards)} if rewards else {}),
        **{name: sum(getattr(fidelity, name) for fidelity in fidelities) for name in counts},
        "run_seconds": sum(episode.session.timing.running or 0.0 for episode in episodes),
    }


async def _check_runtimes(node: Node, requests: list[TaskRequest]) -> None:
    """Raise `ConfigError` where the machine lacks something that a runtime of the requests needs."""
    for spec in {request.runtime.name: request.runtime for request in requests}.values():
        runtime = await asyncio.to_thread(node.runtime, spec)
        if missing := await asyncio.to_thread(runtime.check):
            raise ConfigError(f"runtime={spec.name!r}: {'; '.join(missing)}")


async def _install_harness(name: str, cache: Path, console: Console) -> None:
    """Install the harness, so that no session's time holds the download. Raises `ConfigError`."""
    harness = HARNESSES.get(name)
    if harness.package is None or place(harness, cache).exists():
        return
    started = time.monotonic()
    said = Text(f"installing {harness.package} {harness.version}, once on this machine")
    console.print(said, soft_wrap=True)
    try:
        with console.status(said):
            await asyncio.to_thread(install, harness, cache)
    except InstallError as error:
        raise ConfigError(f"harness={name}: {error}") from error
    console.print(Text(f"installed in {time.monotonic() - started:.0f} s", "dim"))


def _samples(requests: list[TaskRequest]) -> Iterator[tuple[TaskRequest, int]]:
    """Yield the samples in the order of their indices: every task begins once before a task begins again."""
    for sample_index in range(max(request.num_samples for request in requests)):
        for request in requests:
            if sample_index < request.num_samples:
                yield request, sample_index
