"""Wrong adapters for the check of the packing: bugs of trainers, played on our arrays."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

from polar_gym.training import padded, to_torch
from polar_gym.training.conformance import LOSSES, Step, token_logprobs, train_arrays


def divided_by_rows(model: Any, step: Step) -> None:
    """Play agent-lightning #593: a session's weight is 1 / (its tokens x rows of the batch)."""
    rows = [row for row in chain(*chain(*step.ranks)) if not row.inert]
    for row in rows:
        batch = to_torch(padded([row], 0))
        _loss(model, step, batch, batch["loss_mask"] / (row.session_tokens * len(rows))).backward()


def mean_of_micro_batches(model: Any, step: Step) -> None:
    """Play TRL #7206: the token mean of each micro-batch, divided by the number of micro-batches."""
    micro_batches = list(chain(*step.ranks))
    for rows in micro_batches:
        batch = to_torch(padded(rows, 0))
        weights = batch["loss_mask"] / batch["loss_mask"].sum().clamp(1) / len(micro_batches)
        _loss(model, step, batch, weights).backward()


def a_step_for_every_eight_rows(model: Any, step: Step) -> None:
    """Play agentcore #131: more rows give more optimizer steps, each of which begins with no gradient."""
    rows = list(chain(*chain(*step.ranks)))
    for start in range(0, len(rows), 8):
        model.zero_grad()
        batch = to_torch(padded(rows[start : start + 8], 0))
        _loss(model, step, batch, batch["weights"]).backward()


def ratio_of_each_row(model: Any, step: Step) -> None:
    """Play GSPO over rows instead of sessions, as TRL and verl compute it."""
    rows = [replace(row, session_id=f"row{place}") for place, row in enumerate(chain(*chain(*step.ranks)))]
    alone = [replace(row, session_tokens=row.trainable_tokens) for row in rows]
    train_arrays(model, replace(step, ranks=[[alone]]))


def _loss(model: Any, step: Step, batch: dict[str, Any], weights: Any) -> Any:
    logprobs = token_logprobs(model, batch["input_ids"], batch["attention_mask"])
    return (weights * LOSSES[step.loss](logprobs, batch["old_logprobs"], batch["advantages"])).sum()
