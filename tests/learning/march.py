"""A family of tasks whose sessions have ten calls, for the control that trains each call as a row of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

from polar_gym.learning.families import Decision, Puzzle

FAMILY = "march"
NOTES = 8
MAX_CALLS = NOTES + 4


def march(names: Iterator[str], chance: random.Random) -> Puzzle:
    """Return a puzzle of a trail with many notes. The last but one says `then`: the careless agent takes the name that
    it holds for the word."""
    *notes, last, word = (next(names) for _ in range(NOTES + 1))
    says = {note: f"next {following}\n" for note, following in pairwise(notes)}
    return Puzzle(
        f"March along the notes from {notes[0]} to a word. Make an empty file with this name.",
        {**says, notes[-1]: f"then {last}\n", last: f"word {word}\n"},
        f"test -f {word} && test $(ls | wc -l) = {NOTES + 1}",
        [
            *(Decision(f"cat {note}") for note in notes),
            Decision(f"cat {last}", f"touch {last}", 0.2),
            Decision(f"touch {word}", f"cat {word}", 0.7),
        ],
    )
