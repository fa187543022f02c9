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

    def begin(self, version: str, step: int | None = None) -> None:
        """Note that single servers have this version, which is set only when all have it: it lies behind no version
        that was set by step `step`; None: by now."""
        self._step_of.setdefault(version, self._last if step is None else step)

    def behind(self, version: str | None) -> int | None:
        """Return how many versions were set after this one, or None where none was ever set.

        A session that began before any version was set has the version None, and lies behind all versions. A session
        whose weights have a name that was never set (an update that failed, the engine's own label) does, too.
        """
        if self.current is None:
            return None
        return self._last - (self._step_of.get(version, 0) if version is not None else 0)
