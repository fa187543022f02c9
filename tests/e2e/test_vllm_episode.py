"""Episodes of the real harnesses on the real vLLM: what is recorded is what the engine returned."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_gym.builders.trace import verify_trace
from polar_gym.config.loading import load_config
from polar_gym.gateway.node.assemble import load_tasks, make_node, make_request
from polar_gym.gateway.proxy.journal import read_journal
from tests.e2e.observed_vllm import SHELL_CALLS, check_answered, observed
from tests.e2e.vllm_server import VllmServer
from tests.support.requirements import need_bubblewrap


@pytest.mark.parametrize("harness", SHELL_CALLS)
async def test_what_is_recorded_is_what_vllm_returned(vllm_server: VllmServer, harness: str, tmp_path: Path) -> None:
    need_bubblewrap()
    says = [f"<tool_call>\n{SHELL_CALLS[harness]}\n</tool_call>", "All done."]
    async with observed(vllm_server, says) as (url, answers):
        config = load_config(
            None,
            [
                f"harness={harness}",
                "harness.profile=lean",
                "runtime=bubblewrap",
                "engine=vllm",
                f"engine.url={url}",
                f"rollout.state={tmp_path}",
                "rollout.timeout_seconds=200",
                "harness.max_output_tokens=512",
            ],
        )
        tasks = load_tasks(config)[:1]
        async with make_node(config, tasks) as node:
            episode = await node.rollout(make_request(config, tasks[0]))
    assert episode.session.failure is None, episode.session.failure
    assert "+hello" in episode.artifacts.diff, "the tool call that vLLM sampled was run"

    calls = read_journal(Path(str(episode.artifacts.journal)))
    assert len(calls) == len(answers) == 2
    assert [call.continuation for call in calls] == ["root", "spliced"], [call.splice_cause for call in calls]
    assert len(episode.trajectory.traces) == 1
    check_answered(calls, answers)
    assert [call.finish_reason for call in calls] == [answer["choices"][0]["finish_reason"] for answer in answers]
    sampled = sum(len(answer["choices"][0]["token_ids"]) for answer in answers)
    assert episode.trajectory.fidelity.sampled_tokens == episode.trajectory.fidelity.trainable_tokens == sampled
    trained: list[int] = []
    for trace in episode.trajectory.traces:
        verify_trace(trace, calls)
        trained += trace.response_ids[trace.loss_mask == 1].tolist()
    assert sorted(trained) == sorted(token for call in calls for token in call.response_ids.tolist())
