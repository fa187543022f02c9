# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Train the start model of `polar-gym learn` with TRL's GRPOTrainer, on the same tasks and with the same settings.

    polar-gym learn --steps 1 --out outputs/learn/start      # makes the start model and the tasks
    python recipes/trl/grpo.py outputs/learn/start --steps 25

TRL asks for rollouts by `rollout_func`. The prompts of its data set are task ids; the sessions are those of the vector
environment. The trainer's weights are given to the engine before each rollout: without that TRL would train off-policy.
Prints a JSON line for each step, and one for each evaluation on held-out tasks. Needs the extras `torch` and `export`,
and trl.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import gymnasium as gym
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer

import polar_gym
from polar_gym.learning.grpo import Settings, roll_out
from polar_gym.learning.model import Size
from polar_gym.learning.report import check_scored, figures
from polar_gym.schema import Episode
from polar_gym.training.batch import regarded
from polar_gym.training.trl import episode_reward, rollout_output

SETTINGS, PLACES = Settings(), 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's directory, with its plan, its start model and its tasks")
    parser.add_argument("--out", type=Path, default=Path("outputs/learn/trl"), help="for the trainer's files")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--held-out", type=int, default=200, help="tasks of an evaluation")
    options = parser.parse_args()
    tasks = options.run / "tasks" / "all.jsonl"
    ids = [json.loads(line)["instance_id"] for line in tasks.read_text(encoding="utf-8").splitlines()]
    train = [task_id for task_id in ids if "-train-" in task_id]
    held_out = [task_id for task_id in ids if "-held_out-" in task_id][: options.held_out]
    start = str(options.run / "start")
    plan, config = planned(options.run)
    engine = {"policy": "transformers", "model_path": start, "slots": PLACES, "dtype": "float32"}
    own = {"engine": {**config["engine"], **engine}, "tasks": {"name": "jsonl", "path": str(tasks)}}
    envs: Any = gym.make_vec("polar/swe", num_envs=PLACES, **{**config, **own})

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        envs.set_weights(trainer.model.state_dict(), f"step-{trainer.state.global_step // SETTINGS.epochs}")
        episodes = play(envs, prompts)
        say(step=1 + trainer.state.global_step // SETTINGS.epochs, **figures(episodes))
        return rollout_output(episodes)[0]

    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start).float(),
        processing_class=AutoTokenizer.from_pretrained(start),
        reward_funcs=episode_reward,
        rollout_func=rollout_func,
        train_dataset=datasets.Dataset.from_list([{"prompt": task_id} for task_id in train]),
        args=trl.GRPOConfig(
            output_dir=str(options.out),
            max_steps=options.steps * SETTINGS.epochs,
            per_device_train_batch_size=SETTINGS.groups * SETTINGS.samples,
            num_generations=SETTINGS.samples,
            num_iterations=SETTINGS.epochs,
            learning_rate=SETTINGS.learning_rate * Size(**plan["size"]).scale,
            epsilon=SETTINGS.clip_below,
            epsilon_high=SETTINGS.clip_above,
            beta=0.0,
            loss_type="grpo",
            scale_rewards="none",
            temperature=1.0,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            bf16=False,
            gradient_checkpointing=False,
        ),
    )
    say(evaluated=0, greedy=False, **figures(play(envs, held_out)))
    trainer.train()
    envs.set_weights(trainer.model.state_dict(), "last")
    say(evaluated=options.steps, greedy=False, **figures(play(envs, held_out)))
    envs.close()


def planned(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run's plan, and the settings of its harness. Ends the program where the run has several harnesses."""
    written = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    if len(written["configs"]) > 1:
        sys.exit(f"{run}: a mixture of {', '.join(written['configs'])}; name a run of one harness")
    if "timeouts" not in written:
        sys.exit(f"{run}: an earlier polar-gym wrote its plan.json; go on with the run first, by polar-gym learn")
    (config,), (timeout,) = written["configs"].values(), written["timeouts"].values()
    if config["sampling"]["seed"] is None:
        config["sampling"]["seed"] = written["plan"]["seed"]
    return written["plan"], {**config, "rollout": {"timeout_seconds": timeout}}


def play(envs: Any, task_ids: Sequence[str]) -> list[Episode]:
    """Return an episode for each id. A session that a budget ended has the reward 0. Raises `ConfigError` where none
    has a reward."""
    episodes = [regarded(episode, "zero") for episode in roll_out(envs, task_ids, {})]
    check_scored(episodes, f"a rollout of {len(set(task_ids))} tasks")
    return episodes


def say(**line: Any) -> None:
    print(json.dumps({"polar_gym": polar_gym.__version__, **line}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
