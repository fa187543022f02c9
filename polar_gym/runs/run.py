"""A whole run on one node in this process: every task of the config, `num_samples` times, with live progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from polar_gym.config.run_config import RunConfig
from polar_gym.episodes.output import DEVICES, remove_torn_line, set_aside
from polar_gym.episodes.progress import Progress
from polar_gym.episodes.reading import began_again
from polar_gym.errors import ConfigError, kind_of
from polar_gym.gateway.node.assemble import load_tasks, make_node, make_request
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.node.salvage import reap
from polar_gym.gateway.node.state import Key, StateDirectory
from polar_gym.gateway.session.starting import Manifest
from polar_gym.harnesses import HARNESSES
from polar_gym.harnesses.install import InstallError, install, place
from polar_gym.runs.settings import begin, check_episodes, check_no_branches, going_on
from polar_gym.runs.state import check_begun, own_state
from polar_gym.schema import Episode, StartFrom, TaskRequest
from polar_gym.tasks import Task
from polar_gym.tracking import Where, tracked


@dataclass(frozen=True, slots=True)
class Sample:
    """A session to run."""

    request: TaskRequest
    index: int
    key: Key | None = None
    """None: a new session."""


async def roll_out(config: RunConfig, console: Console, *, resume: bool = False) -> list[Episode]:
    """Run every sample, and write each episode to `config.rollout.output` as it ends. Return one for each sample.

    A file of an earlier run is kept under another name. With `resume` it is continued: samples with an episode there
    are left out, and those that were under way go on from their journals. The settings must be those with which the run
    began (`polar_gym.runs.settings`). Raises `polar_gym.errors.ConfigError` and `polar_gym.engines.EngineError` before
    any sandbox starts; by then a torn last line at most was cut from the file.
    """
    if resume:
        check_begun(config)
    tasks = load_tasks(config)
    samples = list(_samples([make_request(config, task) for task in tasks]))
    left: dict[Key, Manifest] = {}
    before = None
    with own_state(config, resume=resume) as state:
        if resume:
            before = remove_torn_line(config.rollout.output)
            kept = [episode for episode in before if not began_again(episode)]
            asked, config = config.harness.today, going_on(config, state, kept)
            if config.harness.today != asked:
                told = f"harness.today={config.harness.today}: the harness is told the day on which the run began"
                console.print(Text(told, "dim"), soft_wrap=True)
            requests = [make_request(config, task) for task in tasks]
            check_episodes(config, requests, kept)
            done = {_sample_of(episode) for episode in kept}
            samples, left = unfinished(list(_samples(requests)), done, state)
            check_no_branches(config, [each.request for each in (*kept, *left.values())])
            went_on = sum(sample.key is not None for sample in samples)
            said = f"{len(done)} episodes are there, {went_on} sessions go on, {len(samples) - went_on} begin"
            console.print(Text(said, "dim"))
        return await run_samples(config, tasks, samples, console, state, before=before, left=left)


async def run_samples(
    config: RunConfig,
    tasks: list[Task],
    samples: Sequence[Sample],
    console: Console,
    state: StateDirectory,
    *,
    before: Sequence[Episode] | None = None,
    left: Mapping[Key, Manifest] | None = None,
) -> list[Episode]:
    """Run these samples on one node, and write each episode as it ends; see `roll_out`. `state`: the run's own
    (`own_state`). `before`: the episodes of a run that goes on, which are in the file; None: the run begins. `left`:
    sessions of a run that was killed, whose sandboxes are removed first."""
    config, output = config.with_rollout(state=state.root), config.rollout.output
    requests = [sample.request for sample in samples]
    episodes = [episode for episode in before or () if not began_again(episode)]
    where, parameters = config.rollout.metrics, {**config.names, "num_samples": config.rollout.num_samples}
    async with _tracked(where, output, parameters, episodes), make_node(config, tasks, output=output) as node:
        await _check_runtimes(node, requests)
        for harness in sorted({request.agent.name for request in requests}):
            await _install_harness(harness, node.cache, console)
        if before is None and (kept := set_aside(output)):  # first: else `--resume` would give them for this run's
            console.print(Text(f"the episodes of an earlier run are kept in {kept}", "dim"), soft_wrap=True)
        begin(config, state, node.engine.info, episodes)
        await reap(state, left or {}, node.runtime)
        appending = _appending(output, "wb" if before is None else "ab", _after_full_disk(output, requests))
        with appending as write, Progress(console, total=len(samples)) as progress, _first_error():
            async with asyncio.TaskGroup() as group:

                async def one(sample: Sample) -> None:
                    episode = await node.rollout(sample.request, sample.index, progress.update, sample.key)
                    _write(episode)
                    if began_again(episode):
                        lost = episode.trajectory.fidelity.sampled_tokens
                        said = f"sample {sample.index} of {episode.session.task_id} begins again, without {lost} tokens"
                        console.print(Text(f"{said}: {episode.session.failure.message}", "yellow"), soft_wrap=True)  # type: ignore[union-attr]
                        again = sample.request.model_copy(update={"start_from": None})
                        episode = await node.rollout(again, sample.index, progress.update)
                        _write(episode)
                    progress.done(episode)

                def _write(episode: Episode) -> None:
                    write(episode.to_json() + b"\n")
                    if not began_again(episode):
                        episodes.append(episode)

                group.create_task(node.prepare(requests))
                for sample in samples:
                    group.create_task(one(sample))
    return episodes


@contextmanager
def _appending(output: Path, mode: Literal["wb", "ab"], fix: str) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that writes to a file, unbuffered. Raises `ConfigError`, with `fix`, where the disk is full."""
    with output.open(mode, buffering=0) as file:

        def write(line: bytes) -> None:
            left = memoryview(line)
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError as error:
                raise kind_of(error)(f"rollout.output={output}: {error.strerror}; {fix}") from error

        yield write


def _after_full_disk(output: Path, requests: Sequence[TaskRequest]) -> str:
    """Return the advice for a run that broke off because its episodes could not be written."""
    if DEVICES in output.absolute().parents:
        return "name a file, which can be gone on with"
    if any(request.start_from is not None and not request.start_from.owned for request in requests):
        return "put that right, and branch again"
    return f"put that right, and go on with `polar-gym rollout` and --resume {output}"


@contextmanager
def _first_error() -> Iterator[None]:
    """Raise the first error of a group, which ended the others."""
    try:
        yield
    except ExceptionGroup as group:
        first = group.exceptions[0]
        raise first from first.__cause__


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
    """Raise `ConfigError` where the machine lacks something that a runtime of the requests needs, or where a sandbox
    would show files that no harness may read."""
    await asyncio.to_thread(node.check_unseen, [request.runtime for request in requests])
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


def _samples(requests: list[TaskRequest]) -> Iterator[Sample]:
    """Yield the samples in the order of their indices: every task begins once before a task begins again."""
    for sample_index in range(max(request.num_samples for request in requests)):
        for request in requests:
            if sample_index < request.num_samples:
                yield Sample(request, sample_index)


def unfinished(
    samples: Sequence[Sample], done: Collection[tuple[str, int]], state: StateDirectory
) -> tuple[list[Sample], dict[Key, Manifest]]:
    """Return the samples without an episode, and the sessions of an earlier run that were under way or whose sandboxes
    could not be removed. A sample that had begun goes on from the record of its newest session, as that session's next
    attempt. The newest one may be another session than the first: one that diverged began again under a new id."""
    left: dict[Key, Manifest] = {}
    for key in state.known() if state.sessions.is_dir() else ():
        manifest = state.read_manifest(key)
        if _sample_of(manifest) not in done or state.files(key).sandboxes_left.exists():
            left[key] = manifest
    newest = {_sample_of(left[key]): key for key in sorted(left, key=lambda key: left[key].began)}
    found = []
    for sample in samples:
        sample_of = (sample.request.task_id, sample.index)
        if sample_of in done:
            continue
        if (key := newest.get(sample_of)) is None:
            found.append(sample)
            continue
        start = StartFrom(record=str(state.files(key).directory), owned=True)
        request = sample.request.model_copy(update={"start_from": start})
        found.append(Sample(request, sample.index, Key(key.session_id, key.attempt + 1)))
    return found, left


def _sample_of(begun: Manifest | Episode) -> tuple[str, int]:
    return begun.request.task_id, begun.session.sample_index
