"""The prompts of one session's calls, kept in memory once where they begin with each other.

Each prompt holds the whole conversation before it. Kept separately, the prompts of a long session would take memory
that grows with the square of its length. Instead, the prompts of a conversation are views of one array. A full array is
replaced by one twice as long as needed. A prompt that does not continue from the array's end (a fork) gets a new array.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


@dataclass(slots=True)
class _Buffer:
    ids: Ids
    used: int
    """How many of the ids were written. The rest of the array is free."""


class SharedPrompts:
    """The prompts of calls, in the order in which they were added."""

    def __init__(self) -> None:
        self._prompts: list[tuple[_Buffer, int]] = []
        """The buffer of each prompt, and its length there."""

    def add(self, prompt: Ids, base: int | None, kept: int) -> Ids:
        """Return the ids of `prompt`, where possible as a view of the memory of the earlier prompt number `base`. The
        prompt and answer of `base` share their first `kept` ids with `prompt`."""
        buffer = None if base is None else self._buffer_for(prompt, base, kept)
        self._prompts.append((buffer or _Buffer(prompt, len(prompt)), len(prompt)))
        return prompt if buffer is None else buffer.ids[: len(prompt)]

    def _buffer_for(self, prompt: Ids, base: int, kept: int) -> _Buffer | None:
        buffer, length = self._prompts[base]
        if kept < length:
            return None
        if buffer.used == length:
            return _extended(buffer, prompt)
        asked_again = np.array_equal(buffer.ids[length : min(len(prompt), buffer.used)], prompt[length:])
        return buffer if asked_again else None


def _extended(buffer: _Buffer, prompt: Ids) -> _Buffer:
    if len(prompt) > len(buffer.ids):
        longer = np.empty(2 * len(prompt), np.int32)
        longer[: buffer.used] = buffer.ids[: buffer.used]
        buffer = _Buffer(longer, buffer.used)
    buffer.ids[buffer.used : len(prompt)] = prompt[buffer.used :]
    buffer.used = len(prompt)
    return buffer
