"""Which weight versions there were, in their order: how far a session lies behind."""

from __future__ import annotations

from collections.abc import Iterable


class WeightHistory:
    def __init__(self, steps: Iterable[tuple[int, str]] = ()) -> None:
        self.current: str | None = None
        """None: no version was ever set."""
        self._last = 0
        self._step_of: dict[str, int] = {}
        for step, version in steps:
            self.add(step, version)

    def add(self, step: int, version: str) -> None:
        """A version that comes again (weights were rolled back) counts as its latest step."""
        self.current, self._last = version, step
        self._step_of[version] = step

    def behind(self, version: str | None) -> int | None:
        """How many versions were set after this one; None where that is not known. A session that began before any
        version was set has None, and lies behind all of them."""
        if self.current is None or (version is not None and version not in self._step_of):
            return None
        return self._last - (self._step_of[version] if version is not None else 0)
