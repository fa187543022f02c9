# pyright: reportMissingImports=false
"""NeMo RL's real `grpo_train`, on the main trace of each session and on all of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from polar_gym.training import make_batch, padded, to_torch
from tests.support.nemo_rl_cases import RECORDED, STEPS, episodes_of


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", STEPS)
def test_nemo_rl_trains_what_is_recorded(trainer: Any, recorded: dict[str, Any], name: str) -> None:
    assert trainer.train(STEPS[name], "grpo_codex", patched=False).rows() == recorded[name]["main_trace"]
    assert trainer.train(STEPS[name], "grpo_codex_all_traces", ranks=4).rows() == recorded[name]["all_traces"]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", ["compaction", "sub-agent", "midnight", "two tasks"])
def test_the_gradient_of_all_traces_is_that_of_our_arrays(trainer: Any, name: str, ranks: int) -> None:
    """NeMo RL's clipped loss with its importance sampling, over its shards, and the loss of `polar_gym.training`."""
    trained = trainer.train(STEPS[name], "grpo_codex_all_traces", ranks=ranks)
    batch = make_batch(episodes_of(STEPS[name]), scale="std")
    arrays = to_torch(padded(batch.rows, pad_id=0))
    policy = trainer.Policy({}, ranks=1)
    logprobs = policy.logprobs(arrays["input_ids"])
    was = logprobs.detach()
    correction = (was - arrays["old_logprobs"][:, 1:]).exp().clamp(max=2)
    loss = -(arrays["weights"] * arrays["advantages"])[:, 1:] * correction * (logprobs - was).exp()
    loss.sum().backward()
    size = policy.logits.grad.norm()
    assert size > 1e-4, "the gradients of the samples do not cancel"
    assert (trained.gradient - policy.logits.grad).norm() <= 1e-6 * size


def test_each_rank_has_whole_micro_batches(trainer: Any) -> None:
    sizes = ("policy.train_micro_batch_size=3", "policy.logprob_batch_size=2")
    trained = trainer.train(STEPS["compaction"], "grpo_codex_all_traces", *sizes, ranks=2)
    assert trained.data["input_ids"].shape[0] % 12 == 0


def test_all_traces_are_counted_as_consumed(trainer: Any) -> None:
    metric = "train/polar_swe_agent/consumed_fraction/mean"
    assert trainer.train(STEPS["compaction"], "grpo_codex", patched=False).metrics[metric] < 1
    assert trainer.train(STEPS["compaction"], "grpo_codex_all_traces", ranks=4).metrics[metric] == 1


@pytest.mark.parametrize("recipe", ["grpo_codex", "grpo_codex_all_traces"])
def test_a_truncated_session_is_truncated_for_nemo_rl(trainer: Any, recipe: str) -> None:
    trained = trainer.train(STEPS["truncated"], recipe, "grpo.overlong_filtering=true")
    assert trained.data["sample_mask"].tolist() == [1, 0]


@pytest.mark.parametrize("recipe", ["grpo_codex", "grpo_codex_all_traces"])
def test_a_masked_session_does_not_lower_the_accuracy(trainer: Any, recipe: str) -> None:
    step = STEPS["failure"]
    sizes = (f"++grpo.max_val_samples={len(step)}", f"++grpo.val_batch_size={len(step)}")
    trained = trainer.train(step, recipe, "grpo.val_at_start=true", *sizes)
    assert trained.metrics["validation/accuracy"] == 1
    plain = trainer.train(step, recipe, "grpo.val_at_start=true", *sizes, patched=False)
    assert plain.metrics["validation/accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "setting",
    [
        "grpo.use_dynamic_sampling=true",
        "grpo.reward_shaping.enabled=true",
        "grpo.adv_estimator.name=reinforce_plus_plus",
        "loss_fn.token_level_loss=false",
        "++loss_fn.sequence_level_importance_ratios=true",
        "policy.train_global_batch_size=32",
        "++policy.router_replay.enabled=true",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=13",
        "++data_plane.enabled=true",
    ],
)
def test_a_setting_that_all_traces_cannot_have_is_refused(trainer: Any, setting: str) -> None:
    with pytest.raises(SystemExit, match=setting.lstrip("+").partition("=")[0].removesuffix(".lr_warmup_iters")):
        trainer.run_grpo().check(trainer.load("grpo_codex_all_traces", setting))
    trainer.run_grpo().check(trainer.load("grpo_codex", setting))


@pytest.mark.parametrize("harness", ["claude_code", "codex", "pi", "qwen_code"])
def test_the_recipes_load_with_nemo_rls_own_classes(trainer: Any, harness: str) -> None:
    every = trainer.load(f"grpo_{harness}_all_traces")
    trainer.run_grpo().check(every)
    asynchronous = trainer.load(f"grpo_{harness}_async")
    trainer.run_grpo().check(asynchronous)
    assert set(asynchronous.grpo.async_grpo.model_extra) == set()
    assert asynchronous.grpo.async_grpo.enabled
    main = trainer.load(f"grpo_{harness}")
    assert (trainer.run_grpo().wants_all_traces(every), trainer.run_grpo().wants_all_traces(main)) == (True, False)
    assert every.policy == main.policy


def test_the_known_keys_are_those_of_this_nemo_rl(trainer: Any) -> None:
    from tests.nemo_rl.known_keys import KNOWN_KEYS, text

    assert KNOWN_KEYS.read_text(encoding="utf-8") == text(Path(os.environ["NEMO_RL"]))


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose script says whether its `setup` was replaced."""
    script = tmp_path / "examples" / "nemo_gym" / "run_grpo_nemo_gym.py"
    script.parent.mkdir(parents=True)
    script.write_text("def setup(config): pass\nown = setup\ndef main(): print('replaced', setup is not own)\n")
    monkeypatch.setenv("NEMO_RL", str(tmp_path))
    return tmp_path


def test_a_nemo_rl_that_trains_all_traces_itself_is_run_as_it_is(
    trainer: Any, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nemo_rl.algorithms import grpo

    class Newer(grpo.GRPOConfig):
        gym_multi_trace: bool = False

    trainer.run_grpo().main()
    monkeypatch.setattr(grpo, "GRPOConfig", Newer)
    trainer.run_grpo().main()
    assert capsys.readouterr().out.split("\n")[:2] == ["replaced True", "replaced False"]


def test_a_nemo_rl_without_a_replaced_function_is_refused(
    trainer: Any, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_rl.algorithms import grpo

    monkeypatch.delattr(grpo, "validate")
    with pytest.raises(SystemExit, match="this NeMo RL has no validate: use commit 7ea279a"):
        trainer.run_grpo().main()


def test_a_nemo_rl_that_ignores_masks_is_refused(trainer: Any, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_rl.experience import rollouts

    monkeypatch.delattr(rollouts, "should_mask_flagged_samples")
    with pytest.raises(SystemExit, match="use its main after 2026-07-31"):
        trainer.run_grpo().main()
