"""Rows and episodes in the two forms of TRL.

`AsyncGRPOTrainer` takes all rows of a session, with our advantages. Put them on the queue of a `rollout_worker`:

    for sample in rollout_samples(batch.rows, model_version):
        worker.rollout_buffer.put(RolloutSample(**sample))

TRL takes an optimizer step for each `per_device_train_batch_size * gradient_accumulation_steps` samples of a process,
and divides each micro-batch by its own tokens. With TRL 1.16 the gradient does not depend on the packing (see
`training.conformance`) where a batch is one micro-batch. Set `gradient_accumulation_steps=1`, `token_budget=0` (with a
budget, TRL cuts a batch into steps by tokens), and a `per_device_train_batch_size` that no batch exceeds on all
processes together. Give that number to `make_batch` as `multiple_of`: inert rows fill the batch up. TRL fetches the
next batch before it trains on one, so that the worker must stay a batch ahead. With `num_train_epochs`, TRL counts the
passes over its prompts of which it has trained a row. A pass without a row (`batch.counts` says why) does not count,
and TRL takes another one: set `max_steps` where that is not wanted.

`GRPOTrainer` takes one row for each prompt from a `rollout_func`, in order.

    def rollout_func(prompts, trainer):  # the dataset's prompts are task ids
        envs.reset(options={"task_id": prompts})
        *_, infos = envs.step([{}] * len(prompts))
        return rollout_output(infos["trajectory"])[0]

    GRPOTrainer(model, reward_funcs=episode_reward, rollout_func=rollout_func, ...)

TRL computes the advantages, over one row for each session. Therefore each session gives its trace with the most
trainable tokens. Its other traces are counted and not trained: use the form above where sessions fork. `env_mask` is
TRL's name for the loss mask of a completion. A session without a reward gets None: TRL leaves that session out of its
group and does not train it. Tried with TRL 1.16, which passes every prompt to `rollout_func` once for each sample that
it wants. It reads the captured logprobs only with `use_vllm=True` (for TIS) or `off_policy_mask_threshold`. Otherwise
it takes its own logprobs for those of the sampling, so give the engine the trainer's weights before each rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polar_gym.schema import Episode, Trace
from polar_gym.training.batch import BatchCounts, begin_counts, check_logprobs, check_sampled, rewards_and_groups
from polar_gym.training.row import Row, row_of
from polar_gym.training.sampling import check_logprobs_mode
from polar_gym.training.tensors import stable_number

NOTHING_ID = 0
"""The only token of a session without traces: TRL needs one token of prompt and one of completion."""

FILLING = {
    "input_ids": np.array([NOTHING_ID, NOTHING_ID]),
    "completion_mask": np.array([0, 1]),
    "old_log_probs": np.zeros(2, np.float32),
    "advantage": 0.0,
    "metrics": {},
}
"""The sample of a row that trains nothing. TRL's loss fails on a process without a token that counts: one token counts,
with the advantage 0.0."""


def rollout_samples(rows: Sequence[Row], model_version: int) -> list[dict[str, Any]]:
    """Return the fields of one `RolloutSample` for each row of a whole batch.

    TRL weighs all tokens the same, so that other weights become part of the advantage. `model_version`: TRL's count of
    its weight updates when the sessions began; TRL drops what is too old.

    `group_id` is the number of the first session of the row's group: TRL counts passes over its prompts by the ids that
    it has not seen before, and a group has other sessions in each pass. Inert rows have the id of a session of the
    batch.
    """
    check_logprobs_mode(rows)
    tokens = sum(row.trainable_tokens or 1 for row in rows)
    passes: dict[str, str] = {}
    for row in rows:
        if not row.inert:
            passes.setdefault(row.group_id, row.session_id)
    any_pass = next(iter(passes.values()), "")
    return [
        {
            "prompt": [],
            "completion": [],
            "input_ids": row.token_ids.astype(np.int64),
            "completion_mask": row.loss_mask.astype(np.int64),
            "old_log_probs": row.logprobs,
            "advantage": row.one_advantage * float(row.weights.max()) * tokens,
            "model_version": model_version,
            "group_id": stable_number(passes.get(row.group_id, any_pass)),
            "metrics": {"reward": row.reward},
            **({} if row.trainable_tokens else FILLING),
        }
        for row in rows
    ]


def rollout_output(episodes: Sequence[Episode]) -> tuple[dict[str, list[Any]], BatchCounts]:
    """Return TRL's columns, and the counts of the traces.

    The columns are `prompt_ids`, `completion_ids`, `logprobs` and `env_mask`; TRL passes the others, `reward`,
    `session_id` and `sampling` (see `Episode.sampled_with`), to reward functions. Raises `ValueError` for a logprob
    that is not finite, or not that of the sampling (see `training.sampling`), and for tokens that a script chose.
    """
    check_sampled(episodes)
    check_logprobs(episodes)
    names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward", "session_id", "sampling")
    output: dict[str, list[Any]] = {name: [] for name in names}
    counts = begin_counts(*rewards_and_groups(episodes))
    for episode in episodes:
        traces = episode.trajectory.traces
        main = max(traces, key=lambda trace: trace.trainable_tokens, default=None)
        if main is not None and episode.reward is not None:
            check_logprobs_mode([row_of(episode, main, 0.0)])
        _count(counts, episode, main)
        for name, value in _entry(episode, main).items():
            output[name].append(value)
    return output, counts


def _entry(episode: Episode, trace: Trace | None) -> dict[str, Any]:
    sampling = {} if trace is None else episode.sampled_with(trace)
    own = {"reward": episode.reward, "session_id": episode.session.session_id, "sampling": sampling}
    if trace is None or not len(trace.response_ids):
        empty = {"prompt_ids": [NOTHING_ID], "completion_ids": [NOTHING_ID], "logprobs": [0.0], "env_mask": [0]}
        return empty | own
    trained = episode.reward is not None
    return {
        "prompt_ids": trace.prompt_ids.tolist(),
        "completion_ids": trace.response_ids.tolist(),
        "logprobs": trace.logprobs.tolist(),
        "env_mask": trace.loss_mask.tolist() if trained else [0] * len(trace.response_ids),
        **own,
    }


def _count(counts: BatchCounts, episode: Episode, main: Trace | None) -> None:
    for trace in episode.trajectory.traces:
        tokens = trace.trainable_tokens
        counts.traces += 1
        counts.trainable_tokens += tokens
        if episode.reward is None:
            counts.leave_out("no_reward", traces=1, tokens=tokens)
        elif trace is not main:
            counts.leave_out("other_trace", traces=1, tokens=tokens)
        else:
            counts.rows += 1
            counts.tokens += tokens


def episode_reward(*, reward: list[float | None], **_: Any) -> list[float | None]:
    """Return the evaluators' rewards: a reward function for TRL."""
    return reward
