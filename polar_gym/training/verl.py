"""Rows in the form of verl: an `AgentLoopOutput` for each trace of a session.

An agent loop of verl plays one session. With verl's trainer V1 (`trainer.use_v1=true`, the default of 0.9.1), that
gives a list of outputs, which may be empty:

    class PolarAgentLoop(AgentLoopBase):
        async def run(self, sampling_params, **kwargs):
            episode = ...  # the session of the task that `kwargs` names
            batch, step = make_batch([episode], max_tokens=32768), kwargs["global_steps"]
            return [AgentLoopOutput(**output) for output in agent_loop_outputs(batch.rows, (step, step))]

verl computes the advantages, once for each session: a GRPO group has one vote of each session. A session without a
reward has no output, and no vote. `batch.counts` names the tokens that are left out, and why. Rewards of calls do not
reach verl.

With verl 0.9.1 the gradient does not depend on the packing (see `training.conformance`) where all rows of a step are
one mini-batch, for `loss_agg_mode=token-mean` and the loss `vanilla` (also with TIS or a KL penalty). verl takes an
optimizer step for each `ppo_mini_batch_size * rollout.n` rows, so that a session of several traces adds steps. Set a
size that no step exceeds, and `actor.use_dynamic_bsz=true`, with which verl permits a `ppo_mini_batch_size` above
`train_batch_size`. verl fills the mini-batch up. verl's loss has no weight for a session: `seq-mean-token-mean` and the
loss `gspo` are over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polar_gym.training.row import Row


def agent_loop_outputs(rows: Sequence[Row], global_steps: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the fields of one `AgentLoopOutput` for each row of a session. Rows that train nothing have none: verl
    reads the advantage of a session at the first trained token of its last output.

    `global_steps`: verl's steps whose weights sampled the first and the last token. verl drops sessions by their age.
    """
    if any(row.call_advantages for row in rows):
        raise ValueError(
            "verl computes the advantages itself, one for each session; set turn_reward_weight=0, turn_values=False"
        )
    return [
        {
            "prompt_ids": row.token_ids[: row.prompt_length].tolist(),
            "response_ids": row.token_ids[row.prompt_length :].tolist(),
            "response_mask": row.loss_mask[row.prompt_length :].tolist(),
            "response_logprobs": row.logprobs[row.prompt_length :].tolist(),
            "routed_experts": row.routed_experts,
            "reward_score": row.reward,
            "num_turns": len(row.turns),
            "metrics": {},
            "extra_fields": {
                "reward_extra_info": row.components,
                "min_global_steps": global_steps[0],
                "max_global_steps": global_steps[1],
                "polar_gym": {"session_id": row.session_id, "trace_id": row.trace_id, "sampling": row.sampling},
            },
        }
        for row in rows
        if row.trainable_tokens
    ]
