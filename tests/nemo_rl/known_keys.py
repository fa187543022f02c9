# pyright: reportMissingImports=false
"""Write the keys that NeMo RL's configs may have: `make nemo-rl NEMO_RL=DIRECTORY ARGS=keys`.

They are the fields of NeMo RL's config classes, and of its example configs where no class names them. Only sections
that `recipes/nemo_rl` sets are written.
"""

from __future__ import annotations

import importlib
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from polar_gym.paths import shipped_dir
from tests.nemo_rl.environment import PINNED

KNOWN_KEYS = shipped_dir("recipes").parent / "tests" / "unit" / "config" / "nemo_rl" / "known_keys.yaml"
POLICY = "nemo_rl.models.policy"
DATA_SET = "nemo_rl.data.ResponseDatasetConfig"
CLASSES = {
    "grpo": "nemo_rl.algorithms.grpo.GRPOConfig",
    "grpo.async_grpo": "nemo_rl.algorithms.grpo.AsyncGRPOConfig",
    "loss_fn": "nemo_rl.algorithms.loss.ClippedPGLossConfig",
    "checkpointing": "nemo_rl.utils.checkpoint.CheckpointingConfig",
    "policy": f"{POLICY}.PolicyConfig",
    "policy.dtensor_cfg": f"{POLICY}.DTensorConfig",
    "policy.megatron_cfg": f"{POLICY}.MegatronConfig",
    "policy.megatron_cfg.optimizer": f"{POLICY}.MegatronOptimizerConfig",
    "policy.megatron_cfg.scheduler": f"{POLICY}.MegatronSchedulerConfig",
    "policy.sequence_packing": f"{POLICY}.SequencePackingConfig",
    "policy.dynamic_batching": f"{POLICY}.DynamicBatchingConfig",
    "policy.generation.vllm_cfg": "nemo_rl.models.generation.vllm.config.VllmSpecificArgs",
    "data": "nemo_rl.data.DataConfig",
    "data.train": DATA_SET,
    "data.validation": DATA_SET,
    "data.default": DATA_SET,
    "cluster": "nemo_rl.distributed.virtual_cluster.ClusterConfig",
}
EXAMPLES = (
    *("policy.generation", "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"),
    *("policy.generation.colocated", "policy.generation.colocated.resources", "env", "logger", "logger.wandb"),
)
"""Sections whose keys are those of all examples."""
NOT_YET = {"grpo": ["gym_multi_trace"]}
"""Keys of NeMo RL's open pull request 4078, which recipes/nemo_rl/run_grpo.py reads too."""
HEAD = """\
# Keys that NeMo RL's configs may have, section by section: what `recipes/nemo_rl` is held against.
#
# NeMo RL is not on PyPI (0.0.0 there is a placeholder), and its config classes let unknown keys pass: a misspelt one
# would be ignored in silence. `make nemo-rl NEMO_RL=DIRECTORY ARGS=keys` writes this file.
"""


def fields(path: str) -> list[str]:
    """Return the fields of a pydantic model or a TypedDict."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    return list(getattr(found, "model_fields", None) or found.__annotations__)


def examples(directory: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(directory.glob("examples/**/*.yaml")):
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(config, dict):
            yield config


def section(config: Any, name: str) -> dict[str, Any]:
    for key in name.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else {}


def known(directory: Path) -> dict[str, list[str]]:
    """Return the keys of each section."""
    configs = list(examples(directory))
    keys = {name: fields(path) for name, path in CLASSES.items()}
    keys |= {
        name: sorted({key for each in configs for key in section(each, name)} - {"_override_"}) for name in EXAMPLES
    }
    return {name: [*found, *NOT_YET.get(name, [])] for name, found in keys.items()}


def text(directory: Path) -> str:
    parts = [HEAD, f"commit: {PINNED}\n", "env.nemo_gym: {open: true} # NeMo Gym's own config, and blocks of servers\n"]
    for name, keys in known(directory).items():
        parts.append(f"{name}:\n  source: {CLASSES.get(name, 'examples')}\n")
        listed = f"keys: [{', '.join(keys)}]"
        parts.append(textwrap.fill(listed, 118, initial_indent="  ", subsequent_indent="    ") + "\n")
    return "".join(parts)


if __name__ == "__main__":
    KNOWN_KEYS.write_text(text(Path(os.environ["NEMO_RL"])), encoding="utf-8")
