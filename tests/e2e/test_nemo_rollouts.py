"""The agent server's rollouts without NeMo Gym around them: sub-agents, compactions, and the real vLLM as policy."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.nemo.rollouts import AgentSettings, Rollouts
from polar_gym.nemo.rows import row
from polar_gym.tasks.bundled import BundledTasks
from tests.e2e.observed_vllm import SHELL_CALLS, observed
from tests.e2e.vllm_server import VllmServer
from tests.support.envelopes import check_envelope
from tests.support.nemo_rl import advantages, consumed
from tests.support.requirements import need_bubblewrap, need_node


def example_row() -> dict[str, Any]:
    return row(BundledTasks(BundledTasks.Options()).load()[0])


async def roll_out(settings: AgentSettings, samples: int = 1) -> list[dict[str, Any]]:
    need_node()
    need_bubblewrap()
    rollouts = Rollouts(settings)
    try:
        return [await rollouts.run(example_row()) for _ in range(samples)]
    finally:
        await rollouts.close()


def check_nothing_is_lost(answer: dict[str, Any]) -> None:
    """Every trained token is in the envelope exactly once, and the main trace is what NeMo RL's walk consumes."""
    assert answer["mask_sample"] is False, answer["failure_reason"]
    envelope = answer["training_traces"]
    trained = [call_id for trace in envelope["traces"] for call_id in trace["model_call_ids"]]
    check_envelope(envelope, set(trained), answer["response"]["metadata"]["session_id"])
    in_envelope = sum(sum(trace["loss_mask"]) for trace in envelope["traces"])
    assert in_envelope == answer["trainable_tokens"]
    assert answer["sampled_tokens"] == answer["trainable_tokens"] + answer["excluded_tokens"]
    walked = sum(len(sampled) for _, sampled in consumed(answer["response"]["output"]))
    main = answer["response"]["metadata"]["trace_id"]
    assert [walked] == [sum(trace["loss_mask"]) for trace in envelope["traces"] if trace["trace_id"] == main]
    assert answer["consumed_fraction"] == pytest.approx(walked / answer["sampled_tokens"])


async def sample(harness: str, profile: str, engine: str) -> dict[str, Any]:
    settings = AgentSettings(
        polar={
            "harness": {"name": harness, "profile": profile},
            "runtime": "bubblewrap",
            "engine": {"name": engine},
            "rollout": {"timeout_seconds": 200},
        }
    )
    (answer,) = await roll_out(settings)
    assert answer["reward"] == 1.0
    check_nothing_is_lost(answer)
    return answer


@pytest.mark.parametrize("harness", ["claude_code", "codex"])
@pytest.mark.parametrize(("engine", "profile"), [("Delegating", "default"), ("Compacting", "lean")])
async def test_a_sub_agent_and_a_compaction_deliver_every_sampled_token_once_and_stay_in_their_group(
    harness: str, profile: str, engine: str
) -> None:
    """NeMo Gym's own capture delivers one chain of them: measured, 0.75 and 0.35 of the tokens. The chain with most to
    train is the wrong one: it begins as no other sample does, and NeMo RL would give neither an advantage."""
    plain = await sample(harness, profile, "embedded")
    forked = await sample(harness, profile, f"polar_gym.conformance.acting:{engine}")
    assert plain["traces"] == 1
    assert forked["traces"] >= 2
    assert 0 < forked["consumed_fraction"] < plain["consumed_fraction"] == 1
    assert advantages([plain, forked | {"reward": 0.0}]) == pytest.approx([0.7071, -0.7071], abs=1e-4)


async def test_a_row_that_was_cut_off_goes_on_when_it_comes_again(tmp_path: Path) -> None:
    need_node()
    need_bubblewrap()
    settings: dict[str, Any] = {
        "resume": True,
        "polar": {
            "harness": "pi",
            "runtime": "bubblewrap",
            "engine": {"name": "tests.e2e.dying_engine:Dying", "dies_in_call": 2},
            "rollout": {"timeout_seconds": 200, "state": str(tmp_path)},
        },
    }
    run = "import asyncio, json, sys; from polar_gym.nemo.rollouts import AgentSettings, Rollouts; "
    run += "asyncio.run(Rollouts(AgentSettings(**json.loads(sys.argv[1]))).run(json.loads(sys.argv[2])))"
    command = [sys.executable, "-c", run, json.dumps(settings), json.dumps(example_row())]
    killed = await asyncio.to_thread(subprocess.run, command, check=False)
    assert killed.returncode == -signal.SIGKILL
    (journal,) = tmp_path.glob("sessions/*/calls.jsonl")
    recorded = [call for call in read_journal(journal) if call.outcome == "delivered"]
    settings["polar"]["engine"] = "embedded"
    resumed, begun = await roll_out(AgentSettings(**settings), samples=2)
    for answer in (resumed, begun):
        assert answer["reward"] == 1.0
        check_nothing_is_lost(answer)
    assert len(recorded) == 2
    for answer, replayed in ((resumed, recorded), (begun, [])):
        session_id = answer["response"]["metadata"]["session_id"]
        calls = read_journal(tmp_path / "sessions" / f"{session_id}.0" / "calls.jsonl")
        assert [call.call_id for call in calls if call.replayed is not None] == [call.call_id for call in replayed]


async def test_the_policy_is_the_runs_own_vllm(vllm_server: VllmServer) -> None:
    """Two URLs are two replicas: rows take turns, and each session stays on its one."""
    says = [f"<tool_call>\n{SHELL_CALLS['pi']}\n</tool_call>", "All done."]
    async with observed(vllm_server, says) as (one, of_one), observed(vllm_server, says) as (other, of_other):
        settings = AgentSettings(
            policy_base_url=[f"{one}/v1", f"{other}/v1"],
            policy_model_name="policy",
            polar={
                "harness": {"name": "pi", "profile": "lean", "max_output_tokens": 512},
                "runtime": "bubblewrap",
                "rollout": {"timeout_seconds": 200},
            },
        )
        answers = await roll_out(settings, samples=2)
    for answer, replica in zip(answers, (of_one, of_other), strict=True):
        assert answer["reward"] == 0.0
        check_nothing_is_lost(answer)
        walked = consumed(answer["response"]["output"])
        assert [sampled for _, sampled in walked] == [each["choices"][0]["token_ids"] for each in replica]
        assert len(walked) == 2
