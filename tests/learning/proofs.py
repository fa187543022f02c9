"""Writes the finished units of `make show-learning` to docs/proofs: their lines, pictures, and a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from polar_gym.learning.report import cpu, curve, evaluations
from tests.learning.units import HARNESSES, MIXTURE, QUICK, UNITS, Lines, Unit, base_of

HEADS = (
    *("unit", "start, greedy", "start", "end (95 %)", "sessions", "masked", "cut off"),
    *("tokens sampled", "trained", "forward", "s: sessions", "training", "places busy"),
    *("CPU s: sampling", "training", "the rest of the process", "MiB"),
)
PROOFS = Path("docs/proofs")

PAGE = """# Proofs that a policy learns

Written by `make show-learning` (tests/show/learning.py), which trains each unit with `polar-gym learn`'s loop through
the real harness, and goes on where it was. A unit's name is harness, family, seed and control; the file of this name
has the lines of its run. Evaluations: 200 held-out tasks at the start and at the end (100 in each of several
harnesses), 32 on the way, sampled at temperature 1, with 95 % intervals. Sessions that a budget cut off have the
reward 0. Where a control's start model was evaluated for another unit, those sessions count for that unit. Seconds,
tokens and CPU seconds are those of the steps, without evaluations; some units shared the machine with other work.
Places busy: the share of the 16 places' time, while a step's sessions ran, in which a harness worked. `earlier/` has
the first runs of two units that were run again. [Train your first agent](../learn.md) explains the tasks and controls.
"""


def write_proofs(done: Mapping[str, Lines]) -> None:
    """Write the lines of each finished unit, a picture for each set of units, and a page with all of them."""
    PROOFS.mkdir(parents=True, exist_ok=True)
    for name, lines in done.items():
        (PROOFS / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    units = {unit: done[unit.name] for unit in UNITS if unit.name in done}
    page = [PAGE]
    for title, chosen in _sets(units).items():
        file = f"{title.replace(' ', '-')}.svg"
        (PROOFS / file).write_text(curve({unit.name: units[unit] for unit in chosen}), encoding="utf-8")
        own = {unit: units[unit] for unit in chosen}
        page += [f"\n## {title}\n\n![mean reward on held-out tasks]({file})\n\n", *_rows(own), *_by_harness(own)]
    both = [unit for unit in units if unit.control in ("", "overlap") and replace(unit, control="overlap") in units]
    if both:
        svg = curve({unit.name: units[unit] for unit in both}, by_time=True)
        (PROOFS / "overlap-by-time.svg").write_text(svg, encoding="utf-8")
        page.append("\nBy time:\n\n![mean reward on held-out tasks by time](overlap-by-time.svg)\n")
    (PROOFS / "README.md").write_text("".join(page), encoding="utf-8")


def _sets(units: Mapping[Unit, Lines]) -> dict[str, list[Unit]]:
    """Return the units of each picture: all seeds of a harness and a family, and a control beside the unit whose start
    model it begins with."""
    sets: dict[str, list[Unit]] = {}
    for unit in units:
        sets.setdefault(unit.control or f"{unit.harness} {unit.family}", []).append(unit)
    for chosen in sets.values():
        bases = {base_of(unit) for unit in chosen if unit.control}
        chosen[:0] = [unit for unit in units if unit in bases]
    return sets


def _rows(units: Mapping[Unit, Lines]) -> list[str]:
    """Return a table of units in Markdown."""
    head = f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}\n"
    return [
        head,
        *(f"| {unit.name} | {' | '.join(map(str, _cells(unit, lines)))} |\n" for unit, lines in units.items()),
    ]


def _by_harness(units: Mapping[Unit, Lines]) -> list[str]:
    """Return a table in Markdown of units that were tested in several harnesses, where there are any."""
    rows = []
    for unit, lines in units.items():
        first = HARNESSES[0] if unit.harness == MIXTURE else unit.harness
        ends: dict[str, list[str]] = {harness: [] for harness in HARNESSES}
        for line in lines:
            if "evaluated" in line and not line["greedy"]:
                low, high = line["interval"]
                ends[line.get("harness", first)].append(f"{line['reward']:.3f} ({low:.3f} to {high:.3f})")
        if all(ends.values()):
            trained = "all four" if unit.harness == MIXTURE else unit.harness
            rows.append(f"| {trained} | {' | '.join(f'{each[0]}, {each[-1]}' for each in ends.values())} |\n")
    head = f"\nBefore, and after:\n\n| trained in | {' | '.join(f'tested in {each}' for each in HARNESSES)} |\n"
    return [head, f"|{'---|' * (1 + len(HARNESSES))}\n", *rows] if rows else []


def _cells(unit: Unit, lines: Lines) -> list[object]:
    """Return the figures of a unit under `HEADS`. With `overlap`, the seconds of sessions are those of the waits for
    them, and say nothing of places."""
    points, steps = evaluations(lines), [line for line in lines if "step" in line]
    greedy = [f"{line['reward']:.3f}" for line in lines if line.get("greedy")]
    own = [line for line in lines if not line.get("copied")]
    low, high = points[-1]["interval"]

    def total(name: str) -> float:
        return sum(line.get(name, 0) for line in steps)

    sampled = [
        *(greedy or [""]),
        f"{points[0]['reward']:.3f}",
        f"{points[-1]['reward']:.3f} ({low:.3f} to {high:.3f})",
        *(sum(line.get(name, 0) for line in own) for name in ("sessions", "masked", "truncated")),
        total("sampled"),
    ]
    if unit.control == "trl":  # the trainer is another program, and measures nothing of this
        return [*sampled, *[""] * (len(HEADS) - 1 - len(sampled))]
    return [
        *sampled,
        *(total(name) for name in ("trained", "forward")),
        *(round(total(name)) for name in ("rollout_seconds", "training_seconds")),
        f"{total('run_seconds') / max(1.0, total('rollout_seconds') * QUICK.places):.0%}" * (unit.control != "overlap"),
        *(round(sum(cpu(line)[part] for line in steps)) for part in (1, 2, 3)),
        max(line.get("peak_mib", 0) for line in own),
    ]
