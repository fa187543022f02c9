"""The forms of TRL's asynchronous trainer and of prime-rl; their own code obeys the law of the packing, where it is
installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from polar_gym.training import make_batch
from polar_gym.training.conformance import LOSSES, check, holds
from polar_gym.training.prime_rl import training_samples
from polar_gym.training.row import inert_row
from polar_gym.training.trl import rollout_samples
from tests.support import trainers
from tests.support.calls import make_call
from tests.support.choices import experts, recorded_episode
from tests.support.episodes import forked, make_episode

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not here; `make test` runs these on the interpreter that has it",
)
needs_prime_rl = pytest.mark.skipif(
    importlib.util.find_spec("prime_rl") is None, reason="prime-rl is in no registry; see tests/support/trainers.py"
)
PPO = {"ppo": LOSSES["ppo"]}


@needs_trl
def test_trl_obeys_the_law_in_one_accumulation_step(tiny_gpt2: Any) -> None:
    findings = check(trainers.trl_one_accumulation_step, tiny_gpt2, vocabulary=32, losses=PPO)
    assert holds(findings), findings


@needs_trl
@pytest.mark.xfail(reason="TRL divides each micro-batch by its own tokens (TRL #7206)", strict=True)
def test_trl_obeys_the_law_while_it_accumulates(tiny_gpt2: Any) -> None:
    """Tells when the limit that `polar_gym.training.trl` names is gone."""
    assert holds(check(trainers.trl_accumulating, tiny_gpt2, vocabulary=32, losses=PPO))


@needs_trl
def test_trls_token_level_losses_obey_the_law(tiny_gpt2: Any) -> None:
    """GRPOTrainer's ratio is that of a row, where GSPO's is that of a session, and its KL penalty has no weight."""
    findings = check(trainers.trl_grpo, tiny_gpt2, vocabulary=32)
    broken = {(finding.loss, finding.weighting) for finding in findings if not holds([finding])}
    assert broken == {("gspo", "token"), ("gspo", "session"), ("kl", "session")}, findings


def passes(epochs: int) -> list[list[dict[str, Any]]]:
    """Return the samples of a batch for each pass over three prompts, filled up with inert rows. The samples of a pass
    were begun with one version of the weights, and so are those of the next pass."""
    batches = []
    for epoch in range(epochs):
        episodes = [
            make_episode(
                f"{epoch}-{task}-{number}", number / 2, [make_call(0, [1, task], [5 + number])], task_id=f"t{task}"
            )
            for task in range(3)
            for number in range(2)
        ]
        batches.append(rollout_samples(make_batch(episodes, multiple_of=8).rows, model_version=epoch // 2))
    return batches


def test_trls_group_is_one_pass_over_a_prompt() -> None:
    """Guards against passes that TRL does not count, because their ids are those of the pass before, and against inert
    rows that it counts."""
    seen: set[int] = set()
    for batch in passes(3):
        ids = [sample["group_id"] for sample in batch]
        assert ids[:6:2] == ids[1:6:2], "the samples of a prompt are one group"
        assert len(set(ids)) == 3
        assert not seen & set(ids)
        seen |= set(ids)
    assert rollout_samples([inert_row()], 0)[0]["group_id"] == -1


@needs_trl
def test_trl_counts_each_pass_over_the_prompts() -> None:
    """TRL's own collator counts what its `num_train_epochs` ends at."""
    asynchronous: Any = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    packing: Any = importlib.import_module("trl.experimental.async_grpo.packing")
    collator = asynchronous.DataCollatorForRollout(pad_token_id=0)
    counted = []
    for batch in passes(3):
        tree = packing.TreeRow()
        for sample in batch:
            tree.add(asdict(asynchronous.RolloutSample(**sample)))
        collator([[tree]])
        counted.append(len(collator.groups_trained))
    assert counted == [3, 6, 9]


@needs_prime_rl
def test_prime_rl_obeys_the_law(tiny_gpt2: Any) -> None:
    findings = check(trainers.prime_rl, tiny_gpt2, vocabulary=32, losses={"dppo": trainers.prime_rl_loss})
    assert holds(findings), findings


@pytest.mark.parametrize("form", [lambda rows: training_samples(rows, "swe"), lambda rows: rollout_samples(rows, 3)])
@pytest.mark.parametrize("weighting", ["token", "session"])
def test_every_trained_token_has_its_weight(form: Callable[[Any], list[dict[str, Any]]], weighting: Any) -> None:
    """Both trainers take the mean over tokens: advantage times weight, as multiples of the mean weight."""
    episodes = [make_episode("a", 1.0, forked(3)), make_episode("b", 0.0, [make_call(0, [1], [5, 6])])]
    batch = make_batch(episodes, weighting=weighting, multiple_of=8)
    samples = form(batch.rows)
    masks = [np.array(sample.get("mask", sample.get("completion_mask"))) for sample in samples]
    counted = sum(int(mask.sum()) for mask in masks)
    for row, sample, mask in zip(batch.rows[:4], samples, masks, strict=False):
        gains = np.array(sample.get("advantages", sample.get("advantage"))) * np.array(sample.get("rl_weights", 1.0))
        assert mask.tolist() == row.loss_mask.tolist()
        assert (gains * mask).tolist() == pytest.approx(row.advantage * row.weights * counted)
    assert all(sample["advantage"] == 0.0 for sample in samples[4:]), "an inert row has no gradient"


def test_prime_rls_temperatures_stand_where_it_divides_logits() -> None:
    """Guards against the first token of a turn under the temperature of the tokens before: prime-rl divides the logits
    at position t, which predict token t + 1, by temperature t."""
    calls = [
        make_call(0, [1], [2, 3], sampling={"temperature": 1.5}),
        make_call(1, [1, 2, 3, 4], [5], sampling={"temperature": 0.5}),
    ]
    (sample,) = training_samples(make_batch([make_episode("a", 1.0, calls)]).rows, "swe")
    assert sample["temperatures"] == [1.5, 1.5, 1.0, 0.5, 1.0]


def test_prime_rls_experts_have_a_row_for_the_last_token() -> None:
    (sample,) = training_samples(make_batch([recorded_episode()]).rows, "swe")
    encoded = sample["routed_experts"]
    array = np.frombuffer(encoded["data"], encoded["dtype"]).reshape(encoded["shape"])
    assert array.tolist() == [*experts([1, 2, 3, 4, 5]).tolist(), [[0, 0]]]


def test_prime_rls_reserved_name_is_refused() -> None:
    with pytest.raises(ValueError, match="env_name='all': prime-rl keeps this name"):
        training_samples([], "all")
