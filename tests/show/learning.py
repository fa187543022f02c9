"""Train through real harnesses, and see the reward on held-out tasks rise: `make show-learning`.

A unit is one training run: a harness, a family of tasks, a seed, and perhaps a control, which spoils one thing. Units
are kept in the cache: a unit that was stopped goes on. The lines of finished units are written to docs/proofs, and a
unit that has lines there is only read; `--anew` removes such a unit from the cache, its start model too, and plays it
again. `--minutes` ends the program after a while, and it says what is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from polar_gym.console import make_console
from polar_gym.durable import remove_tree
from polar_gym.learning.files import read_rows
from polar_gym.learning.report import evaluations
from polar_gym.paths import cache_dir
from tests.e2e.vllm_server import INSTALL, vllm_python
from tests.learning.proofs import PROOFS, write_proofs
from tests.learning.units import UNITS, Lines, Unit, base_of, play, play_quickly, put_away, quick_start
from tests.show.result import Result, make_parser, parse

START = "a start model is right on at most 20 % of held-out tasks, and greedy on less than 2 %"
RISES = "every seed ends at 90 % or more of held-out tasks, with 95 % intervals apart"
SCORED = "at most 2 % of a unit's sessions have no reward"
RISES_QUICKLY = "the reward on held-out tasks rises by 20 points in a few steps"
COMPLETE = "every unit is finished"
QUICK_LAWS = (START, RISES_QUICKLY, SCORED, COMPLETE)


def end(lines: Lines) -> dict[str, Any]:
    return evaluations(lines)[-1]


def worse(base: Lines, own: Lines) -> bool:
    """Return whether a control ends below the unit that it controls, with 95 % intervals apart."""
    return end(own)["interval"][1] < end(base)["interval"][0]


def same_for_more(base: Lines, own: Lines) -> bool:
    """Return whether the intervals at the end overlap, and a control has 5 times the tokens in forward passes."""
    together = end(own)["interval"][0] <= end(base)["interval"][1] and not worse(base, own)
    tokens = [sum(line.get("forward", 0) for line in lines) for lines in (base, own)]
    return together and tokens[1] >= 5 * tokens[0]


def refused_and_worse(base: Lines, own: Lines) -> bool:
    return any("refused" in line for line in own) and worse(base, own)


CONTROLS: dict[str, tuple[str, Callable[[Lines, Lines], bool]]] = {
    "shuffled": ("rewards that are dealt out at random teach nothing", lambda base, own: end(own)["reward"] < 0.3),
    "shifted": ("logprobs at the wrong tokens are refused before the first update, and teach less", refused_and_worse),
    "tool_output": ("training the tools' output, too, is worse", worse),
    "per_request": ("per_request ends where prefix_merging does, for 5 times the forward tokens", same_for_more),
    "main_trace": ("training the last trace alone is worse than training all", worse),
}
"""Control -> its law, which compares the unit that is controlled with the control."""
LAWS = (START, RISES, SCORED, *(law for law, _ in CONTROLS.values()), COMPLETE)


def laws_of(units: Sequence[Unit]) -> list[str]:
    """Return the laws that some of the units are under."""
    idle = {law for control, (law, _) in CONTROLS.items() if all(unit.control != control for unit in units)}
    idle |= {START, RISES} if all(unit.control for unit in units) else set()
    return [law for law in LAWS if law not in idle]


def check(result: Result, unit: Unit, lines: Lines) -> None:
    """Check a finished unit."""
    points = evaluations(lines)
    first, last = points[0], points[-1]
    result.figures[unit.name] = {line["evaluated"]: [line["reward"], *line["interval"]] for line in points}
    own = [line for line in lines if not line.get("copied")]
    masked, sessions = (sum(line.get(name, 0) for line in own) for name in ("masked", "sessions"))
    result.check(SCORED, [f"{unit.name}: {masked} of {sessions}"] if masked > 0.02 * sessions else [])
    if unit.control:
        return
    # A quick run has few tasks: there, only the lower ends of the intervals count.
    starts = [line for line in lines if line.get("evaluated") == 0]
    shares = [line["interval"][0] if result.options.quick else line["reward"] for line in starts]
    easy = [share >= 0.02 if line["greedy"] else share > 0.2 for share, line in zip(shares, starts, strict=True)]
    result.check(START, [f"{unit.name}: {[line['reward'] for line in starts]}"] if any(easy) else [])
    if result.options.quick:
        law, risen = RISES_QUICKLY, last["reward"] >= first["reward"] + 0.2
    else:
        law, risen = RISES, last["reward"] >= 0.9 and last["interval"][0] > first["interval"][1]
    result.check(law, [] if risen else [f"{unit.name}: {first['reward']:.3f} to {last['reward']:.3f}"])


def check_control(result: Result, unit: Unit, lines: Lines, base: Lines | None) -> None:
    """Check a finished control against the unit that it controls."""
    law, holds = CONTROLS[unit.control]
    if base is None:
        result.check(law, [f"{unit.name}: the unit without the control is not finished"])
    else:
        told = f"{unit.name}: {end(lines)['reward']:.3f}, without the control {end(base)['reward']:.3f}"
        result.check(law, [] if holds(base, lines) else [told])


def finished(unit: Unit, directory: Path) -> Lines | None:
    """Return the lines of a unit that was finished earlier: those in docs/proofs, else in the cache."""
    proof = PROOFS / f"{unit.name}.jsonl"
    if proof.exists():
        return read_rows(proof)
    kept = directory / unit.name
    return read_rows(kept / "steps.jsonl") if (kept / "curve.svg").exists() else None


def forget(unit: Unit, directory: Path) -> None:
    """Remove a finished unit from the cache, or one that has taken no step, and the controls that begin with its start
    model. A unit that was stopped after a step stays, and goes on."""
    kept = directory / unit.name
    if kept.exists() and ((kept / "curve.svg").exists() or not (kept / "last.pt").exists()):
        for each in UNITS:
            if unit in (each, base_of(each)):
                remove_tree(directory / each.name)


def main() -> int:
    parser = make_parser("learning", __doc__, quick="all units but one, whose run is short")
    parser.add_argument("--directory", type=Path, default=cache_dir() / "learning", help="where units are kept")
    parser.add_argument("--units", nargs="*", default=[], help="only these, by name, e.g. codex-trail-0")
    parser.add_argument("--anew", action="store_true", help="begin again, but for units that were stopped")
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
    result = Result("learning", QUICK_LAWS if options.quick else laws_of(units), options)
    missing, done, start, played = [], {}, None, None
    for unit in units:
        lines = None if options.quick or options.anew else finished(unit, options.directory)
        if lines is None and time.monotonic() - begun < options.minutes * 60:
            if options.anew and not options.quick:
                forget(unit, options.directory)
            say = partial(console.print, markup=False, highlight=False)
            if options.quick:
                start = quick_start(unit, options.directory)
                lines, played = play_quickly(unit, start, say)
            else:
                lines = play(unit, options.directory, say)
        if lines is None:
            missing.append(f"{unit.name} is not finished")
            continue
        check(result, unit, lines)
        if start and played and not any(result.breaches[law] for law in QUICK_LAWS[:-1]):
            put_away(played, start)
        if unit.control in CONTROLS:
            base = replace(unit, control="")
            check_control(result, unit, lines, done.get(base.name) or finished(base, options.directory))
        done[unit.name] = lines
    result.check(COMPLETE, missing)
    if not options.quick:
        every = {unit.name: done.get(unit.name) or finished(unit, options.directory) for unit in UNITS}
        write_proofs({name: lines for name, lines in every.items() if lines is not None})
    table = Table("unit", "start", "end", "steps")
    for name, lines in done.items():
        points = evaluations(lines)
        table.add_row(name, f"{points[0]['reward']:.3f}", f"{points[-1]['reward']:.3f}", str(points[-1]["evaluated"]))
    console.print(table)
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
