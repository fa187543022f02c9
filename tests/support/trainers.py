"""Adapters for the check of the packing that run the code of trainers: loss, collator and records are theirs.

TRL (1.16) is beside torch. prime-rl (559b447) is in no registry: it needs a checkout's `src` and its configs on the
path, and `jaxtyping` and `beartype`. AReaL (4aef98d) needs a checkout on the path, and what its utilities import:
`aiofiles`, `colorlog`, `flask`, `ray`, `torchdata`. Forward passes are those of the model under test: the trainers' own
need a GPU.
"""

from __future__ import annotations

import importlib
import queue
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from types import SimpleNamespace
from typing import Any

from polar_gym.training import Row, padded, to_torch
from polar_gym.training.conformance import CLIP, KL_COEFFICIENT, LOSSES, TRUNCATE_AT, Step, token_logprobs
from polar_gym.training.forest import forest
from polar_gym.training.prime_rl import training_samples
from polar_gym.training.row import inert_row
from polar_gym.training.trl import rollout_samples


def _rows(step: Step) -> list[Row]:
    return list(chain(*chain(*step.ranks)))


def trl_one_accumulation_step(model: Any, step: Step) -> None:
    """Run AsyncGRPOTrainer on all rows as one micro-batch, filled up with inert rows to a multiple of eight: TRL's
    queue, and its own planner, which gives rows to ranks."""
    asynchronous: Any = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    samples: queue.Queue[Any] = queue.Queue()
    rows = _rows(step)
    rows += [inert_row()] * (-len(rows) % 8)
    for sample in rollout_samples(rows, model_version=3):
        samples.put(asynchronous.RolloutSample(**sample))

    def starve(_: float) -> None:
        raise AssertionError("TRL waits for more samples before it takes a step")

    metrics: defaultdict[str, list[Any]] = defaultdict(list)
    dataset = asynchronous.RolloutQueueDataset(samples, lambda: 4, starve, 1.0, metrics, poll_interval_s=0.01)
    planner = asynchronous.FixedCountBatcher(dataset, len(step.ranks), microbatch_size=len(rows))
    _trl_backward(model, next(iter(planner)), _trl_trainer(len(step.ranks), 1))


def trl_accumulating(model: Any, step: Step) -> None:
    """Run AsyncGRPOTrainer with as many micro-batches as the step has."""
    asynchronous: Any = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    packing: Any = importlib.import_module("trl.experimental.async_grpo.packing")
    rows = [row for row in _rows(step) if not row.inert]
    samples = [asynchronous.RolloutSample(**sample) for sample in rollout_samples(rows, model_version=0)]
    by_row = {id(row): asdict(sample) for row, sample in zip(rows, samples, strict=True)}
    trainer = _trl_trainer(len(step.ranks), max(map(len, step.ranks)))
    for number in range(max(map(len, step.ranks))):
        trees = []
        for rank in step.ranks:
            tree = packing.TreeRow()
            for row in rank[number] if number < len(rank) else []:
                if not row.inert:
                    tree.add(by_row[id(row)])
            trees += [tree] if tree.samples else []  # TRL's planner leaves no rank without a sample
        if trees:
            _trl_backward(model, trees, trainer)


def _trl_backward(model: Any, trees: list[Any], trainer: Any) -> None:
    """Run TRL's collator and its loss on a micro-batch: one tree for each rank."""
    asynchronous: Any = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    batch = asynchronous.DataCollatorForRollout(pad_token_id=0, num_processes=len(trees))([trees])
    for place in range(len(trees)):
        inputs = {name: values[place : place + 1] for name, values in batch.items()}
        loss = asynchronous.AsyncGRPOTrainer.compute_loss(trainer, _TreeForward(model), inputs)
        (loss / trainer.accelerator.num_processes).backward()


def _trl_trainer(ranks: int, accumulation_steps: int) -> Any:
    """Return what `compute_loss` reads and counts of its trainer."""
    alone = SimpleNamespace(num_processes=ranks, reduce=lambda values, **_: values, gather=lambda values: values)
    counters = ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s")
    return SimpleNamespace(
        accelerator=alone,
        epsilon_low=CLIP,
        epsilon_high=CLIP,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=accumulation_steps,
        _metrics={"train": defaultdict(list)},
        **{f"_step_{name}": 0.0 for name in counters},
    )


class _TreeForward:
    """The forward pass over a packed tree: each segment after its path, as TRL's attention sees it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *, input_ids: Any, shift_labels: Any, **tree: Any) -> Any:
        torch: Any = importlib.import_module("torch")
        parts = []
        queries, keys = tree["tree_cu_seqlens_q"].tolist(), tree["tree_cu_seqlens_k"].tolist()
        for segment in range(len(queries) - 1):
            path = tree["tree_kv_index"][keys[segment] : keys[segment + 1]]
            own = queries[segment + 1] - queries[segment]
            parts.append(self.model(input_ids=input_ids[:, path]).logits[:, -own:])
        logprobs = torch.cat(parts, 1).log_softmax(-1).gather(-1, shift_labels.clamp(min=0)[..., None])[..., 0]
        return SimpleNamespace(log_probs=logprobs, entropy=torch.zeros_like(logprobs))


def trl_grpo(model: Any, step: Step) -> None:
    """Run GRPOTrainer's loss (`dapo`) on rows, with our advantages."""
    trl: Any = importlib.import_module("trl")
    torch: Any = importlib.import_module("torch")
    tokens = sum(row.trainable_tokens for row in _rows(step))
    trainer = _trl_grpo_trainer(step, len(step.ranks))
    for rows in (part for rank in step.ranks for part in rank):
        arrays = to_torch(padded(rows, step.pad_id, length_multiple_of=step.length_multiple_of))
        captured = arrays["old_logprobs"][:, 1:]
        inputs = {
            "prompt_ids": arrays["input_ids"][:, :1],
            "prompt_mask": arrays["attention_mask"][:, :1],
            "completion_ids": arrays["input_ids"][:, 1:],
            "completion_mask": arrays["attention_mask"][:, 1:],
            "tool_mask": arrays["loss_mask"][:, 1:],
            "advantages": torch.tensor([row.advantage * float(row.weights.max()) * tokens for row in rows]).double(),
            "old_per_token_logps": None if step.loss == "tis" else captured,
            "ref_per_token_logps": captured,
            "num_items_in_batch": torch.tensor(tokens),
        }
        if step.loss == "tis":
            with torch.no_grad():
                own = token_logprobs(model, arrays["input_ids"], arrays["attention_mask"])[:, 1:]
            inputs["importance_sampling_ratio"] = (own - captured).exp().clamp(max=TRUNCATE_AT)
        if inputs["completion_ids"].shape[1]:
            (trl.GRPOTrainer._compute_loss(trainer, model, inputs) / len(step.ranks)).backward()


def _trl_grpo_trainer(step: Step, ranks: int) -> Any:
    """Return what `_compute_loss` reads and counts of its trainer."""

    def logprobs(model: Any, input_ids: Any, attention_mask: Any, kept: int, **_: Any) -> Any:
        own = token_logprobs(model, input_ids, attention_mask)[:, -kept:]
        return own, own.detach(), None

    return SimpleNamespace(
        _get_per_token_logps_and_entropies=logprobs,
        accelerator=SimpleNamespace(
            num_processes=ranks, reduce=lambda values, **_: values, gather=lambda values: values
        ),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        loss_type="dapo",
        importance_sampling_level="sequence" if step.loss == "gspo" else "token",
        beta=KL_COEFFICIENT if step.loss == "kl" else 0.0,
        epsilon_low=CLIP,
        epsilon_high=CLIP,
        use_vllm=step.loss == "tis",
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )


def prime_rl(model: Any, step: Step) -> None:
    """Run prime-rl's `compute_loss` on its own records. Its `train` counts weighted tokens and sums over all ranks."""
    torch: Any = importlib.import_module("torch")
    loss: Any = importlib.import_module("prime_rl.trainer.rl.loss")
    batch: Any = importlib.import_module("prime_rl.trainer.batch")
    types: Any = importlib.import_module("prime_rl.transports.rollouts.types")
    rows = [row for row in _rows(step) if not row.inert]
    fields = training_samples(rows, env_name="swe")
    ready = [batch.prepare_sample(types.TrainingSample(**sample), seq_len=1024) for sample in fields]
    by_row = {id(row): sample for row, sample in zip(rows, ready, strict=True)}
    scale = sum(row.trainable_tokens for row in rows)
    for part in (part for rank in step.ranks for part in rank):
        samples = [by_row[id(row)] for row in part if not row.inert]
        if not samples:
            continue
        own = [_prime_rl_logprobs(model, loss, sample) for sample in samples]
        named = ("inference_logprobs", "advantages", "rl_weights")
        streams = {name: [torch.tensor(getattr(sample, name)).double() for sample in samples] for name in named}
        masks = [torch.tensor(sample.loss_mask) for sample in samples]
        total, _ = loss.compute_loss(
            trainer_logprobs=own,
            loss_mask=masks,
            **streams,
            **dict.fromkeys(("ref_logprobs", "ce_weights", "ref_kl_weights")),
            rl_loss_fn=loss.setup_rl_loss_fn(prime_rl_config()),
            rl_scale=scale,
            ce_scale=1,
            ref_kl_scale=1,
        )
        total.backward()


def _prime_rl_logprobs(model: Any, loss: Any, sample: Any) -> Any:
    """Return the logprobs of one sequence as `train` computes them, temperatures included."""
    torch: Any = importlib.import_module("torch")
    ids = torch.tensor([sample.input_ids])
    logits = model(input_ids=ids).logits / torch.tensor([sample.temperatures])[..., None].double()
    chosen = logits.log_softmax(-1).gather(-1, loss.shift_tensor_left(ids)[..., None])[..., 0]
    return loss.shift_tensor_right(chosen)[0]


def prime_rl_config() -> Any:
    return importlib.import_module("prime_rl.configs.trainer").DefaultLossConfig()


def prime_rl_loss(logprobs: Any, captured: Any, advantages: Any) -> Any:
    """Return prime-rl's default loss of a whole session."""
    torch: Any = importlib.import_module("torch")
    loss: Any = importlib.import_module("prime_rl.trainer.rl.loss")
    mask = torch.ones(len(logprobs), dtype=torch.bool)
    inputs = loss.LossInputs(logprobs, captured, None, advantages, mask)
    return loss.default_loss_fn(inputs, prime_rl_config()).loss


def areal_trees(model: Any, step: Step) -> None:
    """Run PPO's loss on the trees that AReaL packs out of the arrays of `padded`, each of as few rows as fit."""
    torch: Any = importlib.import_module("torch")
    tree_module: Any = importlib.import_module("areal.models.tree_attn.tree")
    functional: Any = importlib.import_module("areal.models.tree_attn.functional")
    for rows in (part for rank in step.ranks for part in rank):
        arrays = to_torch(padded([rows[place] for place in forest(rows).order], step.pad_id))
        for name in ("weights", "advantages", "old_logprobs"):  # at t, AReaL has what is about token t + 1
            arrays[name] = torch.roll(arrays[name], -1, -1)
        size = 128 * (1 + max(len(row.token_ids) for row in rows) // 128)
        for tree in _areal_batch(arrays, size).mbs:
            mask = tree_module.build_attention_mask_from_trie(tree["trie_node"], size, torch.device("cpu"))
            mask |= torch.eye(size, dtype=torch.bool)  # padding sees itself: its softmax must be finite
            inputs = {"input_ids": tree["input_ids"], "position_ids": tree["position_ids"]}
            logits = model(**inputs, attention_mask=mask[None, None]).logits[0]
            logprobs = functional.gather_packed_tree_logprobs(logits, tree["trie_node"], tree["input_ids"])
            loss = LOSSES["ppo"](logprobs, tree["old_logprobs"], tree["advantages"])
            (tree["weights"] * loss).sum().backward()


def areal_tokens(rows: Sequence[Row], per_tree: int) -> int:
    """Return the tokens of AReaL's trees of these rows."""
    return sum(_areal_batch(to_torch(padded(rows, 0)), per_tree).group_lens)


def _areal_batch(arrays: dict[str, Any], per_tree: int) -> Any:
    tree: Any = importlib.import_module("areal.models.tree_attn.tree")
    cli_args: Any = importlib.import_module("areal.api.cli_args")
    return tree.build_packed_tree_batch(arrays, cli_args.MicroBatchSpec(max_tokens_per_mb=per_tree))
