"""Names that a harness makes up for its own things, such as sub-agents, and that the policy gives back to it.

A session that starts from a record gets other names than the recorded ones, which the policy knows. In all that comes
from the harness, the recorded name takes the place of the new one, and in all that goes there the new one that of the
recorded one. So the policy goes on to reach what it has begun.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

_UNMISTAKABLE = re.compile(r"[A-Za-z0-9_-]{12,}")
"""A handle that occurs nowhere by chance, and that JSON does not escape."""


@dataclass(slots=True)
class Handles:
    """The handles of one session."""

    patterns: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    """See `Harness.handles`."""
    recorded: dict[str, str] = field(default_factory=dict)
    """The handle of this run -> that of the record."""

    def learn(self, said: str, recorded: str) -> Counter[str]:
        """Learn the handles of a tool's result, from what the record has in its place; return how many, by name."""
        learned: Counter[str] = Counter()
        for name, pattern in self.patterns.items():
            own, old = pattern.findall(said), pattern.findall(recorded)
            for one, other in zip(own, old, strict=True) if len(own) == len(old) else ():
                known = one == other or one in self.recorded or other in self.recorded.values()
                if not known and _UNMISTAKABLE.fullmatch(one) and _UNMISTAKABLE.fullmatch(other):
                    self.recorded[one] = other
                    learned[name] += 1
        return learned

    def from_harness(self, value: T) -> T:
        """Return a JSON value with the recorded handles."""
        return _replaced(value, self.recorded)

    def for_harness(self, value: T) -> T:
        """Return a JSON value with the handles of this run."""
        return _replaced(value, {old: own for own, old in self.recorded.items()})


def _replaced(value: T, names: Mapping[str, str]) -> T:
    if not names:
        return value
    any_name = re.compile("|".join(map(re.escape, names)))
    return json.loads(any_name.sub(lambda found: names[found[0]], json.dumps(value)))
