# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Steps of NeMo RL's real `async_grpo_train` on the CPU, whose collector and replay buffer are actors of Ray.

The stand-ins are those of `trainer`. The engine is one more actor, of which only the version of the weights is left.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import torch

from tests.nemo_rl import trainer
from tests.support.nemo_rl_cases import Sample, row_of

GROUP = 2
"""Samples of a prompt."""


@contextmanager
def cluster() -> Iterator[None]:
    """Start Ray. Its processes get the classes of `run_grpo.py` by value, as those of a program that runs."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

    for name in ("AsyncTrajectoryCollector", "ReplayBuffer"):
        ACTOR_ENVIRONMENT_REGISTRY[f"nemo_rl.algorithms.async_utils.{name}"] = sys.executable
    ray.cloudpickle.register_pickle_by_value(trainer.run_grpo())
    with tempfile.TemporaryDirectory(prefix="ray") as directory:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"worker_process_setup_hook": "tests.nemo_rl.prepare"},
            _temp_dir=directory,
        )
        try:
            yield
        finally:
            ray.shutdown()


@dataclass
class Trained:
    """What NeMo RL trained in some steps."""

    steps: list[trainer.Trained]
    ages: list[float]
    """NeMo RL's `avg_trajectory_age` of each step."""
    logged: dict[str, Any]
    """The columns that NeMo RL logged of the last step, row by row."""
    batches: list[tuple[int, int]]
    """The versions of the weights at the start and at the end of each batch of sessions that ended."""


def train(step: Sequence[Sample], recipe: str, *overrides: str, steps: int, ranks: int = 1) -> Trained:
    """Run steps of the same samples, two of each prompt. `ranks`: the data-parallel size."""
    from nemo_rl.algorithms import grpo
    from nemo_rl.algorithms.loss import ClippedPGLossFn
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    prompts = len(step) // GROUP
    sizes = (f"policy.train_global_batch_size={len(step)}", f"grpo.num_prompts_per_step={prompts}")
    some = (f"grpo.num_generations_per_prompt={GROUP}", f"grpo.max_num_steps={steps}", "grpo.val_at_start=false")
    off = ("policy.dynamic_batching.enabled=false", "checkpointing.enabled=false", "logger.wandb_enabled=false")
    config = trainer.load(recipe, *sizes, *some, *off, *overrides)
    batch = BatchedDataDict(
        message_log=[[{"role": "user", "content": "", "token_ids": torch.tensor([0])}] for _ in range(prompts)],
        extra_env_info=[row_of(sample) for sample in step[::GROUP]],
        loss_multiplier=torch.ones(prompts),
        length=torch.ones(prompts, dtype=torch.long),
        idx=list(range(prompts)),
    )
    engine = Engine.remote()
    policy, logger = Policy(config.policy, ranks, engine), Logger()
    environment = {"nemo_gym": Environment(step, engine)}
    with trainer.replaced(policy, config, patched=True):
        grpo.async_grpo_train(
            policy,
            Generation(config.policy["generation"], engine),
            [batch] * (steps + 3),
            None,
            trainer.Tokenizer(),
            ClippedPGLossFn(config.loss_fn),
            environment,
            environment,
            logger,
            Checkpointer(),
            grpo._initial_grpo_save_state(),
            config,
            max_trajectory_age_steps=config.grpo.async_grpo.max_trajectory_age_steps,
        )
    return Trained(policy.steps, logger.ages, logger.logged, ray.get(engine.batches.remote()))


@ray.remote
class Engine:
    """Knows the version of the weights, and between which versions each batch of sessions ran."""

    def __init__(self) -> None:
        self._version = 0
        self._batches: list[tuple[int, int]] = []
        self._begun = -1
        self._changed = asyncio.Condition()

    async def refit(self) -> None:
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def run(self) -> None:
        """Run a batch of sessions. NeMo RL waits for two batches of version 0; any other ends after the next refit."""
        async with self._changed:
            begun = self._begun = self._version
            self._changed.notify_all()
            await self._changed.wait_for(lambda: begun == 0 or self._version > begun)
            self._batches.append((begun, self._version))

    async def wait_for_batch(self) -> None:
        """Return when a batch has begun with the present weights."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._begun == self._version)

    async def batches(self) -> list[tuple[int, int]]:
        return self._batches


class Environment(trainer.Environment):
    def __init__(self, step: Sequence[Sample], engine: Any) -> None:
        super().__init__(step)
        self._engine = engine

    async def remote(self, rows: Sequence[dict[str, Any]], *arguments: Any) -> AsyncIterator[Any]:
        await self._engine.run.remote()
        async for ready in super().remote(rows, *arguments):
            yield ready


class Generation(trainer.Generation):
    def __init__(self, config: Any, engine: Any) -> None:
        super().__init__(config)
        self.weight_synchronizer = Synchronizer(engine)

    def blocks_training(self) -> bool:
        return False


class Synchronizer(trainer.Synchronizer):
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def sync_weights(self, **options: Any) -> dict[str, Any]:
        ray.get(self._engine.refit.remote())
        return {}


class Policy(trainer.Policy):
    """Keeps each step, and begins none before the engine is in the middle of a batch."""

    def __init__(self, config: Any, ranks: int, engine: Any) -> None:
        super().__init__(config, ranks)
        self.sharding_annotations = Axes(ranks)
        self.steps: list[trainer.Trained] = []
        self._engine = engine

    def train(self, data: Any, loss_fn: Any, timer: Any = None, gbs: int | None = None) -> dict[str, Any]:
        ray.get(self._engine.wait_for_batch.remote())
        self.logits.grad = None
        found = super().train(data, loss_fn, timer, gbs)
        self.steps.append(trainer.Trained(self.trained, self.gradient, {}))
        return found


class Axes:
    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def get_axis_size(self, name: str) -> int:
        return self._ranks


class Logger(trainer.Logger):
    """Keeps NeMo RL's age of the sessions of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.ages: list[float] = []
        self.logged: dict[str, Any] = {}

    def log_metrics(self, metrics: dict[str, Any], step: int, prefix: str = "", **options: Any) -> None:
        super().log_metrics(metrics, step, prefix, **options)
        if prefix == "train":
            self.ages.append(metrics["avg_trajectory_age"])

    def log_batched_dict_as_jsonl(self, to_log: dict[str, Any], filename: str) -> None:
        self.logged = to_log


class Checkpointer(trainer.Quiet):
    def get_latest_checkpoint_path(self) -> None:
        return None
