"""Weights that change while a real vLLM decodes: each token, in record and trace, names those that sampled it."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import numpy as np
import pytest

from polar_gym.builders import build_trajectory
from polar_gym.engines.vllm import VllmEngine, VllmOptions
from polar_gym.gateway.node.node import Node
from polar_gym.schema import BuilderSpec, ModelCall
from tests.e2e.guided_engine import SEEDED
from tests.e2e.vllm_server import TINY_MODEL_SCRIPT, VllmServer, vllm_python
from tests.e2e.vllm_work import LONG_MESSAGE, EndlessEngine, sampled_tokens, slow_engine, wait_until
from tests.support.sessions import running_session

OTHER_WEIGHTS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from tiny_model import tiny_model, tiny_tokenizer
torch.manual_seed(1)
tokenizer = tiny_tokenizer()
tiny_model(tokenizer, hidden_size=64, intermediate_size=128, initializer_range=0.2).save_pretrained(sys.argv[2])
"""
LONG = 2_000
"""Many times what is sampled until the update."""
BEGUN = 20


@pytest.fixture(scope="module")
def other_weights(vllm_server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights") / "other"
    arguments = [vllm_python(), "-c", OTHER_WEIGHTS, TINY_MODEL_SCRIPT.parent, directory]
    subprocess.run([str(argument) for argument in arguments], check=True, timeout=600)
    return directory


class Trainer:
    """What a trainer does to a vLLM with VLLM_SERVER_DEV_MODE=1."""

    def __init__(self, url: str, http: aiohttp.ClientSession, node: Node) -> None:
        self._url, self._http, self._node = url, http, node

    async def pause_once_sampled(self, tokens: float) -> None:
        """Pause where vLLM has sampled at least so many tokens since it was started."""
        await asyncio.to_thread(wait_until, lambda: sampled_tokens(self._url) >= tokens)
        await self._post("/pause?mode=keep")

    async def update(self, weights: Path, version: str) -> None:
        await self._node.set_weights(weights, version)

    async def _post(self, path: str) -> None:
        async with self._http.post(self._url + path) as response:
            assert response.status == 200, (path, await response.text())


@asynccontextmanager
async def trainer(server: VllmServer, node: Node) -> AsyncIterator[Trainer]:
    """The server is shared: it gets its own weights back."""
    async with aiohttp.ClientSession() as http:
        made = Trainer(server.url, http, node)
        try:
            yield made
        finally:
            await made.pause_once_sampled(0)
            await made.update(Path(str(node.engine.info.tokenizer)), "default")


async def update_during_a_call(
    engine: VllmEngine, server: VllmServer, weights: Path, directory: Path
) -> list[ModelCall]:
    """A short call, and one that continues it, in the middle of which the weights change.

    A third one, which is not returned, goes on under the new weights alone: guards against a prefix in the server's
    cache that other weights computed."""
    async with (
        running_session(engine, directory, SEEDED) as (node, capture),
        trainer(server, node) as training,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {capture.key}"}) as http,
    ):

        async def ask(messages: list[Any], max_tokens: int) -> Any:
            body = {"model": "m", "messages": messages, "max_tokens": max_tokens}
            async with http.post(f"{node.url}/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                return (await response.json())["choices"][0]["message"]

        first = await ask([LONG_MESSAGE], 8)
        before = await asyncio.to_thread(sampled_tokens, server.url)
        with slow_engine(server.url):
            second = asyncio.create_task(ask([LONG_MESSAGE, first, {"role": "user", "content": "Go on."}], LONG))
            await training.pause_once_sampled(before + BEGUN)
        await training.update(weights, "2")
        turns = [LONG_MESSAGE, first, {"role": "user", "content": "Go on."}, await second]
        again = await engine.score(np.concatenate([capture.calls[1].prompt_ids, capture.calls[1].response_ids]))
        await ask([*turns, {"role": "user", "content": "Go on."}], 8)
        third = capture.calls[2]
        scored = await engine.score(np.concatenate([third.prompt_ids, third.response_ids]))
    assert np.abs(scored[len(third.prompt_ids) :] - third.logprobs).max() < 1e-3
    calls = capture.calls[:2]
    assert [call.continuation for call in calls] == ["root", "spliced"]
    start = len(calls[1].prompt_ids)
    assert np.abs(again[start : start + BEGUN] - calls[1].logprobs[:BEGUN]).mean() > 0.1, "the weights are other ones"
    return calls


async def test_an_update_in_the_middle_of_a_call_is_two_spans(
    vllm_server: VllmServer, other_weights: Path, tmp_path: Path
) -> None:
    options = VllmOptions(url=vllm_server.url, path="generate", chat_template_kwargs={"enable_thinking": False})
    calls = await update_during_a_call(EndlessEngine(options), vllm_server, other_weights, tmp_path)
    assert [(span.version, span.start, span.end) for span in calls[0].weight_versions] == [("default", 0, 8)]
    assert len(calls[1].weight_versions) == 2, calls[1].weight_versions
    old, new = calls[1].weight_versions
    assert (old.version, old.start, new.version, new.end) == ("default", 0, "2", LONG)
    assert BEGUN <= old.end == new.start < LONG
    assert (old.older_cache, new.older_cache) == (False, True)
    assert (old.engine_version, new.engine_version) == ("default", "2")
    (trace,) = build_trajectory(calls, BuilderSpec(name="prefix_merging")).traces
    offset = len(calls[1].prompt_ids) - len(calls[0].prompt_ids)
    spans = [(span.version, span.start, span.end, span.estimated) for span in trace.weight_versions]
    assert spans == [
        ("default", 0, 8, False),
        ("default", offset, offset + old.end, True),
        ("2", offset + old.end, offset + LONG, False),
    ]
    assert trace.response_ids[offset : offset + LONG].tolist() == calls[1].response_ids.tolist()


@pytest.mark.parametrize("path", ["chat", "generate"])
async def test_the_version_that_a_trainer_sets_counts_and_not_the_engines_label(
    path: Literal["chat", "generate"], vllm_server: VllmServer, tmp_path: Path
) -> None:
    """Guards against spans that say `default` after a trainer that updated the weights without telling vLLM a label."""
    engine = VllmEngine(VllmOptions(url=vllm_server.url, path=path))
    async with (
        running_session(engine, tmp_path, SEEDED) as (node, capture),
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {capture.key}"}) as http,
    ):
        for version in ("A", "B"):
            node.set_weight_version(version)
            body = {"model": "m", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
            async with http.post(f"{node.url}/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
    spans = [span for call in capture.calls for span in call.weight_versions]
    assert [(span.version, span.estimated) for span in spans] == [("A", True), ("B", True)]
    assert {span.engine_version for span in spans} == {"default" if path == "generate" else None}
