"""Records which weight versions were set, in their order, and computes how stale a session is."""

from __future__ import annotations

from collections.abc import Iterable


class WeightHistory:
    """The weight versions, each with the number of its latest step."""

    def __init__(self, steps: Iterable[tuple[int, str]] = ()) -> None:
        self.current: str | None = None
        """None: no version was ever set."""
        self._last = 0
        self._step_of: dict[str, int] = {}
        for step, version in steps:
            self.add(step, version)

    def add(self, step: int, version: str) -> None:
        """Add a version. A version that comes again (because weights were rolled back) counts as its latest step."""
        self.current, self._last = version, step
        self._step_of[version] = step

    def behind(self, version: str | None) -> int | None:
        """Return how many versions were set after this one, or None where that is not known. The version of a session
        that began before any version was set is None; such a session lies behind all versions."""
        if self.current is None or (version is not None and version not in self._step_of):
            return None
        return self._last - (self._step_of[version] if version is not None else 0)
