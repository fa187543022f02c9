"""The sampling of trained tokens, and the refusal of logprobs that are not those of that sampling.

A trainer's ratio is over the probability with which a token was sampled. A raw logprob is taken before temperature,
truncation and penalties: where one of them is set, the token was sampled with another probability.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polar_gym.schema import Sampling, Turn
from polar_gym.training.row import Row


def check_logprobs_mode(rows: Sequence[Row]) -> None:
    """Raise `ValueError` where a trained token was not sampled, but the likeliest one (temperature 0), or where its
    logprob is raw, and a setting shaped what it was sampled from. Where the mode is not known, that is not refused."""
    for session_id, sampling in samplings(rows):
        if sampling.get("temperature") == 0:
            raise ValueError(
                f"session {session_id}: sampled with temperature=0.0, by which no trainer can divide its logits: each "
                "token was the likeliest one; leave the session out, or sample with a temperature above 0"
            )
        if sampling.get("logprobs_mode") == "raw" and (shaping := Sampling.shaping(sampling)):
            raise ValueError(
                f"session {session_id}: logprobs_mode='raw', the logprobs are taken before "
                f"{settings(sampling, shaping)}, so that they are not those of the sampling; start vLLM with "
                f"--logprobs-mode processed_logprobs, or sample with {settings(Sampling().model_dump(), shaping)}"
            )


def samplings(rows: Sequence[Row]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the session and the sampling of each call of the rows that has a trained token."""
    for row in rows:
        for turn in row.turns or [Turn(call_id="", start=0, end=len(row.token_ids))]:
            if row.loss_mask[turn.start : turn.end].any():
                yield row.session_id, row.sampling | turn.sampling


def settings(sampling: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the fields as a user writes them."""
    return ", ".join(f"{name}={sampling.get(name)}" for name in names)
