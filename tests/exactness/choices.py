"""The sampler's choices that the stand-in invents and tells, and the same read back from the books."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np

LAYERS, TOP_K, EXPERTS = 2, 2, 8


def experts_of(ids: Sequence[int]) -> np.ndarray:
    """Return the experts at each position of a sequence, shape (positions, layers, top_k)."""
    seeds = np.asarray(ids, np.int64) * 7 + np.arange(len(ids)) * 5
    places = np.arange(LAYERS * TOP_K).reshape(LAYERS, TOP_K) * 3
    return ((seeds[:, None, None] + places) % EXPERTS).astype(np.uint8)


def kept_at(position: int, token: int) -> list[int]:
    """Return the tokens from which the one at a position was drawn."""
    return sorted({token, (token + position) % 256})


def to_npy(array: np.ndarray) -> str:
    """Return an array as vLLM sends it."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def from_npy(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)))
