"""The units of `make show-learning`: training runs of a harness, a family of tasks and a seed, and their controls.

A control spoils or changes one thing, and begins with the start model of the unit that it controls.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from polar_gym.config.loading import load_config
from polar_gym.config.run_config import RunConfig
from polar_gym.durable import remove_tree
from polar_gym.harnesses import HARNESSES as KNOWN
from polar_gym.learning import cold_start, families
from polar_gym.learning import start as start_program
from polar_gym.learning.files import read_rows
from polar_gym.learning.grpo import LogprobsDifferError, MakeRows, Settings, rows_of
from polar_gym.learning.meter import Meter
from polar_gym.learning.report import curve
from polar_gym.learning.run import Plan, Run
from polar_gym.learning.start import make_start_model
from polar_gym.schema import Episode
from polar_gym.training import Batch
from polar_gym.training.batch import regarded
from tests.learning import march, relay

QUICK = Plan(family="repair", steps=5, evaluate_every=100, final=48)
"""The plan of a quick run."""
DEMONSTRATIONS = QUICK.demonstrations

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
    """Return the rows with the rewards of the step's scored sessions dealt out to these at random. A session that a
    budget ended gives the 0 that `rows_of` trains it on, and may get 1: its row is that of a session which ended."""
    chance = random.Random(episodes[0].session.session_id)
    scored = [regarded(episode, "zero") for episode in episodes if episode.reward is not None]
    rewards = chance.sample([episode.reward for episode in scored], len(scored))
    ended = [episode.session.model_copy(update={"truncated_by": None}) for episode in scored]
    return rows_of(
        [
            episode.model_copy(update={"reward": reward, "session": session})
            for episode, reward, session in zip(scored, rewards, ended, strict=True)
        ]
    )


def tool_output(episodes: Sequence[Episode]) -> Batch:
    """Return the rows with a loss on everything after the first prompt: on the tools' output, too. No engine sampled
    that: its logprob is set so low that its importance is the largest one, and its weight makes up for this."""
    batch = rows_of(episodes)
    rows = []
    for row in batch.rows:
        mask = row.loss_mask.copy()
        mask[row.prompt_length :] = 1
        importance = np.where(row.loss_mask == 1, 1.0, Settings().truncate)
        weights = mask / importance * (row.weights.sum() / max(1, mask.sum()))
        logprobs = np.where(row.loss_mask == 1, row.logprobs, -1e9).astype(row.logprobs.dtype)
        rows.append(
            dataclasses.replace(row, loss_mask=mask, logprobs=logprobs, weights=weights.astype(row.weights.dtype))
        )
    return Batch(rows, batch.counts)


def shifted(episodes: Sequence[Episode]) -> Batch:
    """Return the rows with each captured logprob at the token after its own."""
    batch = rows_of(episodes)
    return Batch([dataclasses.replace(row, logprobs=np.roll(row.logprobs, 1)) for row in batch.rows], batch.counts)


def main_trace(episodes: Sequence[Episode]) -> Batch:
    """Return the rows of each session's last trace, which is all that a trainer sees of a session's last request."""
    return rows_of([relay.main_trace(episode) for episode in episodes])


CONTROL_ROWS: dict[str, MakeRows] = {
    "shuffled": shuffled,
    "shifted": shifted,
    "tool_output": tool_output,
    "main_trace": main_trace,
}
CONTROL_SETTINGS = {"per_request": ["builder=per_request"], "text": ["proxy.splice=off"]}
SAME_START = (*CONTROL_ROWS, "per_request", "overlap")
"""Controls that change nothing before the first update."""
FAMILY_SETTINGS = {
    relay.FAMILY: [f"engine.max_model_len={relay.TINY_CONTEXT}"],
    march.FAMILY: [f"budget.max_calls={march.MAX_CALLS}"],
}
"""The families of the controls, with the settings of their runs."""
HARNESSES = ("codex", "claude_code", "pi", "qwen_code")
MIXTURE, TRANSFER = "mixture", "transfer"
MIXTURE_STEPS = 40
"""A mixture's harnesses share the sessions of a step: 25 steps, those of the other units, are few for four of them."""
TODAY = "2026-11-23"
"""The date that harnesses are told, so that a unit of another day has the prompts of its start model."""

UNITS = (
    *(Unit("codex", family, seed) for family in ("trail", "repair") for seed in range(5)),
    *(Unit("claude_code", "trail", seed) for seed in range(5)),
    Unit("pi", "trail", 0),
    Unit("qwen_code", "trail", 0),
    *(
        Unit("codex", "trail", seed, control)
        for control in ("shuffled", "shifted", "tool_output", "text", "overlap")
        for seed in range(3)
    ),
    *(Unit("codex", march.FAMILY, seed, control) for control in ("", "per_request") for seed in range(3)),
    *(Unit("codex", relay.FAMILY, seed, control) for control in ("", "main_trace") for seed in range(3)),
    Unit("codex", "trail", 0, "trl"),
    Unit(MIXTURE, "trail", 0),
    *(Unit(harness, "trail", 0, TRANSFER) for harness in HARNESSES[:3]),
)


def play(unit: Unit, directory: Path, say: Callable[[str], None]) -> Lines:
    """Run a unit to its end. A control begins with the start model of the unit that it controls."""
    if unit.control == "trl":
        base = directory / base_of(unit).name
        run = Run(base, Plan(family=unit.family, seed=unit.seed), configs((unit.harness,), []), say)
        run.prepare()
        return play_trl(base, directory / unit.name, say)
    harnesses = HARNESSES if unit.control == TRANSFER or unit.harness == MIXTURE else (unit.harness,)
    first = sorted(harnesses, key=lambda harness: harness != unit.harness)
    more = list(CONTROL_SETTINGS.get(unit.control, []))
    if unit.control or unit.family in FAMILY_SETTINGS:
        more.append(f"engine.model_path={start_model(unit, directory, say)}")
    more += FAMILY_SETTINGS.get(unit.family, [])
    plan = Plan(
        family=unit.family,
        seed=unit.seed,
        overlap=unit.control == "overlap",
        final=100 if len(harnesses) > 1 else 200,
        only_tested=tuple(first[1:]) if unit.control == TRANSFER else (),
        # The loop would refuse logprobs that are not its own.
        grpo=Settings(tolerance=math.inf) if unit.control == "shifted" else Settings(),
    )
    if unit.harness == MIXTURE:
        plan = dataclasses.replace(plan, steps=MIXTURE_STEPS)
    make_rows = CONTROL_ROWS.get(unit.control, rows_of)
    if unit.control in SAME_START:
        same = (dataclasses.replace(unit, control=control).name for control in ("", *SAME_START))
        copy_start([directory / name for name in same], directory / unit.name)
    if unit.control == "shifted":
        refuse(directory / unit.name, dataclasses.replace(plan, grpo=Settings()), configs(first, more), say)
    return Run(directory / unit.name, plan, configs(first, more), say, make_rows).go()


def refuse(directory: Path, plan: Plan, own: dict[str, RunConfig], say: Callable[[str], None]) -> None:
    """Have the loop, with its check on, refuse shifted logprobs, and add its words to the lines of the run. Raises
    `AssertionError` if the loop trains on them."""
    written = directory / "steps.jsonl"
    if written.exists() and any("refused" in line for line in read_rows(written)):
        return
    with tempfile.TemporaryDirectory(dir=directory.parent) as name:
        copy_start([directory], Path(name))
        try:
            Run(Path(name), plan, own, say, shifted).go()
        except LogprobsDifferError as error:
            copy_start([Path(name)], directory, copied=False)
            with written.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"refused": str(error)}) + "\n")
            say(f"refused before the first update: {error}")
            return
    raise AssertionError("the loop did not refuse shifted logprobs")


def copy_start(others: Sequence[Path], target: Path, *, copied: bool = True) -> None:
    """Give a run that has not begun the evaluations of its start model, where another of the runs has both. `copied`:
    they count for the other run alone."""
    if (target / "steps.jsonl").exists():
        return
    for other in others:
        lines = read_rows(other / "steps.jsonl") if (other / "steps.jsonl").exists() else []
        if len(evaluated := [line for line in lines if line.get("evaluated") == 0]) == 2:
            target.mkdir(exist_ok=True)
            mark = {"copied": True} if copied else {}
            text = "".join(json.dumps(line | mark) + "\n" for line in evaluated)
            (target / "steps.jsonl").write_text(text, encoding="utf-8")
            return


def start_model(unit: Unit, directory: Path, say: Callable[[str], None]) -> Path:
    """Return the start model of a unit, and of its controls; it is made where it is missing."""
    base = base_of(unit)
    (directory / base.name).mkdir(parents=True, exist_ok=True)
    if unit.family == relay.FAMILY:
        return relay.make_start(directory / base.name, unit.seed, DEMONSTRATIONS, say)
    if unit.family == march.FAMILY:
        families.FAMILIES[march.FAMILY] = march.march
    settings = FAMILY_SETTINGS.get(unit.family, [])
    own = configs(HARNESSES if base.harness == MIXTURE else (base.harness,), settings)
    return make_start_model(directory / base.name, own, unit.family, unit.seed, DEMONSTRATIONS, Meter(), say)


def base_of(unit: Unit) -> Unit:
    """Return the unit whose start model a unit begins with."""
    return dataclasses.replace(unit, control="", harness=MIXTURE if unit.control == TRANSFER else unit.harness)


def configs(harnesses: Sequence[str], settings: Sequence[str]) -> dict[str, RunConfig]:
    """Return the recipe for each harness, with these settings."""
    days = {harness: [] if harness == "codex" else [f"harness.today={TODAY}"] for harness in harnesses}
    return {name: load_config("learn", [f"harness={name}", *day, *settings]) for name, day in days.items()}


def play_trl(base: Path, directory: Path, say: Callable[[str], None]) -> Lines:
    """Train a unit's start model on its tasks with TRL, by the recipe, in a program of its own."""
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "recipes/trl/grpo.py", str(base), "--out", str(directory / "trainer")]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}  # the interpreter that has trl may not have polar-gym
    with (
        (directory / "steps.jsonl").open("w", encoding="utf-8") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"polar_gym"'):  # TRL prints dictionaries, too
                file.write(line)
            say(line.strip())
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed (exit code {process.returncode})")
    lines = read_rows(directory / "steps.jsonl")
    (directory / "curve.svg").write_text(curve({directory.name: lines}), encoding="utf-8")
    return lines


def play_quickly(unit: Unit, start: Path, say: Callable[[str], None]) -> tuple[Lines, Path]:
    """Run a unit for a few steps, from a start model that is made where it is missing. Return the unit's lines and its
    directory."""
    directory = start.parent
    settings = [f"harness={unit.harness}", *([f"engine.model_path={start}"] if start.exists() else [])]
    directory.mkdir(parents=True, exist_ok=True)
    played = Path(tempfile.mkdtemp(prefix=f"quick-{unit.name}-", dir=directory))
    say(f"plays in {played}")
    return Run(played, QUICK, {unit.harness: load_config("learn", settings)}, say).go(), played


def put_away(played: Path, start: Path) -> None:
    """Keep the start model of a quick run, and remove the run's other files."""
    if not start.exists():
        (played / "start").rename(start)
    remove_tree(played)


def quick_start(unit: Unit, directory: Path) -> Path:
    """Return the directory of a quick run's start model. The model is made once on a machine, and again where its
    program or the harness has changed: the directory's name tells both."""
    about = f"{cold_start.program()} {Path(start_program.__file__).read_text()} {KNOWN.get(unit.harness).pinned}"
    return directory / f"start-{unit.name}-{sha256(about.encode()).hexdigest()[:16]}"
