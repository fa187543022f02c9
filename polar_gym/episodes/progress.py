"""Live progress in a terminal: how many sessions are in which stage, and a line for each session that ended."""

from __future__ import annotations

from collections import Counter
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polar_gym.schema import Episode, Session, Status

STAGES = {
    Status.QUEUED: "queued",
    Status.INITIALIZING: "init",
    Status.READY: "ready",
    Status.RUNNING: "running",
    Status.BUILDING: "building",
    Status.EVALUATING: "evaluating",
}


class Progress:
    """The live line. It is drawn again on every change of a session; a session that ends gets a line that stays."""

    def __init__(self, console: Console, total: int) -> None:
        self._total = total
        self._sessions: dict[str, Status] = {}
        self._stages: Counter[Status] = Counter()
        self._finished = 0
        self._live = Live(self._table(), console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def update(self, session: Session) -> None:
        before = self._sessions.get(session.session_id)
        if before is not None:
            self._stages[before] -= 1
        self._sessions[session.session_id] = session.status
        self._stages[session.status] += 1
        self._live.update(self._table())

    def done(self, episode: Episode) -> None:
        self._finished += 1
        self._live.console.print(episode_line(episode))
        self._live.update(self._table())

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        waiting = self._total - len(self._sessions)
        row = [f"[bold]{self._finished}/{self._total}[/] done"]
        for status, name in STAGES.items():
            count = self._stages[status] + (waiting if status is Status.QUEUED else 0)
            row.append(f"[cyan]{count}[/] {name}" if count else f"[dim]0 {name}[/]")
        table.add_row(*row)
        return table


def episode_line(episode: Episode) -> Text:
    """Return one line about a session that ended: the failure, or the reward and the counts."""
    session = episode.session
    if session.failure is not None:
        return Text.assemble(
            ("✗ ", "red"), session.task_id, (f"  {session.failure.kind}: ", "red"), session.failure.message
        )
    if episode.reward is None:
        return Text.assemble(("✗ ", "red"), session.task_id, (f"  {session.status.lower()}", "red"))
    mark = ("✓ ", "green") if episode.reward else ("· ", "yellow")
    fidelity = episode.trajectory.fidelity
    said = f"  reward {episode.reward:g}  {fidelity.calls} calls  {fidelity.trainable_tokens} trainable tokens"
    cut = f"  (cut by {session.truncated_by})" if session.truncated_by else ""
    return Text.assemble(mark, session.task_id, (said, ""), (cut, "yellow"))
