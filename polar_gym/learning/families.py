"""Families of small tasks whose right answer is known only to an agent that reads the results of its commands.

All names in a task are random: two units of a letter and a digit each, such as `g4k7`. A family is a set of puzzles;
a seed and a number make one puzzle. Tasks that are held out have other names than tasks for training.

- `trail`: notes that name other notes; a file must be made with the name that the last one holds.
- `repair`: a check that fails, and passes when one name in one file is replaced by another.

A puzzle has decisions, in order. `demonstrate` plays the right or the wrong command of each: the work of a careless
agent, who is right at the first choice less often than wrong: a model that imitates this agent solves nothing greedily.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

Split = Literal["train", "held_out"]

LETTERS = "ghijkmnpqrstuvwxyz"
UNITS = [letter + digit for letter in LETTERS for digit in "0123456789"]
NAME = f"(?:[{LETTERS}][0-9]){{2}}"
"""A regular expression that finds names."""
HELD_OUT_SHARE = 4
"""One name of so many is for tasks that are held out."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A point at which the agent acts: by a shell command."""

    right: str
    wrong: str = ""
    """The wrong command. An agent that runs it stops afterwards. Empty: there is none at this point."""
    chance: float = 1.0
    """How often the careless agent is right."""


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A task, and how it may be played."""

    issue: str
    files: dict[str, str]
    test: str
    """A shell command that succeeds where the puzzle is solved."""
    decisions: list[Decision]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """The commands of one attempt."""

    commands: list[str]
    lead: int
    """How many of the first commands were right without a choice: they must not be imitated, or the agent that does
    would be too good."""
    solved: bool


def trail(names: Iterator[str], chance: random.Random) -> Puzzle:
    """Return a puzzle of three notes. The careless agent takes the next note's name for the word, or the word for the
    name of a note."""
    first, second, third, word = (next(names) for _ in range(4))
    return Puzzle(
        f"Follow the notes from {first} to a word. Make an empty file with this name.",
        {first: f"next {second}\n", second: f"next {third}\n", third: f"word {word}\n"},
        f"test -f {word} && test $(ls | wc -l) = 4",
        [
            Decision(f"cat {first}"),
            Decision(f"cat {second}", f"touch {second}", 0.2),
            Decision(f"cat {third}", f"touch {third}", 0.7),
            Decision(f"touch {word}", f"cat {word}", 0.85),
        ],
    )


def repair(names: Iterator[str], chance: random.Random) -> Puzzle:
    """Return a puzzle with a check that fails. The careless agent writes the wanted name over the whole file."""
    check, file, other, wanted, present, kept = (next(names) for _ in range(6))
    report = _shuffled(chance, f"fail {file} needs {wanted}", f"good {other}").strip()
    test = f"grep -qx 'is {wanted}' {file} && grep -qx 'keep {kept}' {file}"
    return Puzzle(
        f"Run {check} and mend the file that fails.",
        {
            check: f"if {test}; then echo pass; else echo '{report}'; fi\n",
            file: _shuffled(chance, f"is {present}", f"keep {kept}"),
            other: f"is {wanted}\n",
        },
        test,
        [
            Decision(f"sh {check}"),
            Decision(f"cat {file}", f"echo {wanted} > {file}", 0.3),
            Decision(f"sed -i s/{present}/{wanted}/ {file}", f"echo {wanted} > {file}", 0.45),
        ],
    )


FAMILIES: dict[str, Callable[[Iterator[str], random.Random], Puzzle]] = {"trail": trail, "repair": repair}


def make_puzzle(family: str, split: Split, seed: int, number: int) -> Puzzle:
    """Return one puzzle: the same for the same arguments."""
    chance = random.Random(f"{family} {split} {seed} {number}")
    return FAMILIES[family](names(split, chance), chance)


def make_puzzles(family: str, split: Split, seed: int, count: int) -> list[Puzzle]:
    """Return puzzles, no two with the same issue: an issue tells a demonstration's puzzle."""
    found: dict[str, Puzzle] = {}
    number = 0
    while len(found) < count:
        puzzle = make_puzzle(family, split, seed, number)
        found.setdefault(puzzle.issue, puzzle)
        number += 1
    return list(found.values())


def names(split: Split, chance: random.Random) -> Iterator[str]:
    """Yield random names of one split. No unit occurs in two of them, so that a name is known by any of its units."""
    units = iter(chance.sample(UNITS, len(UNITS)))
    for first in units:
        name = first + next(units)
        if split_of(name) == split:
            yield name


def split_of(name: str) -> Split:
    """Return the split that a name belongs to."""
    return "train" if blake2b(name.encode(), digest_size=1).digest()[0] % HELD_OUT_SHARE else "held_out"


def demonstrate(puzzle: Puzzle, chance: random.Random) -> Demonstration:
    """Play a puzzle as the careless agent does, after some decisions that are right in any case."""
    lead = chance.randrange(len(puzzle.decisions))
    commands: list[str] = []
    for place, decision in enumerate(puzzle.decisions):
        right = place < lead or not decision.wrong or chance.random() < decision.chance
        commands.append(decision.right if right else decision.wrong)
        if not right:
            return Demonstration(commands, lead, solved=False)
    return Demonstration(commands, lead, solved=True)


def write_tasks(directory: Path, family: str, split: Split, seed: int, count: int) -> Path:
    """Write a file of tasks, with a directory for the files of each. Return the path of the file."""
    rows = []
    for number, puzzle in enumerate(make_puzzles(family, split, seed, count)):
        task_id = f"{family}-{split}-{seed}-{number}"
        workspace = directory / task_id
        workspace.mkdir(parents=True, exist_ok=True)
        for name, text in puzzle.files.items():
            (workspace / name).write_text(text, encoding="utf-8")
        rows.append(_row(task_id, puzzle))
    path = directory / f"{family}-{split}-{seed}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _row(task_id: str, puzzle: Puzzle) -> dict[str, Any]:
    return {
        "instance_id": task_id,
        "problem_statement": puzzle.issue,
        "workspace": task_id,
        "test_command": puzzle.test,
        "repo": "polar-gym/learning",
    }


def _shuffled(chance: random.Random, *lines: str) -> str:
    return "\n".join(chance.sample(lines, len(lines))) + "\n"


def scripts(demonstrations: Sequence[tuple[Puzzle, Demonstration]]) -> list[dict[str, Any]]:
    """Return the demonstrations as scripts of the embedded engine's scripted policy."""
    return [
        {"match": puzzle.issue, "commands": demonstration.commands, "final_message": "done"}
        for puzzle, demonstration in demonstrations
    ]
