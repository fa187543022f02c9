"""NeMo RL's own HTTP server of vLLM behind our gateway, with a real harness."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from polar_gym.builders.trace import verify_trace
from polar_gym.config.loading import load_config
from polar_gym.gateway.node.assemble import load_tasks, make_node, make_request
from polar_gym.gateway.proxy.journal import read_journal
from tests.e2e.observed_vllm import SHELL_CALLS, check_answered, observed
from tests.e2e.vllm_server import CHECKOUT, TINY_MODEL_SCRIPT, VllmServer
from tests.nemo_rl.vllm_worker import MAX_MODEL_LEN
from tests.support.requirements import need_bubblewrap

pytestmark = pytest.mark.timeout(1800)  # 90 s on an idle machine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmServer, Path]]:
    """The server, in a process of its own, and its model."""
    if importlib.util.find_spec("nemo_rl") is None:
        pytest.skip("NeMo RL is not here; `make nemo-rl NEMO_RL=DIRECTORY` runs this with a checkout of it")
    need_bubblewrap()
    directory = tmp_path_factory.mktemp("vllm")
    model = directory / "model"
    subprocess.run([sys.executable, TINY_MODEL_SCRIPT, model], check=True)
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    read, write = os.pipe()
    with (directory / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.nemo_rl.vllm_worker", model, str(write)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=CHECKOUT,
            env={**os.environ, **settings},
            pass_fds=[write],
            start_new_session=True,
        )
    os.close(write)
    try:
        with os.fdopen(read) as told:
            url = told.read()
        assert url, (directory / "vllm.log").read_text(encoding="utf-8", errors="replace")[-6000:]
        yield VllmServer(url.removesuffix("/v1"), "policy", MAX_MODEL_LEN), model
        process.communicate(timeout=300)  # the end of its input stops the server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("harness", SHELL_CALLS)
async def test_what_is_recorded_is_what_nemo_rls_server_sampled(
    server: tuple[VllmServer, Path], harness: str, tmp_path: Path
) -> None:
    """The second prompt holds the sampled ids of the first answer, which NeMo RL's server put there. A refit in flight
    comes in the middle of the second answer: neither side ends the call, and NeMo RL names no version."""
    vllm, model = server
    says = [f"<tool_call>\n{SHELL_CALLS[harness]}\n</tool_call>", "All done. " * 300]
    refits: list[dict[str, int]] = []

    async def refit(turn: int) -> None:
        if turn == 1:
            async with aiohttp.request("POST", f"{vllm.url}/refit") as response:
                refits.append(await response.json())

    async with observed(vllm, says, in_mid_call=refit) as (url, answers):
        config = load_config(
            None,
            [
                f"harness={harness}",
                "harness.profile=lean",
                "runtime=bubblewrap",
                "engine=vllm",
                f"engine.url={url}",
                "engine.model=policy",
                f"engine.tokenizer={model}",
                "engine.prefix_field=required_prefix_token_ids",
                f"rollout.state={tmp_path}",
                "rollout.timeout_seconds=1200",
                "harness.max_output_tokens=4096",
            ],
        )
        tasks = load_tasks(config)[:1]
        async with make_node(config, tasks) as node:
            episode = await node.rollout(make_request(config, tasks[0]))
    assert episode.session.failure is None, episode.session.failure
    assert refits == [{"found": 1, "left": 1}]
    assert "+hello" in episode.artifacts.diff, "the tool call that vLLM sampled was run"

    calls = read_journal(Path(str(episode.artifacts.journal)))
    assert [call.continuation for call in calls] == ["root", "spliced"], [call.splice_cause for call in calls]
    first, second = calls
    whole = [*first.prompt_ids.tolist(), *first.response_ids.tolist()]
    assert second.prompt_ids[: len(whole)].tolist() == whole
    assert len(calls) == len(answers)
    check_answered(calls, answers)
    for call in calls:
        assert call.weight_versions == [], "NeMo RL's server names no version"
    (trace,) = episode.trajectory.traces
    verify_trace(trace, calls)
    assert episode.trajectory.fidelity.breaks == []
    assert trace.trainable_tokens == sum(len(call.response_ids) for call in calls)
