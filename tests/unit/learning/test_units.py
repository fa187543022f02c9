"""A control of `make show-learning` changes what its name says."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from polar_gym.learning.grpo import Settings, Trainer, rows_of
from polar_gym.schema import Episode
from tests.learning.units import shuffled, tool_output
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


def test_the_control_deals_out_the_rewards_that_the_loss_uses() -> None:
    """Guards against a control with other rewards than the run that it controls: those of sessions which a budget ended
    were dealt out before they became 0, and a session without a reward could get one."""
    call = [make_call(0, [7], [1, 2])]
    cut_off = [make_episode(f"cut{number}", 1.0, call, truncated_by="calls") for number in range(5)]
    ended = [make_episode(f"end{number}", float(number > 0), call) for number in range(3)]
    episodes = [*cut_off, *ended, make_episode("failed", None, call)]
    dealt, own = shuffled(episodes).rows, rows_of(episodes).rows
    assert sorted(row.reward for row in dealt) == sorted(row.reward for row in own) == [0.0] * 6 + [1.0] * 2
    assert [row.session_id for row in dealt] == [row.session_id for row in own]
    assert any(row.reward for row in dealt[:5]), "a session that a budget ended gets a reward as any other"
    assert [row.reward for row in dealt] != [row.reward for row in own]


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
