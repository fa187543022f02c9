"""Rows in the form of prime-rl's trainer: a `TrainingSample` for each row, and as many rows of a session as there are.

    samples = [TrainingSample(**sample) for sample in training_samples(batch.rows, env_name="swe")]

prime-rl sums the loss of all tokens over all micro-batches and ranks, and divides by the number of those with a weight.
Therefore our weights are given as multiples of their mean. Tried with the loss of commit 559b447: the gradient does not
depend on the packing (see `training.conformance`). The loss has no sequence-level ratio.

The trainer divides the logits at position t by temperature t, and these logits predict token t + 1. Therefore a
temperature stands one place before its token. The trainer has no other setting of the sampling, and rows with one are
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polar_gym.schema import Sampling
from polar_gym.training.row import Row
from polar_gym.training.sampling import check_logprobs_mode, samplings, settings
from polar_gym.training.tensors import as_sampled, token_advantages


def training_samples(rows: Sequence[Row], env_name: str) -> list[dict[str, Any]]:
    """Return the fields of one `TrainingSample` for each row of a whole batch; inert rows have none, because prime-rl
    fills up by itself.

    `routed_experts` holds the fields of prime-rl's `RoutedExperts`. Raises `ValueError` for the name `all`, which
    prime-rl keeps for metrics, and for tokens whose sampling prime-rl cannot repeat.
    """
    if env_name == "all":
        raise ValueError("env_name='all': prime-rl keeps this name for metrics of all environments; take another")
    check_logprobs_mode(rows)
    _check_repeatable(rows)
    tokens = sum(row.trainable_tokens for row in rows)
    return [
        {
            "token_ids": row.token_ids.tolist(),
            "mask": row.loss_mask.astype(bool).tolist(),
            "logprobs": row.logprobs.tolist(),
            "temperatures": [*as_sampled("temperature", row)[1:].tolist(), 1.0],
            "env_name": env_name,
            "routed_experts": _experts(row),
            "rl_weights": (row.weights.astype(np.float64) * tokens).tolist(),
            "advantages": token_advantages(row).tolist(),
        }
        for row in rows
        if not row.inert
    ]


def _check_repeatable(rows: Sequence[Row]) -> None:
    for session_id, sampling in samplings(rows):
        if names := [name for name in Sampling.shaping(sampling) if name != "temperature"]:
            raise ValueError(
                f"session {session_id}: sampled with {settings(sampling, names)}: prime-rl's trainer repeats a "
                f"temperature only; sample with {settings(Sampling().model_dump(), names)}"
            )


def _experts(row: Row) -> dict[str, Any] | None:
    """Return the experts of all positions; prime-rl wants a row for the last token, too, which was never run."""
    if row.routed_experts is None:
        return None
    missing = len(row.token_ids) - len(row.routed_experts)
    array = np.pad(row.routed_experts, ((0, missing), (0, 0), (0, 0)))
    return {"data": array.tobytes(), "shape": list(array.shape), "dtype": str(array.dtype)}
