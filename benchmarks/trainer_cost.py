"""Counts a trainer's work on the same recorded sessions, by builder: `python -m benchmarks trainer_cost`.

Real harnesses work on the bundled tasks with the scripted policy, which gives each of them a session of many turns.
There are no weights and no GPU: tokens and their number are real, their meaning is not. `per_request` makes a training
sequence of every model call, `prefix_merging` of every conversation. A trainer is taken to update once for every batch
of sequences, each padded to the longest of its batch. Published for comparison: 1,185 updates became 218 (Polar). These
sessions have neither compactions nor sub-agents, which make more traces: the ratio is that of 17 calls a session.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.processes import ROOT
from benchmarks.report import Goal, Section, Table
from polar_gym.episodes.ablation import RecordedSession, cost, recorded_sessions

HARNESSES = ("pi", "codex", "gemini_cli", "claude_code", "qwen_code", "opencode")
COMMANDS = 16
"""Turns of the scripted policy with a tool call; one turn without a tool call follows."""
BATCH = 16
"""Sequences of an update."""
MINUTES = 15


def record(harness: str, folder: Path) -> list[RecordedSession]:
    """Record sessions of one harness on the bundled tasks. Raises `RuntimeError` with the end of the run's output."""
    commands = ",".join(f'"head -c {200 * (1 + turn % 5)} README.md; ls"' for turn in range(COMMANDS))
    episodes = folder / f"{harness}.jsonl"
    overrides = [
        f"harness={harness}",
        f"rollout.output={episodes}",
        f"rollout.state={folder / harness}",
        f'engine.scripts=[{{match:"",commands:[{commands}],final_message:"Done."}}]',
    ]
    done = subprocess.run(
        [sys.executable, "-m", "polar_gym", "demo", *overrides],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60 * MINUTES,
        check=False,
    )
    if done.returncode or not episodes.exists():
        raise RuntimeError(f"{harness}: {done.stdout[-1000:].decode(errors='replace')}")
    return recorded_sessions([episodes])


def measure(quick: bool) -> Section:
    rows, sessions, missing = [], [], []
    with tempfile.TemporaryDirectory(prefix="polar-gym-bench-") as folder:
        for harness in HARNESSES[: 1 if quick else None]:
            try:
                recorded = record(harness, Path(folder))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                missing.append(f"{harness} did not run: {error}")
                continue
            sessions += recorded
            rows.append(_row(harness, recorded))
    if not sessions:
        raise RuntimeError("; ".join(missing))
    rows.append(_row("all", sessions))
    single, merged = (cost(name, sessions, BATCH) for name in ("per_request", "prefix_merging"))
    columns = (
        "harness",
        "sessions",
        "traces",
        "updates",
        "padded M tokens",
        "times fewer traces",
        "times fewer tokens",
    )
    caption = f"`per_request` → `prefix_merging`, {BATCH} sequences an update. " + " ".join(missing)
    return Section(
        title="Trainer cost",
        text=(__doc__ or "").partition("\n\n")[2].strip(),
        tables=[Table(columns=columns, rows=rows, caption=caption)],
        goals=[
            Goal(
                claim="trainer: at least 5 times fewer updates by merging (published: 1,185 to 218)",
                measured=f"{single.updates} to {merged.updates}; {single.padded / merged.padded:.1f} x fewer tokens",
                held=single.updates >= 5 * merged.updates,
            )
        ],
    )


def _row(name: str, sessions: list[RecordedSession]) -> tuple[str | int | float, ...]:
    single, merged = (cost(builder, sessions, BATCH) for builder in ("per_request", "prefix_merging"))
    return (
        name,
        len(sessions),
        f"{single.traces} → {merged.traces}",
        f"{single.updates} → {merged.updates}",
        f"{single.padded / 1e6:.2f} → {merged.padded / 1e6:.2f}",
        single.traces / merged.traces,
        single.padded / merged.padded,
    )
