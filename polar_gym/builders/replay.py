"""The sampler's choices that a trainer replays: the experts of a whole sequence, and the sampling mask of a trace."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from polar_gym.record import RoutedExperts, TokenIds
from polar_gym.schema import ModelCall, SamplingMask

NO_TOKENS = np.empty(0, np.int32)


def routed_experts(last: ModelCall, calls: Mapping[str, ModelCall]) -> RoutedExperts | None:
    """Return the experts at each position of a call's prompt and answer except the last, shape
    (prompt + response - 1, layers, top_k), or None where some were not recorded. `calls`: by id.

    A spliced call has the rows after those of its parent's record, so the rows of its ancestors come first.
    """
    parts: list[RoutedExperts] = []
    call: ModelCall | None = last
    end = len(last.prompt_ids) + len(last.response_ids) - 1
    while call is not None and end > 0:
        rows = call.routed_experts
        if rows is not None:
            run = len(call.prompt_ids) + len(call.response_ids) - 1
            if run < end:
                return None
            start = run - len(rows)
            parts.append(rows[: end - start])
            end = start
        call = calls.get(call.parent_id or "") if call.continuation == "spliced" else None
    return np.concatenate(parts[::-1]) if parts and end == 0 else None


def sampling_mask(path: Sequence[ModelCall], trainable: Collection[str]) -> SamplingMask | None:
    """Return the sets of the tokens after the first prompt of a path, or None where no call of it has sets."""
    masks = {call.call_id: call.sampling_mask for call in path if call.call_id in trainable and call.sampling_mask}
    if not masks:
        return None
    start = len(path[0].prompt_ids)
    kept: list[TokenIds] = [NO_TOKENS] * (len(path[-1].prompt_ids) + len(path[-1].response_ids) - start)
    for call in path:
        if mask := masks.get(call.call_id):
            offset = len(call.prompt_ids) - start
            kept[offset : offset + len(call.response_ids)] = mask.sets()
    return SamplingMask.of(kept)
