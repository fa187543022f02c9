"""Writes the finished units of `make show-learning` to docs/proofs: their lines, pictures, and a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from polar_gym.learning.report import cpu, curve, evaluations
from tests.learning.units import QUICK, UNITS, Lines, Unit

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
Places busy: the share of the 16 places' time, while a step's sessions ran, in which a harness worked. [Train your first
agent](../learn.md) explains the tasks and the controls.
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
        page += [f"\n## {title}\n\n![mean reward on held-out tasks]({file})\n\n", *_rows({u: units[u] for u in chosen})]
    both = [unit for unit in units if unit.control in ("", "overlap") and _against(unit, "overlap") in units]
    if both:
        svg = curve({unit.name: units[unit] for unit in both}, by_time=True)
        (PROOFS / "overlap-by-time.svg").write_text(svg, encoding="utf-8")
        page.append("\nBy time:\n\n![mean reward on held-out tasks by time](overlap-by-time.svg)\n")
    (PROOFS / "README.md").write_text("".join(page), encoding="utf-8")


def _sets(units: Mapping[Unit, Lines]) -> dict[str, list[Unit]]:
    """Return the units of each picture: all seeds of a harness and a family, and a control beside what it controls."""
    sets: dict[str, list[Unit]] = {}
    for unit in units:
        sets.setdefault(unit.control or f"{unit.harness} {unit.family}", []).append(unit)
    for control, chosen in sets.items():
        chosen[:0] = [
            base
            for base in units
            if not base.control and control == chosen[0].control and _against(base, control) in chosen
        ]
    return sets


def _against(unit: Unit, control: str) -> Unit:
    return replace(unit, control=control)


def _rows(units: Mapping[Unit, Lines]) -> list[str]:
    """Return a table of units in Markdown, and a line for each evaluation in another harness."""
    table = [f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}\n"]
    table += [f"| {unit.name} | {' | '.join(map(str, _cells(unit, lines)))} |\n" for unit, lines in units.items()]
    for unit, line in [(unit, line) for unit, lines in units.items() for line in lines if "harness" in line]:
        low, high = line["interval"]
        reward = f"{line['reward']:.3f} ({low:.3f} to {high:.3f})"
        table.append(f"\n{unit.name} in {line['harness']}, step {line['evaluated']}: {reward}\n")
    return table


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
