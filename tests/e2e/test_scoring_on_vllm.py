"""Calls are scored again by a real vLLM while their session runs."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from polar_gym.config.run_config import ScoringConfig
from polar_gym.engines.vllm import VllmOptions
from polar_gym.schema import Score
from tests.e2e.agent import TOOLS
from tests.e2e.guided_engine import OneSeed
from tests.e2e.observed_vllm import observed
from tests.e2e.vllm_server import VllmServer
from tests.support.sessions import running_session

SETTINGS = ScoringConfig(share=0.0)
"""Only the first call after the start is scored."""
SAYS = "The quick brown fox jumps over the lazy dog, and the dog sleeps on in the warm sun of a long afternoon."


async def score_of_a_call(url: str, directory: Path) -> tuple[Score, str | None]:
    """Make one call with tools; return its score, and why the call would mask its episode."""
    engine = OneSeed(VllmOptions(url=url))  # by chance, an answer is too short to be scored
    async with running_session(engine, directory, scoring=SETTINGS) as (node, capture), aiohttp.ClientSession() as http:
        said = {"role": "user", "content": "What does the fox do?"}
        body = {"model": "policy", "messages": [said], "tools": TOOLS, "max_tokens": 64}
        headers = {"Authorization": f"Bearer {capture.key}"}
        async with http.post(f"{node.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
        await capture.end_passes()
        (call,) = capture.calls
        (score,) = call.scores
        return score, capture.scoring.mismatch([score])


@pytest.mark.timeout(600)
async def test_a_call_that_vllm_sampled_freely_scores_as_captured(vllm_server: VllmServer, tmp_path: Path) -> None:
    score, mismatch = await score_of_a_call(vllm_server.url, tmp_path)
    assert (score.by, score.problem, mismatch) == ("engine", None, None)
    assert score.tokens >= 16
    assert score.max_abs < 1e-3


@pytest.mark.timeout(600)
async def test_a_call_under_a_grammar_that_the_gateway_does_not_see_masks(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    """Guards against training on the logprobs of a grammar that a server or a router in between applies unasked."""
    async with observed(vllm_server, [SAYS]) as (url, _):
        score, mismatch = await score_of_a_call(url, tmp_path)
    assert score.problem is None
    assert score.mean_abs > 1.0
    assert mismatch is not None
