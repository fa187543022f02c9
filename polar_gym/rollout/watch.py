"""Tasks of the rollout service in a terminal: tables, and a live view that lasts until they have ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polar_gym.protocol import NodeState, TaskState, TaskStatus
from polar_gym.rollout.client import RolloutClient
from polar_gym.rollout.progress import STAGES, episode_line
from polar_gym.schema import Status

COLOURS = {
    TaskStatus.QUEUED: "dim",
    TaskStatus.RUNNING: "cyan",
    TaskStatus.COMPLETED: "green",
    TaskStatus.FAILED: "red",
    TaskStatus.CANCELLED: "yellow",
}


def task_table(tasks: Sequence[TaskState]) -> Table:
    table = Table("task", "status", "usable", *STAGES.values(), "ended", "failures", box=None, header_style="dim")
    for task in tasks:
        stages = Counter(session.status for session in task.sessions)
        ended = sum(count for status, count in stages.items() if Status(status).final)
        failures = ", ".join(f"{count} {kind}" for kind, count in task.failures.items())
        table.add_row(
            task.task_id,
            Text(task.status, COLOURS[task.status]),
            f"{task.usable}/{task.request.num_samples}",
            *(str(stages[status] or "") for status in STAGES),
            str(ended),
            Text(failures + (" (stopped early)" if task.stopped_early else ""), "red" if failures else ""),
        )
    return table


def sample_table(task: TaskState) -> Table:
    table = Table("sample", "session", "attempt", "status", "node", "why", box=None, header_style="dim")
    for session in task.sessions:
        why = f"{session.failure.kind}: {session.failure.message}" if session.failure else ""
        why = why or (f"cut by {session.truncated_by}" if session.truncated_by else "")
        table.add_row(
            str(session.sample_index), session.session_id, str(session.attempt), session.status, session.node, Text(why)
        )
    return table


def node_table(nodes: Sequence[NodeState]) -> Table:
    table = Table("node", "init", "ready", "run", "postrun", "waiting", "heard", "", box=None, header_style="dim")
    for state in nodes:
        held, places = state.heartbeat.held, state.heartbeat.places
        table.add_row(
            state.node,
            *(f"{getattr(held, stage)}/{getattr(places, stage)}" for stage in ("init", "ready", "run", "postrun")),
            str(state.heartbeat.waiting),
            f"{state.silent_seconds:.0f} s ago",
            "draining" if state.draining else "",
        )
    return table


async def follow(
    client: RolloutClient, task_ids: Sequence[str], output: Path | None, console: Console
) -> list[TaskState]:
    """Show the tasks until all have ended, with a line for each episode where they are written to `output`."""
    tasks = {task_id: await client.task(task_id) for task_id in task_ids}
    lines = output.open("wb") if output is not None else None
    started = time.monotonic()

    def view() -> Group:
        done = sum(Status(session.status).final for task in tasks.values() for session in task.sessions)
        total = sum(task.request.num_samples for task in tasks.values())
        head = Text(f"{done}/{total} samples ended, {time.monotonic() - started:.0f} s", "bold")
        return Group(head, task_table([task for task in tasks.values() if task.finished_at is None]))

    with Live(view(), console=console, refresh_per_second=4, transient=True) as live:

        async def states(task_id: str) -> None:
            async for event in client.events(task_id):
                if event.kind != "callback.delivered":
                    tasks[task_id] = await client.task(task_id)
                    live.update(view())
            tasks[task_id] = await client.task(task_id)

        async def episodes(task_id: str) -> None:
            assert lines is not None
            async for episode in client.episodes(task_id):
                lines.write(episode.to_json() + b"\n")
                lines.flush()
                live.console.print(episode_line(episode))

        try:
            async with asyncio.TaskGroup() as group:
                for task_id in task_ids:
                    group.create_task(states(task_id))
                    if lines is not None:
                        group.create_task(episodes(task_id))
        finally:
            if lines is not None:
                lines.close()
    return list(tasks.values())
