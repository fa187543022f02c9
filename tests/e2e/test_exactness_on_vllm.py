"""The auditor's short form on the real vLLM: clean sessions break no law, and a forward pass gives their logprobs."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from tests.e2e.vllm_server import VllmServer, vllm_python
from tests.exactness.clients import clean_sessions
from tests.exactness.scoring import score
from tests.exactness.stage import staged


async def test_a_forward_pass_gives_each_trained_token_its_logprob(vllm_server: VllmServer, tmp_path: Path) -> None:
    python = vllm_python()
    assert python is not None
    async with staged(vllm_server.url, tmp_path) as stage:
        await clean_sessions(stage)
        async with aiohttp.ClientSession() as http, http.get(f"{vllm_server.url}/v1/models") as response:
            model = Path((await response.json())["data"][0]["root"])
        breaches, _ = stage.check()
        assert {law: found for law, found in breaches.items() if found} == {}
        scores = score(stage.books(), python, model)
    assert scores.breaches == []
    assert scores.tokens > 100
