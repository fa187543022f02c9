"""Token-in/token-out on a real vLLM, a few random sessions of it: `make show-splice` runs hundreds."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from polar_gym.builders import build_trajectory
from polar_gym.engines.vllm import VllmEngine, VllmOptions
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.schema import BuilderSpec, ModelCall
from tests.e2e.agent import TOOLS
from tests.e2e.guided_engine import OneSeed
from tests.e2e.vllm_server import INSTALL, VllmServer, run_server, trained_model, vllm_python
from tests.show.splice import BOUND, run_sessions
from tests.support.requirements import need
from tests.support.sessions import running_session

SESSIONS = 10
ANSWERS = 8


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
    holdable = on.broken.total() - on.broken["cut"]  # how often the policy is cut inside a tool call is chance
    assert on.spliced > 5 * holdable, "nearly all continuations hold with splicing"
    assert off.spliced == 0
    assert off.broken.total() > off.canonical, "and most break without: the policy drifts"
    assert on.traces / on.calls < off.traces / off.calls

    await it_shows_when_a_token_is_another(agent_server, tmp_path / "on")


async def it_shows_when_a_token_is_another(server: VllmServer, state: Path) -> None:
    """The recomputed logprobs can fail: one other token in the context of an answer, and they are others."""
    journals = sorted((state / "sessions").glob("*/calls.jsonl"))
    call = next(call for journal in journals for call in read_journal(journal) if len(call.response_ids))
    ids = np.concatenate([call.prompt_ids, call.response_ids])
    ids[len(call.prompt_ids) - 20] += 1
    engine = VllmEngine(VllmOptions(url=server.url))
    await engine.start()
    again = await engine.score(ids)
    await engine.close()
    assert np.abs(again[len(call.prompt_ids) :] - call.logprobs).max() > BOUND


@pytest.mark.parametrize("wire", ["chat", "responses", "messages"])
async def test_a_harness_that_wants_one_tool_call_at_a_time_bends_nothing(
    agent_server: VllmServer, tmp_path: Path, wire: str
) -> None:
    """Guards against the grammar by which vLLM keeps to one call: logprobs under it are not the policy's, and the calls
    after the first were hidden from the harness while their ids were trained."""
    engine = OneSeed(VllmOptions(url=agent_server.url))
    async with running_session(engine, tmp_path) as (node, capture):
        received = []
        for engine.seed in range(ANSWERS):
            received.append(await _one_call_at_most(wire, node.url, capture.key))
        differences = np.concatenate([await _differences(engine, call) for call in capture.calls])
    said = [len((call.response or {}).get("tool_calls") or []) for call in capture.calls]
    assert differences.max() < BOUND
    assert received == said
    assert max(said) > 1, "the policy calls several tools at once"
    trajectory = build_trajectory(capture.calls, BuilderSpec(name="prefix_merging"))
    assert trajectory.fidelity.single_tool_call == len(capture.calls) == ANSWERS
    assert trajectory.fidelity.excluded == {}


async def _one_call_at_most(wire: str, url: str, key: str) -> int:
    """How many tool calls the answer has for the harness."""
    words, functions = "List the files.", [tool["function"] for tool in TOOLS]
    sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    if wire == "chat":
        ask: Any = [{"role": "user", "content": words}]
        offered: Any = TOOLS
        answer = await sdk.chat.completions.create(model="m", messages=ask, tools=offered, parallel_tool_calls=False)
        return len(answer.choices[0].message.tool_calls or [])
    if wire == "responses":
        flat: Any = [{"type": "function", "strict": False, **function} for function in functions]
        response = await sdk.responses.create(model="m", input=words, tools=flat, parallel_tool_calls=False)
        return sum(item.type == "function_call" for item in response.output)
    schemas: Any = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
    message = await anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0).messages.create(
        model="m",
        max_tokens=2000,
        messages=[{"role": "user", "content": words}],
        tools=schemas,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    return sum(block.type == "tool_use" for block in message.content)


async def _differences(engine: VllmEngine, call: ModelCall) -> np.ndarray:
    again = await engine.score(np.concatenate([call.prompt_ids, call.response_ids]))
    return np.abs(again[len(call.prompt_ids) :] - call.logprobs)


def test_the_server_tells_of_its_prefix_cache(agent_server: VllmServer) -> None:
    """Guards against a hit rate of nothing: the names of these counters have changed before."""
    with urllib.request.urlopen(f"{agent_server.url}/metrics", timeout=10) as response:
        metrics = response.read().decode()
    assert "\nvllm:prefix_cache_hits_total" in metrics
    assert "\nvllm:prefix_cache_queries_total" in metrics
