"""Rows in the form of verl: an `AgentLoopOutput` for each trace of a session.

An agent loop of verl plays one session. With verl's trainer V1 (`trainer.use_v1=true`, the default of 0.9.1), that
gives a list of outputs, which may be empty:

    class PolarAgentLoop(AgentLoopBase):
        async def run(self, sampling_params, **kwargs):
            episode = ...  # the session of the task that `kwargs` names
            batch, step = make_batch([episode], max_tokens=32768, overlong="mask"), kwargs["global_steps"]
            return [AgentLoopOutput(**output) for output in agent_loop_outputs(batch.rows, (step, step))]

verl computes the advantages, once for each session: a GRPO group has one vote of each session. A session with a reward
whose rows train nothing votes by an output without trained tokens. `overlong="mask"` keeps the row that this takes. A
session without a reward has no output, and no vote; nor has one without trainable tokens, because it has no row. Where
a group has one vote, verl takes 0 for its mean and 1 for its deviation, so that the advantage is the raw reward: this
form is given one session at a time, and cannot know. `batch.counts` names the tokens that are left out, and why.
Rewards of calls do not reach verl.

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
from polar_gym.training.sampling import check_logprobs_mode


def agent_loop_outputs(rows: Sequence[Row], global_steps: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the fields of one `AgentLoopOutput` for each row of a session that trains something: verl reads the
    advantage of a session at the first trained token of its last output. Where no row does, the last row is the
    output, for the session's vote in the mean of its group.

    `global_steps`: verl's steps whose weights sampled the first and the last token. verl drops sessions by their age.
    """
    if any(row.call_advantages for row in rows):
        raise ValueError(
            "verl computes the advantages itself, one for each session; set turn_reward_weight=0, turn_values=False"
        )
    check_logprobs_mode(rows)
    trained = [row for row in rows if row.trainable_tokens]
    voting = [row for row in rows if not row.inert][-1:]
    return [_output(row, global_steps) for row in trained or voting]


def _output(row: Row, global_steps: tuple[int, int]) -> dict[str, Any]:
    before = min(row.prompt_length, len(row.token_ids) - 1)  # verl writes the reward to the last token of the response
    return {
        "prompt_ids": row.token_ids[:before].tolist(),
        "response_ids": row.token_ids[before:].tolist(),
        "response_mask": row.loss_mask[before:].tolist(),
        "response_logprobs": row.logprobs[before:].tolist(),
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
