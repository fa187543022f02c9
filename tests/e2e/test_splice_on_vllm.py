"""Token-in/token-out on a real vLLM, a few random sessions of it: `make show-splice` runs hundreds."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polar_gym.gateway.journal import read_journal
from polar_gym.inference.vllm import VllmEngine, VllmOptions
from tests.e2e.splice_sessions import BOUND, run_sessions
from tests.e2e.vllm_server import INSTALL, VllmServer, run_server, trained_model, vllm_python
from tests.requirements import need

SESSIONS = 10


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """vLLM with the model that speaks like an agent."""
    python = vllm_python()
    need(python, "a real vLLM", INSTALL)
    assert python is not None
    with run_server(python, tmp_path_factory.mktemp("agent"), trained_model(python)) as server:
        yield server


@pytest.mark.timeout(600)
async def test_the_laws_hold_with_splicing_and_without(agent_server: VllmServer, tmp_path: Path) -> None:
    on = await run_sessions(agent_server, SESSIONS, splice=True, state=tmp_path / "on")
    off = await run_sessions(agent_server, SESSIONS, splice=False, state=tmp_path / "off")
    for outcome in (on, off):
        assert outcome.violations == []
        assert outcome.seen["answers with a tool call"] > SESSIONS, "the policy calls tools"
        assert outcome.seen["answers with reasoning"] > SESSIONS
        differences = np.concatenate(outcome.differences)
        assert len(differences) == outcome.trainable > 1000
        assert differences.max() < BOUND
    assert on.spliced > 5 * on.broken.total(), "nearly all continuations hold with splicing"
    assert off.spliced == 0
    assert off.broken.total() > off.canonical, "and most break without: the policy drifts"
    assert on.traces / on.calls < off.traces / off.calls

    await it_shows_when_a_token_is_another(agent_server, tmp_path / "on")


async def it_shows_when_a_token_is_another(server: VllmServer, state: Path) -> None:
    """The recomputed logprobs can fail: one other token in the context of an answer, and they are others."""
    (call, *_) = read_journal(next((state / "sessions").glob("*/calls.jsonl")))
    ids = np.concatenate([call.prompt_ids, call.response_ids])
    ids[len(call.prompt_ids) - 20] += 1
    engine = VllmEngine(VllmOptions(url=server.url))
    await engine.start()
    again = await engine.score(ids)
    await engine.close()
    assert np.abs(again[len(call.prompt_ids) :] - call.logprobs).max() > BOUND


def test_the_server_tells_of_its_prefix_cache(agent_server: VllmServer) -> None:
    """Guards against a hit rate of nothing: the names of these counters have changed before."""
    with urllib.request.urlopen(f"{agent_server.url}/metrics", timeout=10) as response:
        metrics = response.read().decode()
    assert "\nvllm:prefix_cache_hits_total" in metrics
    assert "\nvllm:prefix_cache_queries_total" in metrics
