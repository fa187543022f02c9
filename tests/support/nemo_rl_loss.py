"""The adapter of NeMo RL for the check of the packing: its `prepare_loss_input` and its `ClippedPGLossFn`.

NeMo RL (7ea279a) is in no registry: it needs a checkout on the path (`make show-law NEMO_RL=DIRECTORY`). The forward
pass is that of the model under test. NeMo RL moves ids to the GPU; without one they stay where they are.
"""

from __future__ import annotations

import importlib
import sys
import typing
from collections.abc import Mapping
from itertools import chain
from typing import Any
from unittest.mock import patch

import typing_extensions

from polar_gym.training import to_torch
from polar_gym.training.conformance import CLIP, KL_COEFFICIENT, LOSSES, TRUNCATE_AT, Step, TokenLoss, ppo
from polar_gym.training.nemo_rl import train_data

SETTINGS: Mapping[str, dict[str, Any]] = {
    "ppo": {},
    "tis": {
        "force_on_policy_ratio": True,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": TRUNCATE_AT,
    },
    "gspo": {"sequence_level_importance_ratios": True, "token_level_loss": False},
    "kl": {"reference_policy_kl_penalty": KL_COEFFICIENT},
}
"""The settings of `loss_fn` for each loss of the check."""


def kl_through_samples(logprobs: Any, captured: Any, advantages: Any) -> Any:
    """Return `ppo`, and the estimator k3 with the gradient through the sampled tokens (arXiv:2506.09477)."""
    change = logprobs - captured
    k3 = (-change).exp() + change - 1
    return ppo(logprobs, captured, advantages) + KL_COEFFICIENT * (logprobs - logprobs.detach()).exp() * k3


LOSSES_OF_SESSIONS: Mapping[str, TokenLoss] = {**LOSSES, "kl": kl_through_samples}
"""The losses of whole sessions that NeMo RL must match: those of the check, with NeMo RL's own KL term."""


def nemo_rl(model: Any, step: Step) -> None:
    """Run NeMo RL's loss on its data of the whole step, a micro-batch at a time.

    As in its workers, each micro-batch is divided by the number of sequences and of tokens of all ranks.
    """
    torch: Any = importlib.import_module("torch")
    batch: Any = _module("distributed.batched_data_dict").BatchedDataDict
    prepare, loss = _module("algorithms.loss").prepare_loss_input, loss_function(step.loss)
    rows = list(chain(*chain(*step.ranks)))
    places = {id(row): place for place, row in enumerate(rows)}
    data = batch(to_torch(train_data(rows, step.pad_id, make_sequence_length_divisible_by=step.length_multiple_of)))
    data["prev_logprobs"] = data["reference_policy_logprobs"] = data["generation_logprobs"]
    sequences = data["sample_mask"].sum()
    tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
    for part in chain(*step.ranks):
        own = data.select_indices([places[id(row)] for row in part])
        mask = torch.arange(own["input_ids"].shape[1]) < own["input_lengths"][:, None]
        logits = model(input_ids=own["input_ids"], attention_mask=mask.long()).logits
        with patch.object(torch.Tensor, "cuda", lambda tensor: tensor):
            inputs, own = prepare(logits, own, loss)
        loss(data=own, global_valid_seqs=sequences, global_valid_toks=tokens, **inputs)[0].backward()


def loss_function(name: str) -> Any:
    """Return NeMo RL's `ClippedPGLossFn` for a loss of the check."""
    settings: Any = _module("algorithms.loss.loss_functions").ClippedPGLossConfig
    own = {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": CLIP, "ratio_clip_max": CLIP, **SETTINGS[name]}
    return _module("algorithms.loss").ClippedPGLossFn(settings(**own))


def _module(name: str) -> Any:
    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict  # pydantic wants this one before Python 3.12
    return importlib.import_module(f"nemo_rl.{name}")
