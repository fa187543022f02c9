"""The prompts of one session's calls, in memory once where they begin with each other.

Each prompt holds all of the conversation before it: side by side, those of a long session would take memory that grows
with the square of its length. A conversation's prompts are views of one array instead. It is made twice as long as
needed whenever it is full; what does not go on from its end (a fork) gets an array of its own.
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
    """What is beyond was not written yet."""


class SharedPrompts:
    """The prompts of calls, by the order in which they were added."""

    def __init__(self) -> None:
        self._prompts: list[tuple[_Buffer, int]] = []
        """Where each is, and its length."""

    def add(self, prompt: Ids, base: int | None, kept: int) -> Ids:
        """The same ids as a view of the memory of `base`, whose prompt and answer share their first `kept` ids with
        `prompt`, where it can be."""
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
