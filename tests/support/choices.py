"""Calls with the sampler's choices recorded, which tell the place and the token that they belong to."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from polar_gym.schema import Episode, ModelCall, SamplingMask
from tests.support.calls import make_call
from tests.support.episodes import make_episode


def experts(ids: Sequence[int]) -> np.ndarray:
    """Return the experts of a sequence, shape (positions, 1, 2)."""
    return np.array([[[place, token]] for place, token in enumerate(ids)], np.uint8).reshape(-1, 1, 2)


def sequence(call: ModelCall) -> list[int]:
    return [*call.prompt_ids.tolist(), *call.response_ids.tolist()]


def recorded(calls: list[ModelCall], lost: Collection[int] = ()) -> list[ModelCall]:
    """Return calls as an engine records them: a spliced call's rows begin after those of its parent, if it has any.
    `lost`: the indexes of calls without records."""
    by_id: dict[str, ModelCall] = {}
    for call in calls:
        parent = by_id.get(call.parent_id or "")
        call.continuation = "spliced" if parent else "root"
        known = len(sequence(parent)) - 1 if parent and parent.routed_experts is not None else 0
        if call.index not in lost and len(sequence(call)) > 1:
            call.routed_experts = experts(sequence(call))[max(known, 0) : -1]
            call.sampling_mask = SamplingMask.of([[token, 7] for token in call.response_ids.tolist()])
        by_id[call.call_id] = call
    return calls


def recorded_episode(session_id: str = "s", lost: Collection[int] = ()) -> Episode:
    """Return an episode of two calls: prompt 1 2, answer 3, tool result 4, answer 5 6."""
    calls = [make_call(0, [1, 2], [3]), make_call(1, [1, 2, 3, 4], [5, 6], parent_id="call0")]
    return make_episode(session_id, 1.0, recorded(calls, lost))
