"""Environments that ship with NeMo Gym, each with a conversation that is right and one that is wrong.

A case is the first example row of an environment, with the conversation's name in its first message. Both agents read
their answers from one script: NeMo Gym's own `simple_agent`, and a real harness that polar-gym runs.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from polar_gym.config.loading import load_config
from polar_gym.gateway.node.assemble import load_tasks, make_node, make_request
from polar_gym.schema import Episode
from tests.e2e.nemo_gym import venv_directory
from tests.e2e.vllm_server import CHECKOUT

Calls = list[tuple[str, dict[str, Any]]]

CONVERSATIONS: dict[str, dict[str, tuple[Calls, str]]] = {
    "example_session_state_mgmt": {
        "right": ([("increment_counter", {"count": 1}), ("increment_counter", {"count": 2})], "It is 6."),
        "wrong": ([("increment_counter", {"count": 1}), ("get_counter_value", {})], "It is 4."),
    },
    "example_multi_step": {
        "right": (
            [
                ("get_synonym_value", {"synonym": "Blazing"}),
                ("get_synonym_value", {"synonym": "Warm"}),
                ("extract_synonym_values", {"synonym_values": [711, 407]}),
            ],
            "Done.",
        ),
        "wrong": ([("extract_synonym_values", {"synonym_values": [407, 711]})], "Done."),
    },
    "math_advanced_calculations": {
        "right": (
            [
                ("subtract", {"a": 9.0, "b": 9.0}),
                ("divide", {"a": 1.0, "b": 1.0}),
                ("multiply", {"a": 1.0, "b": 9.0}),
                ("sin", {"radians": 5.0}),
            ],
            "Done.",
        ),
        "wrong": ([("divide", {"a": 1.0, "b": 0.0})], "It cannot be done."),
    },
    "workplace_assistant": {
        "right": (
            [
                (
                    "email_reply_email",
                    {
                        "email_id": "00000057",
                        "body": "Thanks for the update - I will get back to you tomorrow.",
                    },
                )
            ],
            "Done.",
        ),
        "wrong": ([("email_reply_email", {"email_id": "00000057", "body": "No."})], "Done."),
    },
    "mcqa": {"right": ([], "\\boxed{B}"), "wrong": ([], "\\boxed{C}")},
}
"""Environment -> name of a conversation -> its tool calls, one a turn, and its last words."""


@dataclass(frozen=True)
class Case:
    environment: str
    conversation: str
    row: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.environment} {self.conversation}"

    @property
    def script(self) -> dict[str, Any]:
        calls, final_message = CONVERSATIONS[self.environment][self.conversation]
        return {"match": f"[{self.name}]", "calls": calls, "final_message": final_message}


def cases(version: str, environments: Sequence[str]) -> list[Case]:
    return [
        Case(name, conversation, _row(version, name, conversation))
        for name in environments
        for conversation in CONVERSATIONS[name]
    ]


def _row(version: str, environment: str, conversation: str) -> dict[str, Any]:
    (examples,) = venv_directory(version).glob(
        f"lib/*/site-packages/resources_servers/{environment}/data/example.jsonl"
    )
    with examples.open(encoding="utf-8") as lines:
        row = json.loads(next(lines))
    row["responses_create_params"]["input"][-1]["content"] += f"\n[{environment} {conversation}]"
    return row


@contextmanager
def serving_environments(version: str, chosen: Sequence[Case], directory: Path) -> Iterator[dict[str, str]]:
    """Give the URL of each environment's server, and of its `simple_agent` as `<environment>_agent`."""
    scripts = directory / "scripts.json"
    scripts.write_text(json.dumps([case.script for case in chosen]), encoding="utf-8")
    python, program = venv_directory(version) / "bin" / "python", "tests.e2e.gym_servers"
    command = [python, "-m", program, scripts, *dict.fromkeys(case.environment for case in chosen)]
    with (
        (directory / "servers.log").open("wb") as log,
        subprocess.Popen(command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            said = process.stdout.readline()
            assert said, (directory / "servers.log").read_text(encoding="utf-8")[-4000:]
            yield json.loads(said)
        finally:
            process.stdin.close()


async def gyms_own(case: Case, urls: dict[str, str]) -> float:
    """Return the reward that NeMo Gym's own agent gets."""
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{urls[f'{case.environment}_agent']}/run", json=case.row) as response,
    ):
        assert response.status == 200, await response.text()
        return (await response.json())["reward"]


async def ours(
    case: Case, urls: dict[str, str], directory: Path, harness: dict[str, Any], samples: int = 1
) -> list[Episode]:
    """Return the episodes of a harness on a case, all at once."""
    rows = directory / f"{case.environment}-{case.conversation}.jsonl"
    rows.write_text(json.dumps(case.row) + "\n", encoding="utf-8")
    calls = [f"{name} {json.dumps(arguments)}" for name, arguments in case.script["calls"]]
    script = {"match": case.script["match"], "commands": calls, "final_message": case.script["final_message"]}
    config = load_config(
        settings={
            "tasks": {"name": "jsonl", "path": str(rows)},
            "harness": harness,
            "runtime": "bubblewrap",
            "engine": {"name": "polar_gym.conformance.acting:ToolCalling", "scripts": [script]},
            "evaluator": {"name": "nemo_gym", "url": urls[case.environment]},
            "rollout": {"timeout_seconds": 300, "state": str(directory / "state")},
        }
    )
    tasks = load_tasks(config)
    async with make_node(config, tasks) as node:
        return await asyncio.gather(*(node.rollout(make_request(config, tasks[0]), place) for place in range(samples)))
