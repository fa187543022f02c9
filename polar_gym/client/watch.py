"""Tasks of the rollout service in a terminal: tables, and a live view that lasts until they have ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polar_gym.client import RolloutClient, RolloutServiceError
from polar_gym.episodes.output import set_aside
from polar_gym.episodes.progress import STAGES, episode_line
from polar_gym.protocol import NodeState, StageCounts, TaskState, TaskStatus
from polar_gym.schema import Episode, Session, Status

LATE_SECONDS = 15.0
"""How long is waited for what was captured of cancelled samples."""

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
    stages = list(StageCounts.model_fields)
    table = Table("node", *stages, "waiting", "heard", "", box=None, header_style="dim")
    for state in nodes:
        held, places = state.heartbeat.held, state.heartbeat.places
        table.add_row(
            state.node,
            *(f"{getattr(held, stage)}/{getattr(places, stage)}" for stage in stages),
            str(state.heartbeat.waiting),
            f"{state.silent_seconds:.0f} s ago",
            "draining" if state.draining else "",
        )
    return table


async def follow(
    client: RolloutClient, task_ids: Sequence[str], output: Path | None, console: Console
) -> list[TaskState]:
    """Show the tasks until all have ended, with a line for each episode where they are written to `output`: the
    accepted ones, and what was captured of samples that have none because they were cancelled. What an earlier run
    wrote there is kept under another name."""
    tasks = {task_id: await client.task(task_id) for task_id in task_ids}
    if output is not None and (kept := set_aside(output)):
        console.print(Text(f"the episodes of an earlier run are kept in {kept}", "dim"), soft_wrap=True)
    lines = output.open("wb") if output is not None else None
    written = set[str]()
    started = time.monotonic()

    def view() -> Group:
        done = sum(Status(session.status).final for task in tasks.values() for session in task.sessions)
        total = sum(task.request.num_samples for task in tasks.values())
        head = Text(f"{done}/{total} samples ended, {time.monotonic() - started:.0f} s", "bold")
        return Group(head, task_table([task for task in tasks.values() if task.finished_at is None]))

    def write(episode: Episode) -> None:
        assert lines is not None
        lines.write(episode.to_json() + b"\n")
        lines.flush()
        written.add(episode.session.session_id)
        console.print(episode_line(episode))

    with Live(console=console, get_renderable=view, refresh_per_second=4, transient=True):

        async def episodes(task_id: str) -> None:
            async for episode in client.episodes(task_id):
                write(episode)

        try:
            async with asyncio.TaskGroup() as group:
                for task_id in tasks:  # each once, also where it was named twice
                    changed = asyncio.Event()
                    changing = group.create_task(_tell_changes(client, task_id, changed))
                    group.create_task(_follow_state(client, task_id, tasks, changed, changing))
                    if lines is not None:
                        group.create_task(episodes(task_id))
            if lines is not None:
                left = [session for task in tasks.values() for session in task.sessions]
                left = [session for session in left if session.session_id not in written]
                async for episode in _of_cancelled(client, left):
                    write(episode)
                if missing := sum(session.session_id not in written for session in left):
                    console.print(Text(f"{missing} samples ended without an episode", "yellow"))
        except ExceptionGroup as group:  # the first that failed ended the others
            raise group.exceptions[0] from None
        finally:
            if lines is not None:
                lines.close()
    return list(tasks.values())


async def _tell_changes(client: RolloutClient, task_id: str, changed: asyncio.Event) -> None:
    """Set the event at each change of a task, and at its end."""
    async for event in client.events(task_id):
        if event.kind != "callback.delivered":
            changed.set()
    changed.set()


async def _follow_state(
    client: RolloutClient,
    task_id: str,
    tasks: dict[str, TaskState],
    changed: asyncio.Event,
    changing: asyncio.Task[None],
) -> None:
    """Keep the state of a task in `tasks`. A state has all samples: changes that come while the answer is under way are
    one further question."""
    while changed.is_set() or not changing.done():
        await changed.wait()
        changed.clear()
        tasks[task_id] = await client.task(task_id)


def _decided(episode: Episode, session: Session) -> Episode:
    """Return an excluded episode with the server's verdict on its session, which may have ended well on its node, and
    without rewards, which a server of an earlier checkout gives."""
    failure = session.failure or episode.session.failure
    decided = {"status": session.status, "failure": failure, "staleness": session.staleness}
    return episode.unscored().model_copy(update={"session": episode.session.model_copy(update=decided)})


async def _of_cancelled(client: RolloutClient, sessions: Sequence[Session]) -> AsyncGenerator[Episode]:
    """The episodes, kept as excluded, of samples that ended without an accepted one. Those of cancelled samples come
    from their nodes a little after the task's end."""
    deadline = time.monotonic() + LATE_SECONDS
    for session in sessions:
        while session.node is not None:  # else it was on no node
            try:
                yield _decided(await client.episode(session.session_id, session.attempt), session)
                break
            except RolloutServiceError as error:
                if error.status not in (404, 410):
                    raise
            if session.status is not Status.CANCELLED or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.2)
