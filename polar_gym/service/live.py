"""What the live page shows: the tasks, nodes and sessions of now, and the runs of `polar-gym learn`."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from pathlib import Path

import orjson

from polar_gym.durable import json_lines
from polar_gym.errors import ConfigError
from polar_gym.protocol import Disk, LearningRun, Live, TaskProgress, Transcript
from polar_gym.service.node_link import NodeLink, NodeUnreachableError
from polar_gym.service.service import RolloutService
from polar_gym.service.task import Task

TASKS = 200
"""How many live tasks the page shows at most."""


async def states(service: RolloutService, link: NodeLink, learning: Sequence[Path]) -> AsyncIterator[Live]:
    """Yield the present state without end. `learning`: directories of `polar-gym learn`; a state tells of their runs
    where the files have changed since the last one."""
    known: object = ()
    while True:
        live = await _now(service, link)
        found = await asyncio.to_thread(_stamp, learning)
        if found != known:
            live.runs, known = await asyncio.to_thread(lambda: [_read(each) for each in learning]), found
        yield live


async def _now(service: RolloutService, link: NodeLink) -> Live:
    book, weights, limits, nodes = service.book, service.weights, service.limits, service.node_states()
    asked = await asyncio.gather(*(link.transcripts(node.heartbeat.url) for node in nodes), return_exceptions=True)
    transcripts: list[Transcript] = []
    unreached: dict[str, str] = {}
    for node, answer in zip(nodes, asked, strict=True):
        if isinstance(answer, NodeUnreachableError):
            unreached[node.node] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            transcripts += answer
    versions = {session.weight_version for node in nodes for session in node.heartbeat.sessions}
    behind = {version: weights.behind(version) for version in versions if version is not None}
    usage = await asyncio.to_thread(shutil.disk_usage, service.store.path.parent)
    tasks = [_progress(task) for task in islice(reversed(book.live.values()), TASKS)]
    return Live(
        at=time.time(),
        generation=service.generation,
        weight_version=weights.current,
        behind={version: steps for version, steps in behind.items() if steps is not None},
        tasks=tasks,
        live_tasks=len(book.live),
        waiting=sum(sample.phase == "waiting" for task in book.live.values() for sample in task.open_samples()),
        ended_tasks=dict(book.counts.tasks),
        episodes=dict(book.counts.episodes),
        failures=dict(book.counts.failures),
        retried=book.counts.retried,
        nodes=nodes,
        transcripts=transcripts,
        unreached=unreached,
        disk=Disk(stored=book.stored_bytes, keep=limits.keep_bytes, refuse=limits.refuse_bytes, free=usage.free),
    )


def _progress(task: Task) -> TaskProgress:
    samples = task.samples.values()
    failures = [sample.session.failure.kind for sample in samples if sample.phase == "ended" and sample.session.failure]
    return TaskProgress(
        task_id=task.task_id,
        status=task.status,
        harness=task.request.agent.name,
        created_at=task.created_at,
        samples=dict(Counter(sample.phase.value for sample in samples)),
        usable=task.usable,
        failures=dict(Counter(failures)),
    )


def _stamp(directories: Sequence[Path]) -> list[tuple[int, int] | None]:
    """Return size and time of each run's steps; None where a run has none yet."""

    def of(path: Path) -> tuple[int, int] | None:
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns

    return [of(directory / "steps.jsonl") for directory in directories]


def _read(directory: Path) -> LearningRun:
    """Return a run. Its last line may still be written."""
    run = LearningRun(name=directory.name)
    try:
        plan = orjson.loads((directory / "plan.json").read_bytes())
        run.seed = plan["plan"]["seed"]
        path = directory / "steps.jsonl"
        with path.open("rb") as lines:
            run.lines = [line for _, line in json_lines(lines, path, may_be_cut=True)]
    except FileNotFoundError as error:
        run.problem = f"{error.filename} is not there yet"
    except (OSError, ConfigError, ValueError, LookupError, TypeError) as error:
        run.problem = f"{directory}: {error}"
    return run
