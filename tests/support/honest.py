"""Correct solutions other than the reference solutions: `tests/honest/INSTANCE_ID/NUMBER.patch`.

The text above the diff of each file says what is special about the solution.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polar_gym.tasks import Task

DIRECTORY = Path(__file__).parents[1] / "honest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A change that solves a task."""

    name: str
    """`gold`, or the number of the file."""
    style: str
    diff: bytes


def gold(task: Task) -> Solution:
    """Return the reference solution."""
    return Solution(name="gold", style="the reference solution", diff=task.patch.encode())


def solutions(task: Task) -> list[Solution]:
    """Return the other solutions of the task."""
    return [_read(path) for path in sorted((DIRECTORY / task.instance_id).glob("*.patch"))]


def _read(path: Path) -> Solution:
    text = path.read_bytes()
    begin = text.index(b"diff --git ")
    return Solution(name=path.stem, style=text[:begin].decode().strip(), diff=text[begin:])
