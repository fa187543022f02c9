"""Measures a session's cost of a node harness with and without `frugal`: `python -m benchmarks harness_cost`.

The real CLI works in a sandbox on a bundled task: the scripted policy gives it some shell commands. Both launches take
turns. CPU time and the largest process are those of all that the node started: sandbox, harness and commands. The first
round is not counted, because it reads the harness from the disk.
"""

from __future__ import annotations

import dataclasses
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.processes import ROOT
from benchmarks.report import Goal, Section, Table
from polar_gym.cli import main
from polar_gym.harnesses import Harness, Launch, LaunchContext
from polar_gym.harnesses.gemini_cli import HARNESS as GEMINI_CLI
from polar_gym.harnesses.qwen_code import HARNESS as QWEN_CODE

NAMES = ("qwen_code", "gemini_cli")
COMMANDS = ("ls", "head -c 400 README.md", "echo one")
MINUTES = 5


def cost(harness: str) -> tuple[float, float]:
    """Return CPU seconds and MB of the largest process, of one session. Raises `subprocess.SubprocessError`."""
    command = [sys.executable, "-m", "benchmarks.harness_cost", harness]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 * MINUTES, check=True)
    seconds, megabytes = map(float, done.stdout.split()[-2:])
    return seconds, megabytes


def measure(quick: bool) -> Section:
    rows, goals = list[Sequence[str | float]](), list[Goal]()
    for name in NAMES:
        both = f"benchmarks.harness_cost:PLAIN_{name.upper()}", name
        rounds = [[cost(harness) for harness in both] for _ in range(2 if quick else 6)][1:]
        before, after = (tuple(map(statistics.median, zip(*each, strict=True))) for each in zip(*rounds, strict=True))
        rows.append((name, *before, *after, before[0] / after[0]))
        goals.append(
            Goal(
                claim=f"{name}: a session takes more CPU time and memory without `frugal`",
                measured=f"{before[0] / after[0]:.2f} times the CPU time, {before[1] / after[1]:.2f} times the memory",
                held=after[0] < before[0] and after[1] < before[1],
            )
        )
    columns = ("harness", "plain: CPU s", "MB", "frugal: CPU s", "MB", "times less CPU")
    text = (__doc__ or "").partition("\n\n")[2].strip()
    return Section(
        title="A session of a node harness", text=text, tables=[Table(columns=columns, rows=rows)], goals=goals
    )


def plain(harness: Harness) -> Harness:
    """Return the harness whose launch lacks the script that node loads first."""

    def launch(context: LaunchContext) -> Launch:
        made = harness.launch(context)
        node, required, _, *rest = made.argv
        assert required == "--require", made.argv
        return dataclasses.replace(made, argv=[node, *rest])

    return dataclasses.replace(harness, launch=launch)


PLAIN_QWEN_CODE, PLAIN_GEMINI_CLI = plain(QWEN_CODE), plain(GEMINI_CLI)


def _session(harness: str) -> None:
    """Run one session, and print its CPU seconds and the MB of its largest process."""
    commands = ",".join(f'"{command}"' for command in COMMANDS)
    with tempfile.TemporaryDirectory(prefix="polar-gym-bench-") as folder:
        settings = [
            f"harness={harness}",
            "tasks.limit=1",
            "runtime=unconfined",  # a sandbox keeps the rusage of its processes
            "runtime.accept_no_isolation=true",
            "evaluator=session_completion",
            f"rollout.output={folder}/episodes.jsonl",
            f'engine.scripts=[{{match:"",commands:[{commands}],final_message:"Done."}}]',
        ]
        try:
            main(["rollout", "demo", *settings])
        except SystemExit as ended:
            if ended.code:
                raise
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


if __name__ == "__main__":
    _session(sys.argv[1])
