"""Rows as NeMo RL takes them: message logs, and the data of its policy loss.

NeMo RL knows two roles: a message of the `assistant` with `generation_logprobs` is trained, any other is context.
Therefore a row is cut behind its prompt and where its loss mask changes; tokens of an excluded call are context too.
Contents are empty, as in NeMo RL's own Gym environment, which reads `token_ids` only.

NeMo RL's advantage estimators group rows by the ids of their prompt, and count rows. A trace of a sub-agent would be in
another group than its session, and a session that forked would weigh more in its group. Give NeMo RL one row for each
session, or use `train_data`, which holds our advantages. `recipes/nemo_rl/run_grpo.py` has NeMo RL's own training loop
do that. All arrays are numpy's; `to_torch` turns them into the tensors that NeMo RL wants. Tried with NeMo RL's real
functions at commit 7ea279a (`make nemo-rl`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from polar_gym.training.row import Row
from polar_gym.training.sampling import check_logprobs_mode
from polar_gym.training.tensors import padded

Message = dict[str, Any]


def message_log(row: Row) -> list[Message]:
    """Return the row as messages whose joined `token_ids` are those of the row. The first one is the prompt, by which
    NeMo RL groups rows. Raises `ValueError` where logprobs are not those of the sampling (see `training.sampling`)."""
    check_logprobs_mode([row])
    changes = np.flatnonzero(np.diff(row.loss_mask)) + 1
    cuts = sorted({0, row.prompt_length, *changes.tolist(), len(row.token_ids)})
    return [_message(row, start, end) for start, end in pairwise(cuts)]


def _message(row: Row, start: int, end: int) -> Message:
    token_ids = row.token_ids[start:end].astype(np.int64)
    if not row.loss_mask[start]:
        return {"role": "user", "content": "", "token_ids": token_ids}
    logprobs = row.logprobs[start:end]
    return {"role": "assistant", "content": "", "token_ids": token_ids, "generation_logprobs": logprobs}


def datums(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one `DatumSpec` for each row. `loss_multiplier` is 0.0 where nothing is trained. The advantage of a row is
    multiplied by the weight of its tokens, as in `train_data`. Pass all rows of the step."""
    mean = _mean_weight(rows)
    return [
        {
            "message_log": message_log(row),
            "length": row.prompt_length,
            "extra_env_info": {
                "session_id": row.session_id,
                "trace_id": row.trace_id,
                "group_id": row.group_id,
                "sampling": row.sampling,
            },
            "loss_multiplier": float(row.trainable_tokens > 0),
            "idx": index,
            "task_name": "polar_swe",
            "total_reward": row.reward,
            "advantage": row.one_advantage * (float(row.weights.max() / mean) if row.trainable_tokens else 1.0),
        }
        for index, row in enumerate(rows)
    ]


def train_data(rows: Sequence[Row], pad_id: int, *, make_sequence_length_divisible_by: int = 1) -> dict[str, Any]:
    """Return the arrays that the policy's training step reads. Pass all rows of the step.

    NeMo RL's token-level loss is the mean over `token_mask` in all rows. Therefore advantages are multiplied by the
    weights of their tokens, relative to the mean weight: by 1 with `weighting="token"`. A KL penalty stays a mean over
    tokens. Raises `ValueError` where there are no rows.
    """
    arrays = padded(rows, pad_id, length_multiple_of=make_sequence_length_divisible_by)
    relative = arrays["weights"] / _mean_weight(rows)
    return {
        "input_ids": arrays["input_ids"],
        "input_lengths": arrays["lengths"].astype(np.int32),
        "generation_logprobs": arrays["old_logprobs"],
        "advantages": (arrays["advantages"] * relative).astype(np.float32),
        "token_mask": arrays["loss_mask"],
        "sample_mask": np.array([row.trainable_tokens > 0 for row in rows], dtype=np.float32),
    }


def _mean_weight(rows: Sequence[Row]) -> float:
    """Return the mean weight of the trained tokens of all rows; 1 where nothing is trained."""
    weights = [row.weights[row.loss_mask == 1].astype(np.float64) for row in rows if row.trainable_tokens]
    return np.concatenate(weights).mean() if weights else 1.0
