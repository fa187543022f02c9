"""What one try combines, as data: a plan can be written down, changed and built again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

PLACES = (
    "init_first",
    "init_last",
    "module_first",
    "module_last",
    "new_module",
    "conftest.py",
    "tests/conftest.py",
    "tests/__init__.py",
    "sitecustomize.py",
    "usercustomize.py",
    "setup.py",
)
"""Where a fragment's Python goes: into the package, into a module of it, into a new one, or into a file by name."""

TRIGGERS = ("now", "first_use", "in_a_test", "alarm", "thread", "at_exit", "collection", "finalizer")
"""When a fragment's Python runs; see `triggers`."""

FRAMEWORKS = ("", "unittest", "pytest")
"""The module without which a fragment's Python does nothing; empty: it always runs."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One fragment of a plan, and how it is put into the repository."""

    fragment: str
    place: str = "init_last"
    nth: int = 0
    """The module, counted round and round, where the place is a module."""
    trigger: str = "now"
    framework: str = ""
    guarded: bool = False
    """Whether an exception of the fragment is swallowed."""
    packed: bool = False
    """Whether the text is compressed, so that a reader of the diff sees no suspicious word."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One try: fragments on a ground, in this order."""

    ground: str
    pieces: tuple[Piece, ...]
    partial: bool = False
    """Whether an honest-looking change, which solves a part of the task at most, goes with it."""

    @property
    def fragments(self) -> tuple[str, ...]:
        return tuple(piece.fragment for piece in self.pieces)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def plan_from(record: dict[str, Any]) -> Plan:
    """Return the plan that `as_json` wrote."""
    pieces = tuple(Piece(**piece) for piece in record["pieces"])
    return Plan(ground=record["ground"], pieces=pieces, partial=record["partial"])
