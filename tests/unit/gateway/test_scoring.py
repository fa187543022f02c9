"""Online scoring with a real (tiny, random) model: what it takes for right, and what it notices."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polar_gym.chat import ChatRequest, Completion, OnDelta
from polar_gym.config.run_config import ScoringConfig
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.gateway.node.node import Node
from polar_gym.schema import Episode, PluginSpec, Sampling
from tests.support.sessions import REQUEST
from tests.support.tiny_model import tiny_model, tiny_tokenizer, write_tiny_model

SEEDED = REQUEST.model_copy(update={"sampling": Sampling(seed=7)})
"""An answer of fewer than 16 tokens, which a random model gives by chance, is not scored."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models that differ in their weights only."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not here; `make test` runs these on the interpreter that has it")
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    write_tiny_model(first)
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(1)
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, hidden_size=64, intermediate_size=128, initializer_range=0.2).save_pretrained(second)
    tokenizer.save_pretrained(second)
    return first, second


def options(path: Path) -> dict[str, Any]:
    return {"policy": "transformers", "model_path": path, "device": "cpu", "dtype": "float32"}


class HalfTemperature(EmbeddedEngine):
    """Samples at half the temperature that it is asked for, as a server with a default of its own may."""

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        cold = sampling.model_copy(update={"temperature": sampling.temperature / 2})
        completion = await super().chat(request, cold, on_delta)
        return replace(completion, sampling=completion.sampling | {"temperature": sampling.temperature})


async def episode_of(engine: EmbeddedEngine, directory: Path, reference: Path | None = None) -> Episode:
    """Return the episode of a session with one call."""
    spec = PluginSpec(**{"name": "embedded", **options(reference)}) if reference else None
    node = Node(engine, cache=directory / "cache", scoring=ScoringConfig(share=0, reference=spec))
    async with node, node.session(SEEDED) as life, aiohttp.ClientSession() as http:
        life.capture.running = True
        body = {"model": "m", "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 48}
        headers = {"Authorization": f"Bearer {life.capture.key}"}
        async with http.post(f"{node.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
        return await life.finish(None)


async def test_a_second_pass_gives_the_logprobs_of_an_honest_engine(models: tuple[Path, Path], tmp_path: Path) -> None:
    engine = EmbeddedEngine(EmbeddedOptions(**options(models[0])))
    episode = await episode_of(engine, tmp_path, reference=models[0])
    fidelity = episode.trajectory.fidelity
    assert [(score.by, score.problem) for score in fidelity.scores] == [("engine", None), ("reference", None)]
    assert [score.tokens for score in fidelity.scores] == [fidelity.sampled_tokens] * 2
    assert max(score.max_abs for score in fidelity.scores) < 1e-4
    assert episode.session.failure is None


async def test_logprobs_of_another_temperature_mask_the_episode(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Guards against training on logprobs of a distribution that the record does not name."""
    episode = await episode_of(HalfTemperature(EmbeddedOptions(**options(models[0]))), tmp_path)
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "logprobs_mismatch"
    assert "those that the engine computes" in episode.session.failure.message


async def test_weights_that_are_not_the_trainers_mask_the_episode(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Guards against an update that the engine applied wrongly: its own second pass agrees with the first."""
    episode = await episode_of(EmbeddedEngine(EmbeddedOptions(**options(models[0]))), tmp_path, reference=models[1])
    own, reference = episode.trajectory.fidelity.scores
    assert own.max_abs < 1e-4 < 0.2 < reference.mean_abs
    assert episode.session.failure is not None
    assert "those that the reference computes" in episode.session.failure.message
