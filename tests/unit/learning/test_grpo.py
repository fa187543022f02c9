"""The loop's update: its gradient obeys the law of the packing, and it refuses another model's logprobs."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from polar_gym.learning.grpo import GradientError, LogprobsDifferError, Settings, Trainer, _differences, choose, rows_of
from polar_gym.schema import EvaluationResult, WeightVersion
from polar_gym.training import make_batch
from polar_gym.training.conformance import Step, check, holds, tis
from tests.support.calls import make_call
from tests.support.episodes import make_episode
from tests.support.tiny_model import tiny_gpt2 as make_tiny_gpt2

VOCABULARY = 32


@pytest.fixture
def tiny_gpt2() -> Any:
    pytest.importorskip("torch", reason="torch is not here; `make test` runs these on the interpreter that has it")
    return make_tiny_gpt2()


def test_the_gradient_does_not_depend_on_the_packing(tiny_gpt2: Any) -> None:
    def adapter(model: Any, step: Step) -> None:
        trainer = Trainer(model, Settings(), pad_id=0)
        parts = [trainer.arrays(rows) for rank in step.ranks for rows in rank]
        trainer.accumulate(parts, trainer.logprobs(parts))

    findings = check(adapter, tiny_gpt2, vocabulary=VOCABULARY, losses={"tis": tis})
    assert findings
    assert holds(findings), findings


def test_an_update_makes_rewarded_tokens_likelier_and_the_others_rarer(tiny_gpt2: Any) -> None:
    torch: Any = importlib.import_module("torch")
    good, bad = [1, 2, 3], [4, 5, 6]
    rows = rows_of([_episode(tiny_gpt2, "a", 1.0, good), _episode(tiny_gpt2, "b", 0.0, bad)]).rows
    trainer = Trainer(tiny_gpt2, Settings(learning_rate=1e-3, epochs=4), pad_id=0)

    def likely(ids: list[int]) -> float:
        with torch.no_grad():
            return float(_logprobs(tiny_gpt2, [7, 8, *ids])[1:].sum())

    before = likely(good), likely(bad)
    figures = trainer.update(rows, "step-3", 0.0)
    assert likely(good) > before[0]
    assert likely(bad) < before[1]
    assert 0 < figures["logprob_difference"] < 1e-4
    assert figures["kl"] > 0, "the last epoch began with other weights"
    assert figures["ratio"] != 1


def test_logprobs_of_other_weights_stop_the_run(tiny_gpt2: Any) -> None:
    """Guards against an engine that kept its old weights: vLLM's tied lm_head on a CPU does, in silence."""
    torch: Any = importlib.import_module("torch")
    rows = rows_of([_episode(tiny_gpt2, "a", 1.0, [1, 2]), _episode(tiny_gpt2, "b", 0.0, [3, 4])]).rows
    with torch.no_grad():
        for parameter in tiny_gpt2.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    with pytest.raises(LogprobsDifferError, match="version step-3"):
        Trainer(tiny_gpt2, Settings(), pad_id=0).update(rows, "step-3", 0.0)
    figures = Trainer(tiny_gpt2, Settings(), pad_id=0).update(rows, "step-4", 0.0)
    assert figures["compared"] == 0, "tokens of older weights may differ"
    assert "logprob_difference" not in figures


@pytest.mark.parametrize("rows_at_once", [1, 2])
def test_logprobs_that_are_not_numbers_stop_the_run(tiny_gpt2: Any, rows_at_once: int) -> None:
    """Guards against NaN, which is not larger than the tolerance, and which `max` loses behind a number."""
    torch: Any = importlib.import_module("torch")
    rows = rows_of([_episode(tiny_gpt2, "a", 1.0, [1]), _episode(tiny_gpt2, "b", 0.0, [3, 4, 5, 6])]).rows
    with torch.no_grad():
        tiny_gpt2.transformer.wpe.weight[4] = torch.nan  # which the first row is too short for
    trainer = Trainer(tiny_gpt2, Settings(rows_at_once=rows_at_once), pad_id=0)
    with pytest.raises(LogprobsDifferError, match=r"version step-3: .* by up to nan nats"):
        trainer.update(rows, "step-3", 0.0)


def test_logprobs_after_a_row_are_not_compared(tiny_gpt2: Any) -> None:
    """Guards against a run that stops at a number which no token of a row has: NaN times 0 is NaN."""
    torch: Any = importlib.import_module("torch")
    rows = rows_of([_episode(tiny_gpt2, "a", 1.0, [1]), _episode(tiny_gpt2, "b", 0.0, [3, 4, 5, 6])]).rows
    trainer = Trainer(tiny_gpt2, Settings(), pad_id=0)
    part = trainer.arrays(rows)
    (own,) = trainer.logprobs([part])
    own[part["attention_mask"][:, 1:] == 0] = torch.nan
    assert 0 < _differences(part, own, ["step-3"], "step-3").max() < 1e-4


def test_a_gradient_that_is_not_finite_stops_the_run_and_leaves_the_weights(tiny_gpt2: Any) -> None:
    """Guards against weights that are NaN from then on, under a loss that was finite."""
    torch: Any = importlib.import_module("torch")
    rows = rows_of([_episode(tiny_gpt2, "a", 3e38, [1, 2]), _episode(tiny_gpt2, "b", -3e38, [3, 4])]).rows
    before = [parameter.detach().clone() for parameter in tiny_gpt2.parameters()]
    with pytest.raises(GradientError, match=r"version step-3, epoch 1: the norm of the gradient is (inf|nan)"):
        Trainer(tiny_gpt2.float(), Settings(), pad_id=0).update(rows, "step-3", 0.0)
    assert all(map(torch.equal, (parameter.float() for parameter in before), tiny_gpt2.parameters()))


def test_a_session_that_a_budget_ended_has_the_reward_zero(tiny_gpt2: Any) -> None:
    cut = _episode(tiny_gpt2, "a", 1.0, [1, 2], truncated_by="calls")
    whole = _episode(tiny_gpt2, "b", 1.0, [3, 4])
    advantages = {row.session_id: row.advantage for row in rows_of([cut, whole]).rows}
    assert advantages["a"] < 0 < advantages["b"]


def test_a_step_without_a_difference_in_reward_changes_nothing(tiny_gpt2: Any) -> None:
    """Guards against the optimizer's momentum, which goes on without a gradient."""
    torch: Any = importlib.import_module("torch")
    trainer = Trainer(tiny_gpt2, Settings(), pad_id=0)
    first = [_episode(tiny_gpt2, "a", 1.0, [1, 2]), _episode(tiny_gpt2, "b", 0.0, [3, 4])]
    trainer.update(rows_of(first).rows, "step-3", 0.0)
    before = [parameter.detach().clone() for parameter in tiny_gpt2.parameters()]
    same = [_episode(tiny_gpt2, "a", 1.0, [1, 2]), _episode(tiny_gpt2, "b", 1.0, [3, 4])]
    trainer.update(rows_of(same).rows, "step-3", 0.0)
    assert all(map(torch.equal, before, tiny_gpt2.parameters()))


def test_calls_with_advantages_of_their_own_are_trained_where_sessions_have_none(tiny_gpt2: Any) -> None:
    """Guards against a step that is skipped: rewards of calls differ in a group whose rewards are all equal."""
    episodes = [
        _episode(
            tiny_gpt2,
            name,
            1.0,
            ids,
            evaluation=EvaluationResult(evaluator="rubric", reward=1.0, call_rewards={"call0": reward}),
        )
        for name, ids, reward in (("a", [1, 2], 1.0), ("b", [3, 4], 0.0))
    ]
    rows = make_batch(episodes, turn_reward_weight=1.0).rows
    assert [row.advantage for row in rows] == [0, 0]
    before = _logprobs(tiny_gpt2, [7, 8, 1, 2])[1:].sum().detach()
    Trainer(tiny_gpt2, Settings(), pad_id=0).update(rows, "step-3", 0.0)
    assert _logprobs(tiny_gpt2, [7, 8, 1, 2])[1:].sum() > before


def test_every_task_comes_once_before_one_comes_again() -> None:
    settings, ids = Settings(groups=4, samples=2), [str(number) for number in range(10)]
    steps = [choose(ids, settings, 0, step) for step in range(10)]
    assert all(len(step) == 8 for step in steps)
    drawn = [task for step in steps for task in step[::2]]
    assert sorted(drawn[:10]) == sorted(ids)
    assert sorted(drawn) == sorted(ids * 4)


def _episode(model: Any, session_id: str, reward: float, ids: list[int], **fields: Any) -> Any:
    spans = [WeightVersion(version="step-3", start=0, end=len(ids))]
    call = make_call(0, [7, 8], ids, weight_versions=spans)
    logprobs = _logprobs(model, [7, 8, *ids])[1:].detach().numpy().astype(np.float32)
    return make_episode(session_id, reward, [call.model_copy(update={"logprobs": logprobs})], **fields)


def _logprobs(model: Any, ids: list[int]) -> Any:
    torch: Any = importlib.import_module("torch")
    tokens = torch.tensor([ids])
    return model(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
