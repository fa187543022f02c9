# pyright: reportMissingImports=false
"""NeMo RL's own script, started by ours, comes to the place where it takes the GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from polar_gym.config.loading import load_config
from polar_gym.durable import write
from polar_gym.gateway.node.assemble import load_tasks
from tests.support.tiny_model import write_tiny_model


class ReachedError(Exception):
    """NeMo RL asks for the GPUs."""


@pytest.mark.parametrize("recipe", ["grpo_pi", "grpo_codex_all_traces", "grpo_qwen_code_async"])
def test_the_script_runs_up_to_the_gpus(
    trainer: Any, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real: config, tokenizer, the data set of our rows, Ray, checkpointer and logger, up to `RayVirtualCluster`."""
    import orjson
    import ray
    from nemo_rl.algorithms import grpo
    from nemo_rl.distributed import virtual_cluster

    from polar_gym.nemo.rows import row

    write_tiny_model(tmp_path / "model")
    rows = b"".join(orjson.dumps(row(task)) + b"\n" for task in load_tasks(load_config(overrides=["tasks=bundled"])))
    for split in ("train", "validation"):
        write(tmp_path / f"{split}_rows.jsonl", rows)
    asked: dict[str, Any] = {}

    def cluster(*arguments: Any, **options: Any) -> None:
        asked.update(options)
        raise ReachedError

    monkeypatch.setenv("POLAR_DATA", str(tmp_path))
    monkeypatch.setattr(grpo, "RayVirtualCluster", cluster)
    start = {"address": "local", "num_cpus": 2, "include_dashboard": False, "_temp_dir": f"/tmp/ray-{os.getpid()}"}
    monkeypatch.setattr(
        virtual_cluster, "init_ray", lambda: ray.init(**start)
    )  # its own wants the dashboard's packages
    settings = [f"policy.model_name={tmp_path / 'model'}", f"logger.log_dir={tmp_path / 'logs'}"]
    settings += [f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}"]
    monkeypatch.setattr(sys, "argv", ["run_grpo.py", "--config", str(trainer.RECIPES / f"{recipe}.yaml"), *settings])
    try:
        with pytest.raises(ReachedError):
            trainer.run_grpo().main()
    finally:
        ray.shutdown()
    assert asked["use_gpus"] is True
    assert sum(asked["bundle_ct_per_node_list"]) in (4, 8)
    assert (tmp_path / "logs" / "exp_001").is_dir()
