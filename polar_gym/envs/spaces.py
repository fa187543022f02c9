"""The spaces of the environments, and the three that gymnasium lacks: any text, a plain number, optional entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import Space

ALPHABET = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,\n"


T_cov = TypeVar("T_cov", covariant=True)


class _NoArray(Space[T_cov]):
    """A space whose values numpy's arrays cannot hold. Its text names all of its parameters."""

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and repr(self) == repr(other)


class AnyText(_NoArray[str]):
    """Every str, the empty one and any Unicode included (`spaces.Text` allows a fixed charset only)."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        length = int(self.np_random.integers(0, 40))
        return "".join(ALPHABET[i] for i in self.np_random.integers(0, len(ALPHABET), size=length))

    def __repr__(self) -> str:
        return "AnyText()"


class Number(_NoArray[float]):
    """A number between two bounds, Python's own or numpy's (`spaces.Box` warns of values that are not arrays)."""

    def __init__(self, low: float, high: float, *, whole: bool = False) -> None:
        self.low, self.high, self.whole = low, high, whole
        super().__init__()

    def contains(self, x: Any) -> bool:
        number = np.asarray(x)
        kinds = "iu" if self.whole else "iuf"
        return number.shape == () and number.dtype.kind in kinds and bool(self.low <= number <= self.high)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> float:
        if self.whole:
            return int(self.np_random.integers(int(self.low), int(self.high), endpoint=True))
        return float(self.np_random.uniform(self.low, self.high))

    def __repr__(self) -> str:
        return f"Number({self.low}, {self.high}{', whole' if self.whole else ''})"


class OptionalDict(_NoArray[dict[str, Any]]):
    """A dictionary whose entries may each be absent: `{}` is a member, and a dictionary with an unknown key is not.

    It does not inherit from `spaces.Dict`: gymnasium would batch it entry by entry, and a batch could not omit entries.
    """

    def __init__(self, entries: Mapping[str, Space[Any]]) -> None:
        self.spaces = dict(entries)
        super().__init__()

    def seed(self, seed: Any | None = None) -> Any:
        """Seed the space, and each entry from the next draw."""
        seeded = super().seed(seed)
        for space in self.spaces.values():
            space.seed(int(self.np_random.integers(2**31)))
        return seeded

    def contains(self, x: Any) -> bool:
        return isinstance(x, Mapping) and all(
            key in self.spaces and value in self.spaces[key] for key, value in x.items()
        )

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> dict[str, Any]:
        return {key: space.sample() for key, space in self.spaces.items() if self.np_random.random() < 0.5}

    def __repr__(self) -> str:
        return f"OptionalDict({', '.join(f'{key}: {space}' for key, space in self.spaces.items())})"


OBSERVED = ("task_id", "instruction", "message", "diff")
"""The keys of an observation. `message` (the harness's last words) and `diff` are empty before the step."""


def observation_space() -> spaces.Dict:
    return spaces.Dict({name: AnyText() for name in OBSERVED})


def action_space() -> OptionalDict:
    """Return the space of actions: values that win over the config for one episode. `{}` changes nothing."""
    return OptionalDict(
        {
            "instruction": AnyText(),
            "temperature": Number(0.0, 2.0),
            "top_p": Number(0.01, 1.0),
            "top_k": Number(-1, 1_000_000, whole=True),
        }
    )
