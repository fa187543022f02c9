"""A GRPO step in plain torch on what the hand-off gives, with a real (tiny) model in the embedded engine."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_gym.chat import ChatRequest
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.schema import Episode, Message, Sampling
from polar_gym.training import make_batch, padded, to_torch
from polar_gym.training.conformance import token_logprobs
from polar_gym.training.nemo_rl import message_log
from tests.support.calls import make_call
from tests.support.episodes import make_episode
from tests.support.tiny_model import write_tiny_model

QUESTIONS = ("Count to three.", "Name a colour.")
SAMPLES = 8
UPDATES = 5
STEPS = 4
"""On each batch: from the second on, the policy is not the one that sampled."""


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not here; `make test` runs these on the interpreter that has it")
    write_tiny_model(tmp_path / "model")
    return tmp_path / "model"


async def roll_out(model_path: Path, update: int) -> list[Episode]:
    """Every question `SAMPLES` times, asked twice: the second call continues the first, or forks off it."""
    engine = EmbeddedEngine(
        EmbeddedOptions(policy="transformers", model_path=model_path, device="cpu", dtype="float32")
    )
    await engine.start()
    try:
        return [
            await _session(engine, question, f"{update}-{question}-{sample}", seed=update * SAMPLES + sample)
            for question in QUESTIONS
            for sample in range(SAMPLES)
        ]
    finally:
        await engine.close()


async def _session(engine: EmbeddedEngine, question: str, session_id: str, seed: int) -> Episode:
    sampling = Sampling(seed=seed)
    messages: list[Message] = [{"role": "user", "content": question}]
    first = await engine.chat(ChatRequest(model="policy", messages=messages, max_tokens=6), sampling)
    messages += [{"role": "assistant", **first.message}, {"role": "user", "content": "Again."}]
    second = await engine.chat(ChatRequest(model="policy", messages=messages, max_tokens=6), sampling)
    calls = [
        make_call(index, done.prompt_ids.tolist(), done.response_ids.tolist(), messages=messages[: 2 * index + 1])
        for index, done in enumerate((first, second))
    ]
    for call, done in zip(calls, (first, second), strict=True):
        call.logprobs = done.logprobs
    sampled = np.concatenate([call.response_ids for call in calls])
    return make_episode(session_id, float((sampled % 2 == 0).mean()), calls, task_id=question)


def test_the_reward_rises(model_path: Path) -> None:
    """The toy task: sample even token ids. All that the step knows of it is in the tensors."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype="float32")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    rewards = []
    for update in range(UPDATES):
        episodes = asyncio.run(roll_out(model_path, update))
        rewards.append(np.mean([float(episode.reward or 0.0) for episode in episodes]))
        batch = make_batch(episodes, scale="std", multiple_of=5)
        assert batch.counts.tokens == sum(episode.trajectory.fidelity.sampled_tokens for episode in episodes)
        tensors = to_torch(padded(batch.rows, pad_id=0))
        for step in range(STEPS):
            change = (
                token_logprobs(model, tensors["input_ids"], tensors["attention_mask"]) - tensors["old_logprobs"]
            ) * tensors["loss_mask"]
            assert step or change.abs().max() < 1e-4, "one forward pass over the rows gives back what was captured"
            ratio, advantages = change.exp(), tensors["advantages"]
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            optimizer.zero_grad()
            (-(tensors["weights"] * gain).sum()).backward()
            optimizer.step()
        model.save_pretrained(model_path)
    assert rewards[-1] > rewards[0] + 0.3, rewards


def test_one_step_raises_the_probability_of_what_was_rewarded(model_path: Path) -> None:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype="float32")
    episodes = asyncio.run(roll_out(model_path, 0))
    tensors = to_torch(padded(make_batch(episodes).rows, pad_id=0))

    def surrogate() -> Any:
        ratio = (token_logprobs(model, tensors["input_ids"], tensors["attention_mask"]) - tensors["old_logprobs"]).exp()
        return (tensors["weights"] * tensors["advantages"] * ratio).sum()

    before = surrogate()
    (-before).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-3 * parameter.grad
    assert surrogate() > before


def test_message_logs_are_what_nemo_rl_concatenates(model_path: Path) -> None:
    torch: Any = importlib.import_module("torch")
    (row,) = make_batch([make_episode("a", 1.0, [make_call(0, [1, 2], [3, 4])])]).rows
    log = to_torch(message_log(row))
    assert torch.cat([message["token_ids"] for message in log]).tolist() == [1, 2, 3, 4]
    assert log[0]["token_ids"].dtype == torch.int64
    assert log[1]["generation_logprobs"].dtype == torch.float32
