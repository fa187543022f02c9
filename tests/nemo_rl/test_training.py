# pyright: reportMissingImports=false
"""The rows of `polar_gym.training.nemo_rl` in NeMo RL's own functions."""

from __future__ import annotations

from typing import Any

import pytest

from polar_gym.training import make_batch, to_torch
from polar_gym.training.nemo_rl import datums, train_data
from tests.support.nemo_rl_cases import STEPS, episodes_of


@pytest.mark.parametrize("name", STEPS)
def test_nemo_rl_flattens_our_message_logs_to_our_train_data(trainer: Any, name: str) -> None:
    """Inert rows included: `rl_collate_fn` takes what `datums` gives, and `grpo_train` reads the result."""
    from nemo_rl.algorithms import grpo
    from nemo_rl.data.collate_fn import rl_collate_fn
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message

    rows = make_batch(episodes_of(STEPS[name]), multiple_of=4).rows
    batch = rl_collate_fn([to_torch(datum) for datum in datums(rows)])
    grpo.add_grpo_token_loss_masks_and_generation_logprobs(batch["message_log"])
    flat, lengths = batched_message_log_to_flat_message(
        batch["message_log"], pad_value_dict={"token_ids": 0}, make_sequence_length_divisible_by=8
    )
    ours = to_torch(train_data(rows, pad_id=0, make_sequence_length_divisible_by=8))
    assert flat["token_ids"].tolist() == ours["input_ids"].tolist()
    assert lengths.tolist() == ours["input_lengths"].tolist()
    assert flat["generation_logprobs"].tolist() == ours["generation_logprobs"].tolist()
    assert flat["token_loss_mask"].tolist() == ours["token_mask"].tolist()
    assert batch["loss_multiplier"].tolist() == ours["sample_mask"].tolist()
    first = grpo.extract_initial_prompt_messages(batch["message_log"], batch["length"])
    prompts = [[token for message in log for token in message["token_ids"].tolist()] for log in first]
    assert prompts == [row.token_ids[: row.prompt_length].tolist() for row in rows]
