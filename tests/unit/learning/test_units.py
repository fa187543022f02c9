"""A control of `make show-learning` changes what its name says."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from polar_gym.learning.grpo import Settings, Trainer
from polar_gym.schema import Episode
from tests.learning.units import tool_output
from tests.support.calls import make_call
from tests.support.episodes import make_episode
from tests.support.tiny_model import tiny_gpt2


def test_the_control_trains_the_tools_output_as_much_as_the_answers() -> None:
    """Guards against a control that controls nothing: tokens without a captured logprob had their own probability as
    importance, nearly 0."""
    pytest.importorskip("torch", reason="torch is not here; `make test` runs these on the interpreter that has it")
    model = tiny_gpt2()
    rows = tool_output([_episode(model, "a", 1.0), _episode(model, "b", 0.0)]).rows
    trainer = Trainer(model, Settings(), pad_id=0)
    part = trainer.arrays(rows)
    (own,) = trainer.logprobs([part])
    importance = (own - part["old_logprobs"][:, 1:]).exp().clamp(max=Settings().truncate)
    shares = (part["weights"][:, 1:] * importance)[part["loss_mask"][:, 1:] == 1]
    assert len(shares) == 2 * len([1, 2, 9, 9, 3, 4])
    assert shares.tolist() == pytest.approx([float(shares[0])] * len(shares), rel=1e-4)


def _episode(model: Any, session_id: str, reward: float) -> Episode:
    first, output, second = [1, 2], [9, 9], [3, 4]
    calls = [make_call(0, [7, 8], first), make_call(1, [7, 8, *first, *output], second)]
    own = [
        call.model_copy(update={"logprobs": _logprobs(model, [*call.prompt_ids.tolist(), *call.response_ids.tolist()])})
        for call in calls
    ]
    return make_episode(session_id, reward, own)


def _logprobs(model: Any, ids: list[int]) -> np.ndarray:
    """Return the logprobs of the last two tokens."""
    torch: Any = importlib.import_module("torch")
    tokens = torch.tensor([ids])
    logits = model(input_ids=tokens).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[-2:, 0].detach().numpy().astype(np.float32)
