"""Rows as padded arrays: all that a GRPO step needs, in any trainer.

logprobs = model(input_ids, attention_mask).log_softmax(-1) of input_ids[:, 1:]
ratio = (logprobs - old_logprobs[:, 1:]).exp()
loss = -(weights[:, 1:] * minimum(ratio * advantages, clip(ratio) * advantages)).sum()
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from polar_gym.schema import Sampling, Turn, WeightVersion
from polar_gym.training.row import Row
from polar_gym.training.sampling import check_logprobs_mode

NEUTRAL = Sampling().model_dump(include={"temperature", "top_p", "top_k"})
"""The sampling fields that become arrays, with their values in inert rows."""


def padded(rows: Sequence[Row], pad_id: int, *, length_multiple_of: int = 1) -> dict[str, Any]:
    """Return the rows as arrays, padded on the right to one length. Raises `ValueError` where there are no rows, or
    where logprobs are not those of the sampling (see `training.sampling`).

    `(rows, length)`: `input_ids` int64, `attention_mask` and `loss_mask` int64, `old_logprobs`, `weights` and
    `advantages` float32 (0 where `loss_mask` is 0), `temperature`, `top_p` and `top_k` float32 (as the token was
    sampled; neutral elsewhere), `turns` int32 (the place in `row.turns`, -1 elsewhere), `turn_rewards` float32 (NaN
    where the call has no reward), `weight_versions` int32 (the place in `version_names(rows)`, -1 where not known).
    `(rows,)`: `rewards` float32, `lengths` int64, `group_ids` and `session_ids` int64 (the same number in all batches
    and processes; -1 in inert rows), `session_tokens` int64 (trained in all rows of the session), `truncated` int64 (1
    where a budget ended the session).
    Everything at position t is about token t itself.

    Where rows have them: `routed_experts` int16 `(rows, length, layers, top_k)`, -1 where unknown, and the sampling
    mask as `kept_offsets` int64 `(rows, length + 1)` into `kept_ids` int32 `(rows, most ids of a row)`.
    """
    if not rows:
        raise ValueError("there is no row: see the batch's counts for why")
    check_logprobs_mode(rows)
    length = max(len(row.token_ids) for row in rows)
    length += -length % length_multiple_of

    def filled(dtype: Any, fill: float, value: Callable[[Row], Any]) -> np.ndarray:
        array = np.full((len(rows), length), fill, dtype=dtype)
        for line, row in zip(array, rows, strict=True):
            line[: len(row.token_ids)] = value(row)
        return array

    versions = {name: number for number, name in enumerate(version_names(rows))}
    return {
        "input_ids": filled(np.int64, pad_id, lambda row: pad_id if row.inert else row.token_ids),
        "attention_mask": filled(np.int64, 0, lambda row: 1),
        "loss_mask": filled(np.int64, 0, lambda row: row.loss_mask),
        "old_logprobs": filled(np.float32, 0, lambda row: row.logprobs),
        "weights": filled(np.float32, 0, lambda row: row.weights),
        "advantages": filled(np.float32, 0, token_advantages),
        "rewards": np.array([row.reward for row in rows], dtype=np.float32),
        "lengths": np.array([len(row.token_ids) for row in rows], dtype=np.int64),
        "session_ids": np.array([stable_number(row.session_id) for row in rows], dtype=np.int64),
        "session_tokens": np.array([row.session_tokens for row in rows], dtype=np.int64),
        "group_ids": np.array([stable_number(row.group_id) for row in rows], dtype=np.int64),
        "truncated": np.array([row.truncated_by is not None for row in rows], dtype=np.int64),
        **{name: filled(np.float32, value, partial(as_sampled, name)) for name, value in NEUTRAL.items()},
        "turns": filled(np.int32, -1, lambda row: _spread(row.turns, range(len(row.turns)), _nowhere(row))),
        "turn_rewards": filled(np.float32, np.nan, _turn_rewards),
        "weight_versions": filled(np.int32, -1, lambda row: _versions(row, versions)),
        **_experts(rows, length),
        **_kept(rows, length),
    }


def version_names(rows: Sequence[Row]) -> list[str]:
    """Return the versions of the weights that sampled tokens of the rows, in order of their first token."""
    return list(dict.fromkeys(span.version for row in rows for span in row.weight_versions))


def as_sampled(name: str, row: Row) -> np.ndarray:
    """Return a sampling field of each token; the neutral value where the row trains no token and no turn is known."""
    known = row.sampling.get(name, NEUTRAL[name])
    values = [turn.sampling.get(name, known) for turn in row.turns]
    return _spread(row.turns, values, np.where(row.loss_mask == 1, known, NEUTRAL[name]))


def token_advantages(row: Row) -> np.ndarray:
    """Return the advantage of each trained token: that of its call, where calls have their own, else the session's."""
    values = [row.call_advantages.get(turn.call_id, row.advantage) for turn in row.turns]
    return _spread(row.turns, values, np.full(len(row.token_ids), row.advantage, np.float64)) * row.loss_mask


def _turn_rewards(row: Row) -> np.ndarray:
    values = [np.nan if turn.reward is None else turn.reward for turn in row.turns]
    return _spread(row.turns, values, np.full(len(row.token_ids), np.nan))


def _versions(row: Row, numbers: Mapping[str, int]) -> np.ndarray:
    values = [-1 if span.until else numbers[span.version] for span in row.weight_versions]
    return _spread(row.weight_versions, values, _nowhere(row))


def _nowhere(row: Row) -> np.ndarray:
    return np.full(len(row.token_ids), -1)


def _spread(spans: Sequence[Turn | WeightVersion], values: Sequence[float], array: np.ndarray) -> np.ndarray:
    """Write the value of each span to its tokens."""
    for span, value in zip(spans, values, strict=True):
        array[span.start : span.end] = value
    return array


def stable_number(name: str) -> int:
    """Return the number of a session or group, the same in all processes; -1 for the empty name of inert rows."""
    return int.from_bytes(blake2b(name.encode(), digest_size=7).digest()) if name else -1


def _experts(rows: Sequence[Row], length: int) -> dict[str, np.ndarray]:
    """Return the routed experts as an array. Raises `ValueError` where some rows have them and others do not: the
    others would be trained by experts that did not sample them."""
    shapes = {row.routed_experts.shape[1:] for row in rows if row.routed_experts is not None}
    if not shapes:
        return {}
    without = [row.trace_id for row in rows if row.routed_experts is None and not row.inert]
    if without or len(shapes) > 1:
        raise ValueError(f"traces without routed experts, or of another model: {without or sorted(shapes)}")
    array = np.full((len(rows), length, *shapes.pop()), -1, np.int16)
    for line, row in zip(array, rows, strict=True):
        if row.routed_experts is not None:
            line[: len(row.routed_experts)] = row.routed_experts
    return {"routed_experts": array}


def _kept(rows: Sequence[Row], length: int) -> dict[str, np.ndarray]:
    """Return the sampling masks as arrays; a row without a mask has empty sets."""
    masks = [row.sampling_mask for row in rows]
    if not any(masks):
        return {}
    offsets = np.zeros((len(rows), length + 1), np.int64)
    ids = np.full((len(rows), max(len(mask.token_ids) for mask in masks if mask)), -1, np.int32)
    for place, mask in enumerate(masks):
        if mask is not None:
            offsets[place, : len(mask.offsets)] = mask.offsets
            offsets[place, len(mask.offsets) :] = mask.offsets[-1]
            ids[place, : len(mask.token_ids)] = mask.token_ids
    return {"kept_offsets": offsets, "kept_ids": ids}


def to_torch(value: Any) -> Any:
    """Return `value` with a torch tensor in the place of every numpy array in its dictionaries and lists."""
    if isinstance(value, np.ndarray):
        return importlib.import_module("torch").from_numpy(value)
    if isinstance(value, dict):
        return {key: to_torch(entry) for key, entry in value.items()}
    return [to_torch(entry) for entry in value] if isinstance(value, list) else value
