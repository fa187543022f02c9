"""What the live page shows: the tasks, nodes and sessions of now, and the runs of `polar-gym learn`."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from polar_gym.durable import json_lines
from polar_gym.errors import ConfigError
from polar_gym.protocol import Disk, LearningRun, Live, LiveSession, TaskProgress
from polar_gym.schema import Status
from polar_gym.service.node_link import NodeLink, NodeUnreachableError
from polar_gym.service.service import RolloutService
from polar_gym.service.task import Task

TASKS = 200
"""How many live tasks the page shows at most."""
SECONDS = 1.0
"""The pause between two states."""

Document = dict[str, Any]
"""An object of JSON."""


class Watch:
    """The state of now: made at most once a second, however many pages follow it. `learning`: directories of
    `polar-gym learn`."""

    def __init__(self, service: RolloutService, link: NodeLink, learning: Sequence[Path]) -> None:
        self._service, self._link, self._learning = service, link, learning
        self._making = asyncio.Lock()
        self._state: Document = {}
        self._before: Document = {}
        self._step = b""
        """The line that leads from `_before` to `_state`."""
        self._due = -math.inf
        self._stamps: object = ()
        self._runs: list[LearningRun] = []

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the state as a line of JSON, a `Live` without its nulls; then, each second without end, the change of
        the state since the line before, as a JSON merge patch (RFC 7386)."""
        known: Document = {}
        while True:
            now = await self._newer(known)
            yield self._step if self._before is known else await asyncio.to_thread(_line, known, now)
            known = now

    async def _newer(self, known: Document) -> Document:
        clock = asyncio.get_running_loop().time
        if known is self._state or clock() >= self._due:
            async with self._making:
                if known is self._state or clock() >= self._due:
                    await asyncio.sleep(self._due - clock())
                    await self._make()
                    self._due = clock() + SECONDS
        return self._state

    async def _make(self) -> None:
        stamps = await asyncio.to_thread(_stamp, self._learning)
        if stamps != self._stamps:
            self._runs = await asyncio.to_thread(lambda: [_read(each) for each in self._learning])
            self._stamps = stamps
        live = await _now(self._service, self._link, self._runs)
        before = self._state

        def written() -> tuple[Document, bytes]:
            state = live.model_dump(mode="json", exclude_none=True)
            return state, _line(before, state)

        state, self._step = await asyncio.to_thread(written)
        self._state, self._before = state, before


def merge_patch(old: Document, new: Document) -> Document:
    """Return the JSON merge patch (RFC 7386) that makes `new` out of `old`. Neither object holds null."""
    patch: Document = dict.fromkeys(old.keys() - new.keys())
    for key, value in new.items():
        before = old.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            if inner := merge_patch(before, value):
                patch[key] = inner
        elif before != value:
            patch[key] = value
    return patch


def _line(old: Document, new: Document) -> bytes:
    return orjson.dumps(merge_patch(old, new)) + b"\n"


async def _now(service: RolloutService, link: NodeLink, runs: list[LearningRun]) -> Live:
    book, weights, limits, nodes = service.book, service.weights, service.limits, service.node_states()
    asked = await asyncio.gather(*(link.transcripts(node.heartbeat.url) for node in nodes), return_exceptions=True)
    sessions = {
        f"{told.session_id}.{told.attempt}": LiveSession(session=told)
        for node in nodes
        for told in node.heartbeat.sessions
        if told.status is not Status.QUEUED and not told.status.final
    }
    unreached: dict[str, str] = {}
    for node, answer in zip(nodes, asked, strict=True):
        if isinstance(answer, NodeUnreachableError):
            unreached[node.node] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            for told in answer:
                if (session := sessions.get(f"{told.session_id}.{told.attempt}")) is not None:
                    session.calls, session.lines = told.calls, told.lines
    versions = {each.session.weight_version for each in sessions.values()}
    behind = {version: weights.behind(version) for version in versions if version is not None}
    usage = await asyncio.to_thread(shutil.disk_usage, service.store.path.parent)
    return Live(
        at=time.time(),
        generation=service.generation,
        weight_version=weights.current,
        behind={version: steps for version, steps in behind.items() if steps is not None},
        tasks={task.task_id: _progress(task) for task in islice(reversed(book.live.values()), TASKS)},
        live_tasks=len(book.live),
        waiting=sum(sample.phase == "waiting" for task in book.live.values() for sample in task.open_samples()),
        ended_tasks=dict(book.counts.tasks),
        episodes=dict(book.counts.episodes),
        failures=dict(book.counts.failures),
        retried=book.counts.retried,
        nodes={
            node.node: node.model_copy(update={"heartbeat": node.heartbeat.model_copy(update={"sessions": []})})
            for node in nodes
        },
        sessions=sessions,
        unreached=unreached,
        disk=Disk(stored=book.stored_bytes, keep=limits.keep_bytes, refuse=limits.refuse_bytes, free=usage.free),
        runs=runs,
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
