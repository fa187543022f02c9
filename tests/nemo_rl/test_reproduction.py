# pyright: reportMissingImports=false
"""The run script serves `recipes/nemo_rl/reproduce.py`: NeMo RL keeps its metrics, and takes the kit's overrides."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any


def test_run_grpo_keeps_the_numbers_that_nemo_rl_logs(trainer: Any, tmp_path: Path) -> None:
    import numpy as np
    from nemo_rl.utils.logger import Logger

    backends = ("wandb", "swanlab", "tensorboard", "mlflow")
    off: Any = {f"{name}_enabled": False for name in backends}
    logger = Logger({**off, "log_dir": str(tmp_path), "monitor_gpus": False, "num_val_samples_to_print": 0})
    trainer.run_grpo().keep_metrics(logger)
    logger.log_metrics({"total_reward/mean": np.float64(0.5), "histogram": [1, 2]}, 3, "train", None)
    logger.log_metrics({"loss": 1.0}, step=3, prefix="train", step_finished=True)
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept == [
        {"step": 3, "prefix": "train", "metrics": {"total_reward/mean": 0.5}},
        {"step": 3, "prefix": "train", "metrics": {"loss": 1.0}},
    ]


def test_nemo_rl_takes_the_overrides_of_the_reproduction(trainer: Any) -> None:
    script = (trainer.RECIPES / "reproduce.py").read_text()
    (overrides,) = re.findall(r"^FINAL_ONLY = (\(.*\))$", script, re.MULTILINE)
    (agent,) = re.findall(r'^AGENT = "(.*)"$', script, re.MULTILINE)
    config = trainer.load("grpo_pi_all_traces", *ast.literal_eval(overrides), f"++{agent}.runtime=docker")
    trainer.run_grpo().check(config)
    assert config.checkpointing["metric_name"] is None
    assert config.grpo.val_period == 0
    servers = config.env["nemo_gym"]["polar_swe_agent"]["responses_api_agents"]
    assert servers["polar_agent"]["polar"]["runtime"] == "docker"
