"""Train through real harnesses, and see the reward on held-out tasks rise: `make show-learning`.

A unit is one training run: a harness, a family of tasks, a seed, and perhaps a control, which spoils one thing. Units
are kept in the cache: a unit that was stopped goes on, and a finished one is only read. `--minutes` ends the program
after a while, and it says what is missing. The curves of finished units are written to docs/proofs.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from polar_gym.config.loading import load_config
from polar_gym.console import make_console
from polar_gym.learning import cold_start, families, model
from polar_gym.learning.grpo import MakeRows, Settings, rows_of
from polar_gym.learning.report import curve, evaluations
from polar_gym.learning.run import Plan, Run
from polar_gym.paths import cache_dir
from polar_gym.schema import Episode
from polar_gym.training import Batch
from tests.e2e.vllm_server import INSTALL, vllm_python
from tests.show.result import Result, make_parser, parse

PROOFS = Path("docs/proofs")

START = "a start model is right on at most 20 % of held-out tasks, and greedy on less than 2 %"
RISES = "every seed ends at 90 % or more of held-out tasks, with 95 % intervals apart"
RISES_QUICKLY = "the reward on held-out tasks rises by 20 points in a few steps"
CONTROLS = "a control without a signal stays below 30 %"
COMPLETE = "every unit is finished"
LAWS = (START, RISES, CONTROLS, COMPLETE)
QUICK_LAWS = (START, RISES_QUICKLY, COMPLETE)
QUICK: dict[str, Any] = {"steps": 6, "evaluate_every": 100, "final": 48}
"""The fields of a quick plan."""
SILENT = ("shuffled",)
"""Controls that have no signal left."""


Lines = Sequence[dict[str, Any]]
"""The lines of a run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """One training run."""

    harness: str
    family: str
    seed: int
    control: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.harness, self.family, str(self.seed), self.control)))


def shuffled(episodes: Sequence[Episode]) -> Batch:
    """Return the rows with the rewards of the step's sessions dealt out at random."""
    chance = random.Random(episodes[0].session.session_id)
    rewards = chance.sample([episode.reward for episode in episodes], len(episodes))
    pairs = zip(episodes, rewards, strict=True)
    return rows_of([episode.model_copy(update={"reward": reward}) for episode, reward in pairs])


def tool_output(episodes: Sequence[Episode]) -> Batch:
    """Return the rows with a loss on everything after the first prompt: on the tools' output, too."""
    batch = rows_of(episodes)
    rows = []
    for row in batch.rows:
        mask = row.loss_mask.copy()
        mask[row.prompt_length :] = 1
        weights = mask * (row.weights.max() if len(row.weights) else 0)
        rows.append(dataclasses.replace(row, loss_mask=mask, weights=weights.astype(row.weights.dtype)))
    total = sum(float(row.weights.sum()) for row in rows) or 1.0
    return Batch([dataclasses.replace(row, weights=row.weights / total) for row in rows], batch.counts)


def shifted(episodes: Sequence[Episode]) -> Batch:
    """Return the rows with each captured logprob at the token after its own."""
    batch = rows_of(episodes)
    return Batch([dataclasses.replace(row, logprobs=np.roll(row.logprobs, 1)) for row in batch.rows], batch.counts)


CONTROL_ROWS: dict[str, Callable[[Sequence[Episode]], Batch]] = {
    "shuffled": shuffled,
    "shifted": shifted,
    "tool_output": tool_output,
}
CONTROL_SETTINGS = {"per_request": ["builder=per_request"], "text": ["proxy.splice=off"]}

UNITS = (
    *(Unit("codex", family, seed) for family in ("trail", "repair") for seed in range(5)),
    *(Unit("claude_code", "trail", seed) for seed in range(5)),
    Unit("pi", "trail", 0),
    Unit("qwen_code", "trail", 0),
    *(Unit("codex", "trail", seed, control) for control in (*CONTROL_ROWS, *CONTROL_SETTINGS) for seed in range(3)),
)


def play(unit: Unit, directory: Path, say: Callable[[str], None]) -> Lines:
    """Run a unit to its end. A control begins with the start model of the unit that it controls."""
    settings = [f"harness={unit.harness}", *CONTROL_SETTINGS.get(unit.control, [])]
    if unit.control:
        settings.append(f"engine.model_path={directory / dataclasses.replace(unit, control='').name / 'start'}")
    make_rows: MakeRows = CONTROL_ROWS.get(unit.control, rows_of)
    # The loop would refuse logprobs that are not its own.
    steps = Settings(tolerance=math.inf) if unit.control in CONTROL_ROWS else Settings()
    plan = Plan(family=unit.family, seed=unit.seed, grpo=steps)
    return Run(directory / unit.name, plan, load_config("learn", settings), say, make_rows).go()


def play_quickly(unit: Unit, directory: Path, say: Callable[[str], None]) -> Lines:
    """Run a unit for a few steps. Its start model is made once on a machine, and again when its sources change."""
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in (cold_start, families, model))
    start = directory / f"start-{unit.name}-{sha256(sources).hexdigest()[:16]}"
    settings = [f"harness={unit.harness}", *([f"engine.model_path={start}"] if start.exists() else [])]
    plan = Plan(family=unit.family, seed=unit.seed, **QUICK)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as name:
        lines = Run(Path(name), plan, load_config("learn", settings), say).go()
        if not start.exists():
            (Path(name) / "start").rename(start)
    return lines


def check(result: Result, unit: Unit, lines: Lines) -> None:
    """Check a finished unit."""
    points = evaluations(lines)
    first, last = points[0], points[-1]
    result.figures[unit.name] = {line["evaluated"]: [line["reward"], *line["interval"]] for line in points}
    if unit.control in SILENT:
        result.check(CONTROLS, [f"{unit.name}: {last['reward']:.3f}"] if last["reward"] >= 0.3 else [])
    if unit.control:
        return
    # A quick run has few tasks: there, only the lower ends of the intervals count.
    starts = [line for line in lines if line.get("evaluated") == 0]
    shares = [line["interval"][0] if result.options.quick else line["reward"] for line in starts]
    easy = [share >= 0.02 if line["greedy"] else share > 0.2 for share, line in zip(shares, starts, strict=True)]
    result.check(START, [f"{unit.name}: {[line['reward'] for line in starts]}"] if any(easy) else [])
    if result.options.quick:
        little = last["reward"] < first["reward"] + 0.2
        result.check(RISES_QUICKLY, [f"{unit.name}: {first['reward']:.3f} to {last['reward']:.3f}"] if little else [])
        return
    risen = last["reward"] >= 0.9 and last["interval"][0] > first["interval"][1]
    result.check(RISES, [] if risen else [f"{unit.name}: {first['reward']:.3f} to {last['reward']:.3f}"])


def finished(directory: Path, unit: Unit) -> Lines | None:
    """Return the lines of a unit that was finished earlier."""
    path = directory / unit.name / "steps.jsonl"
    if not (directory / unit.name / "curve.svg").exists():
        return None
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_proofs(done: Mapping[str, Lines]) -> None:
    """Write the lines of each finished unit, and a picture of all."""
    PROOFS.mkdir(parents=True, exist_ok=True)
    for name, lines in done.items():
        (PROOFS / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (PROOFS / "learning.svg").write_text(curve(done), encoding="utf-8")


def main() -> int:
    parser = make_parser("learning", __doc__, quick="all units but one, whose run is short")
    parser.add_argument("--directory", type=Path, default=cache_dir() / "learning", help="where units are kept")
    parser.add_argument("--units", nargs="*", default=[], help="only these, by name, e.g. codex-trail-0")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no unit after so many minutes")
    options = parse(parser, quick={"units": ["codex-repair-0"]})
    if importlib.util.find_spec("torch") is None:
        python = vllm_python() or sys.exit(f"torch is missing; install it with: {INSTALL}")
        return subprocess.run([python, "-m", "tests.show.learning", *sys.argv[1:]], check=False).returncode
    units = [unit for unit in UNITS if not options.units or unit.name in options.units]
    if not units:
        sys.exit(f"--units={options.units}: unknown; known: {', '.join(unit.name for unit in UNITS)}")
    return show(options, units)


def show(options: argparse.Namespace, units: Sequence[Unit]) -> int:
    begun, console = time.monotonic(), make_console()
    result = Result("learning", QUICK_LAWS if options.quick else LAWS, options)
    missing, done = [], {}
    for unit in units:
        lines = None if options.quick else finished(options.directory, unit)
        if lines is None and time.monotonic() - begun < options.minutes * 60:
            say = partial(console.print, markup=False, highlight=False)
            lines = (play_quickly if options.quick else play)(unit, options.directory, say)
        if lines is None:
            missing.append(f"{unit.name} is not finished")
            continue
        check(result, unit, lines)
        done[unit.name] = lines
    result.check(COMPLETE, missing)
    if not options.quick:
        write_proofs(done)
    table = Table("unit", "start", "end", "steps")
    for name, lines in done.items():
        points = evaluations(lines)
        table.add_row(name, f"{points[0]['reward']:.3f}", f"{points[-1]['reward']:.3f}", str(points[-1]["evaluated"]))
    console.print(table)
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
