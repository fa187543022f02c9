"""A vLLM whose own flags spoil the record: the start probe finds them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest

from polar_gym.builders import build_trajectory
from polar_gym.cli.doctor import diagnose
from polar_gym.engines import EngineError, openai_form
from polar_gym.engines.vllm import VllmEngine, VllmOptions
from polar_gym.schema import BuilderSpec
from tests.e2e.guided_engine import SEEDED
from tests.e2e.vllm_server import INSTALL, VllmServer, run_server, vllm_python
from tests.support.requirements import need
from tests.support.sessions import running_session
from tests.support.tools import ASK, BASH

FLAGS = ("--tool-strict-level", "function", "--logprobs-mode", "processed_logits")


@pytest.fixture(scope="module")
def spoilt_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """One server with both flags: starting one takes most of a minute."""
    python = vllm_python()
    need(python, "a real vLLM", INSTALL)
    assert python is not None
    with run_server(python, tmp_path_factory.mktemp("spoilt"), flags=FLAGS) as server:
        yield server


async def test_logits_in_place_of_logprobs_are_refused_at_the_start(spoilt_server: VllmServer) -> None:
    """Guards against a probe that takes logits for processed logprobs, because they too scale with temperature."""
    engine = VllmEngine(VllmOptions(url=spoilt_server.url))
    with pytest.raises(EngineError, match=r"these are logits.*start it with --logprobs-mode processed_logprobs"):
        await engine.start()


@pytest.mark.parametrize("path", ["chat", "generate"])
async def test_calls_under_the_servers_own_grammar_are_not_trained_on(
    spoilt_server: VllmServer,
    tmp_path: Path,
    path: Literal["chat", "generate"],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards against a grammar of `--tool-strict-level` that shows in no request and in no answer."""
    monkeypatch.setattr(openai_form, "ABOVE_ZERO", math.inf)  # else the server's other flag would end the start
    engine = VllmEngine(VllmOptions(url=spoilt_server.url, path=path))
    async with running_session(engine, tmp_path, SEEDED) as (node, capture):
        assert engine.info.own_grammar == "tools"
        assert "holds every call with tools to a grammar of its own" in caplog.text
        assert "start vLLM without --tool-strict-level function" in caplog.text
        asks: list[dict[str, Any]] = [{"tools": [BASH]}, {"tools": [BASH], "tool_choice": "auto"}, {}]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {capture.key}"}) as http:
            for ask in asks:
                body = {"model": "m", "messages": ASK, "max_tokens": 4, **ask}
                async with http.post(f"{node.url}/v1/chat/completions", json=body) as response:
                    assert response.status == 200, await response.text()
    assert [call.sampling_mismatch for call in capture.calls] == [["own_grammar"], ["own_grammar"], []]
    excluded = build_trajectory(capture.calls, BuilderSpec(name="prefix_merging")).fidelity.excluded
    assert excluded == {"sampling_mismatch": sum(len(call.response_ids) for call in capture.calls[:2])}
    spec = BuilderSpec(name="prefix_merging", train_on_sampling_mismatch=True)
    assert build_trajectory(capture.calls, spec).fidelity.excluded == {}


def test_the_doctor_finds_the_servers_own_grammar(spoilt_server: VllmServer) -> None:
    (check,) = [check for check in diagnose(engine_url=spoilt_server.url) if check.kind == "engine"]
    assert not check.ok
    assert check.found == "serves policy; a grammar of its own for calls with tools"
    assert "--tool-strict-level" in check.fix
