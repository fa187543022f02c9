"""The answers that a harness threw away, and asked for again: data for imitation does not train them.

For reinforcement learning they are the policy's failures, and trained (`builder.train_rejected`). The reward that
makes an episode worth imitating is not theirs.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from polar_gym.schema import SamplingMask, Trace, Trajectory


def without_rejected(trajectory: Trajectory) -> list[Trace]:
    """Return the traces, in which no token of a rejected answer is trained."""
    return [_masked(trace, trajectory.rejected) for trace in trajectory.traces]


def _masked(trace: Trace, rejected: Collection[str]) -> Trace:
    """Return the trace without a loss on these answers."""
    trained = np.ones(len(trace.response_ids), bool)
    for turn in trace.turns:
        if turn.call_id in rejected:
            trained[turn.start : turn.end] = False
    if trained.all():
        return trace
    kept = trace.sampling_mask
    if kept is not None:
        kept = SamplingMask.of([ids if own else [] for ids, own in zip(kept.sets(), trained, strict=True)])
    changes = {"loss_mask": trace.loss_mask * trained, "logprobs": trace.logprobs * trained, "sampling_mask": kept}
    return trace.model_copy(update=changes)
