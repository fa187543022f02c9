# pyright: reportMissingImports=false
"""One step of NeMo RL's real `grpo_train` on the CPU.

Real: the config, the postprocessing of answers, `grpo_train`, the estimator of advantages, `Policy._shard_for_train`
and the loss. The stand-ins are small: an environment that has the answers, a generation that does nothing, and a policy
whose model is a table of logits. Without Ray, NeMo RL's printing of Ray's memory is off.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from polar_gym.paths import shipped_dir
from tests.support.nemo_rl_cases import Sample, answers_of, row_of

RECIPES = shipped_dir("recipes") / "nemo_rl"
VOCABULARY = 128


@dataclass
class Trained:
    """What NeMo RL trained in a step."""

    data: dict[str, Any]
    gradient: torch.Tensor
    metrics: dict[str, Any]
    """All that NeMo RL logged, by prefix and name."""

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows that are trained: their ids, their trained places and their advantage."""
        found = []
        for row, length in enumerate(self.data["input_lengths"].tolist()):
            if self.data["sample_mask"][row]:
                trained = torch.nonzero(self.data["token_mask"][row]).flatten().tolist()
                advantages = set(self.data["advantages"][row][trained].tolist())
                assert len(advantages) == 1
                ids = self.data["input_ids"][row, :length].tolist()
                found.append({"ids": ids, "trained": trained, "advantage": round(advantages.pop(), 4)})
        return found


def run_grpo() -> Any:
    """Import recipes/nemo_rl/run_grpo.py."""
    spec = importlib.util.spec_from_file_location("run_grpo", RECIPES / "run_grpo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_grpo"] = module
    spec.loader.exec_module(module)
    return module


def load(recipe: str, *overrides: str) -> Any:
    """Return NeMo RL's own config of a recipe."""
    from nemo_rl.algorithms.grpo import MasterConfig
    from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    config = parse_hydra_overrides(load_config(str(RECIPES / f"{recipe}.yaml")), list(overrides))
    values: Any = OmegaConf.to_container(config, resolve=True)
    return MasterConfig(**values)


def train(step: Sequence[Sample], recipe: str, *overrides: str, patched: bool = True, ranks: int = 1) -> Trained:
    """Run a step. `patched`: with the replacements of `run_grpo.py`. `ranks`: the data-parallel size."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    config = one_step(recipe, 1, len(step), *overrides)
    batch = BatchedDataDict(
        message_log=[[{"role": "user", "content": "", "token_ids": torch.tensor([0])}]],
        extra_env_info=[{}],
        loss_multiplier=torch.ones(1),
        length=torch.ones(1, dtype=torch.long),
        idx=[0],
    )
    batches = [Repeated(batch, [row_of(sample) for sample in step])]
    return run_step(config, Policy(config.policy, ranks), batches, Environment(step), Tokenizer(), patched=patched)


def one_step(recipe: str, prompts: int, samples: int, *overrides: str) -> Any:
    """Return NeMo RL's own config of a recipe, for one step without validation."""
    sizes = (f"policy.train_global_batch_size={prompts * samples}", f"grpo.num_prompts_per_step={prompts}")
    once = (f"grpo.num_generations_per_prompt={samples}", "grpo.max_num_steps=1", "grpo.val_at_start=false")
    off = ("policy.dynamic_batching.enabled=false", "checkpointing.enabled=false", "logger.wandb_enabled=false")
    return load(recipe, *sizes, *once, *off, *overrides)


def run_step(
    config: Any, policy: Policy, batches: Sequence[Any], environment: Any, tokenizer: Any, *, patched: bool
) -> Trained:
    """Run `grpo_train` on batches of data. `environment`: the `NemoGym` actor, or what stands in for it."""
    from nemo_rl.algorithms import grpo
    from nemo_rl.algorithms.loss import ClippedPGLossFn

    logger, environments = Logger(), {"nemo_gym": environment}
    with replaced(policy, config, patched):
        grpo.grpo_train(
            policy,
            Generation(config.policy["generation"]),
            batches,
            batches,
            tokenizer,
            ClippedPGLossFn(config.loss_fn),
            environments,
            environments,
            logger,
            Quiet(),
            grpo._initial_grpo_save_state(),
            config,
        )
    return Trained(policy.trained, policy.gradient, logger.metrics)


@contextmanager
def replaced(policy: Any, config: Any, patched: bool) -> Iterator[None]:
    """Replace NeMo RL's functions as `run_grpo.py` does, and put them back."""
    from nemo_rl.algorithms import grpo

    ours = run_grpo()
    places = (*ours.REPLACED, (grpo, "MemoryTracker"))
    real = [getattr(module, name) for module, name in places]
    try:
        grpo.MemoryTracker = Quiet
        if patched:
            ours.check(config)
            ours.install(policy, config)
        yield
    finally:
        for (module, name), function in zip(places, real, strict=True):
            setattr(module, name, function)


class Quiet:
    """An object whose methods do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: None


class Repeated:
    """A batch of NeMo RL's data whose samples are rows of a step."""

    def __init__(self, batch: Any, rows: Sequence[dict[str, Any]]) -> None:
        self._batch, self._rows = batch, rows

    def repeat_interleave(self, times: int, **options: Any) -> Any:
        repeated = self._batch.repeat_interleave(times)
        repeated["extra_env_info"] = copy.deepcopy(list(self._rows))
        return repeated

    def __getattr__(self, name: str) -> Any:
        """Validation takes the samples without repeating them."""
        return getattr(self.repeat_interleave(len(self._rows)), name)

    def __getitem__(self, key: str) -> Any:
        return self.repeat_interleave(len(self._rows))[key]


class Generation(Quiet):
    """The engine's side: its weights are always the policy's."""

    requires_kv_scale_sync = False

    def __init__(self, config: Any) -> None:
        self.cfg = config
        self.weight_synchronizer = Synchronizer()

    def get_logger_metrics(self) -> dict[str, Any]:
        return {}

    def get_step_metrics(self) -> dict[str, Any]:
        return {}


class Synchronizer:
    is_stale = False

    def sync_weights(self, **options: Any) -> dict[str, Any]:
        return {}


@dataclass
class Logger(Quiet):
    metrics: dict[str, Any] = field(default_factory=dict)

    def log_metrics(self, metrics: dict[str, Any], step: int, prefix: str = "", **options: Any) -> None:
        self.metrics |= {f"{prefix}/{name}": value for name, value in metrics.items()}


class Tokenizer:
    pad_token_id = 0

    def batch_decode(self, batch: Sequence[Any]) -> list[str]:
        return [""] * len(batch)


class Environment:
    """The `NemoGym` actor after Gym has answered: NeMo RL's real postprocessing of each answer."""

    def __init__(self, step: Sequence[Sample]) -> None:
        self._step = step

    @property
    def run_rollouts(self) -> Environment:
        return self

    def options(self, **options: Any) -> Environment:
        return self

    async def remote(self, rows: Sequence[dict[str, Any]], *arguments: Any) -> AsyncIterator[Any]:
        from nemo_rl.environments.nemo_gym import NemoGym

        actor = NemoGym.__ray_metadata__.modified_class
        for row, answer in zip(rows, answers_of(self._step), strict=True):
            result = actor._postprocess_nemo_gym_to_nemo_rl_result(Quietly(), row, answer, Tokenizer())
            yield Ready((row["_rowidx"], result, {}))


class Quietly:
    """The actor's own state."""

    cfg: dict[str, Any] = {}  # noqa: RUF012 - NeMo RL reads it as an attribute
    _processor = None


class Ready:
    """A value that can be awaited, like a reference of Ray."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Iterator[Any]:
        return self._value
        yield


class Policy(Quiet):
    """A model with a logit for each pair of tokens."""

    use_dynamic_batches = use_sequence_packing = False

    def __init__(self, config: Any, ranks: int) -> None:
        self.cfg = config
        self.data_parallel_size = ranks
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64, requires_grad=True)
        self.trained: dict[str, Any] = {}
        self.gradient = torch.empty(0)

    def logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logprob of each token but the first."""
        return self.logits[ids[:, :-1]].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    def get_logprobs(self, data: Any, timer: Any = None) -> dict[str, torch.Tensor]:
        assert data.size % self.data_parallel_size == 0, "NeMo RL shards the batch over its ranks"
        logprobs = self.logprobs(data["input_ids"]).detach()
        return {"logprobs": torch.nn.functional.pad(logprobs, (1, 0)).float()}

    def get_reference_policy_logprobs(self, data: Any, timer: Any = None) -> dict[str, torch.Tensor]:
        return {"reference_logprobs": self.get_logprobs(data)["logprobs"]}

    def train(self, data: Any, loss_fn: Any, timer: Any = None, gbs: int | None = None) -> dict[str, Any]:
        """Take the gradient as NeMo RL's workers do: a loss for each rank, over the tokens of the whole batch."""
        from nemo_rl.models.policy.lm_policy import Policy as RealPolicy

        self.trained = {name: value.clone() for name, value in data.items()}
        shards = RealPolicy._shard_for_train(self, data, gbs or self.cfg["train_global_batch_size"])
        assert len(shards) == self.data_parallel_size
        sequences = data["sample_mask"].sum()
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
        total, metrics = 0.0, {"global_valid_seqs": [sequences.item()], "global_valid_toks": [tokens.item()]}
        for shard in shards:
            loss, found = loss_fn(self.logprobs(shard["input_ids"]), shard, sequences, tokens)
            loss.backward()
            total += loss.item()
            for name, value in found.items():
                metrics.setdefault(name, []).append(value)
        assert self.logits.grad is not None
        self.gradient = self.logits.grad.clone()
        return {"loss": torch.tensor(total), "grad_norm": self.gradient.norm(), "all_mb_metrics": metrics}
