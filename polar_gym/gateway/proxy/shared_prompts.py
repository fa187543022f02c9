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
class _Room:
    ids: Ids
    used: int
    """What is beyond was not written yet."""


class SharedPrompts:
    """The prompts of calls, by the order in which they were added."""

    def __init__(self) -> None:
        self._prompts: list[tuple[_Room, int]] = []
        """Where each is, and its length."""

    def add(self, prompt: Ids, base: int | None, kept: int) -> Ids:
        """The same ids as a view of the memory of `base`, whose prompt and answer share their first `kept` ids with
        `prompt`, where it can be."""
        room = None if base is None else self._room_for(prompt, base, kept)
        self._prompts.append((room or _Room(prompt, len(prompt)), len(prompt)))
        return prompt if room is None else room.ids[: len(prompt)]

    def _room_for(self, prompt: Ids, base: int, kept: int) -> _Room | None:
        room, length = self._prompts[base]
        if kept < length:
            return None
        if room.used == length:
            return _extended(room, prompt)
        asked_again = np.array_equal(room.ids[length : min(len(prompt), room.used)], prompt[length:])
        return room if asked_again else None


def _extended(room: _Room, prompt: Ids) -> _Room:
    if len(prompt) > len(room.ids):
        longer = np.empty(2 * len(prompt), np.int32)
        longer[: room.used] = room.ids[: room.used]
        room = _Room(longer, room.used)
    room.ids[room.used : len(prompt)] = prompt[room.used :]
    room.used = len(prompt)
    return room
