"""Writes rows for NeMo Gym: `python -m polar_gym.nemo.rows [--agent NAME] [KEY=VALUE]... > rows.jsonl`.

The tasks come from any task source. A row names its task by id only. The agent server finds the rest in its setting
`polar.tasks`, so that no row holds hidden tests.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import orjson

from polar_gym.config.loading import load_config
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.assemble import load_tasks
from polar_gym.tasks import Task
from polar_gym.tasks.request import instruction

AGENT_NAME = "polar_swe_agent"


def row(task: Task, agent: str = AGENT_NAME) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": instruction(task)}]},
        "verifier_metadata": {"instance_id": task.instance_id},
        "agent_ref": {"type": "responses_api_agents", "name": agent},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a row for each task of a source.")
    parser.add_argument("--agent", default=AGENT_NAME, help="the agent server that the rows are for")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="the source, e.g. tasks=jsonl tasks.path=...")
    arguments = parser.parse_args()
    try:
        tasks = load_tasks(load_config(overrides=arguments.settings))
    except ConfigError as error:
        parser.error(str(error))
    for task in tasks:
        sys.stdout.write(orjson.dumps(row(task, arguments.agent)).decode() + "\n")


if __name__ == "__main__":
    main()
