"""NeMo RL's groups and advantages, computed from answers of `/run` as NeMo RL computes them.

Read in NeMo RL at 7ea279a (2026-08-22), and restated here in as few lines as its rules need:

- `environments/nemo_gym.py`: each item of `response.output` with `generation_token_ids` is a turn. What its prompt adds
  to all turns before is context. A sample without turns is a `ValueError`, which ends the batch.
- `experience/rollouts.py` and `extract_initial_prompt_messages` of `algorithms/grpo.py`: a sample's prompt is the
  context of its first turn.
- `calculate_baseline_and_std_per_prompt` of `algorithms/utils.py`: samples with equal prompts are a group. The baseline
  is the group's mean, the masked samples included; a group of one has no advantage.
- `algorithms/advantage_estimator.py`: the advantage is divided by the group's standard deviation, where there is one.
- `_apply_mask_sample_filter` of `algorithms/grpo.py`: `instance_config.mask_sample` takes a sample out of the loss, and
  out of nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Turn = tuple[list[int], list[int]]
"""What it adds as context, what is trained."""


def consumed(output: Sequence[dict[str, Any]]) -> list[Turn]:
    """Return the turns that NeMo RL makes of `response.output`."""
    seen: list[int] = []
    turns = []
    for item in output:
        if not item.get("generation_token_ids"):
            continue
        prompt = item["prompt_token_ids"]
        assert prompt[: len(seen)] == seen, "Non-contiguous messages found!"
        assert len(item["generation_log_probs"]) == len(item["generation_token_ids"])
        turns.append((prompt[len(seen) :], item["generation_token_ids"]))
        seen = prompt + item["generation_token_ids"]
    return turns


def groups(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the groups, as indices of `answers`."""
    prompts: dict[tuple[int, ...], list[int]] = {}
    for index, answer in enumerate(answers):
        turns = consumed(answer["response"]["output"])
        assert turns, "NeMo Gym returned a result with no generation data"
        prompts.setdefault(tuple(turns[0][0]), []).append(index)
    return list(prompts.values())


def advantages(answers: Sequence[dict[str, Any]]) -> list[float]:
    """Return each sample's advantage under GRPO, with normalised rewards and without a leave-one-out baseline, as in
    `recipes/nemo_rl/grpo_swe.yaml`."""
    found = np.zeros(len(answers))
    for group in groups(answers):
        rewards = np.array([answers[index]["reward"] for index in group])
        deviation = rewards.std(ddof=1) if len(group) > 1 else 0.0
        found[group] = (rewards - rewards.mean()) / (deviation + 1e-6 if deviation else 1.0)
    return found.tolist()
