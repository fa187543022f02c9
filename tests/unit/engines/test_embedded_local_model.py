"""The embedded engine with a real (tiny, random) model: what is reported is what was sampled from."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_gym.chat import ChatRequest, Delta
from polar_gym.chat.received import Received
from polar_gym.engines import EngineError
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.engines.embedded.decoding import log_distribution
from polar_gym.schema import Message, Sampling, ToolDefinition

MESSAGES: list[Message] = [{"role": "user", "content": "Say something."}]
TOOL: ToolDefinition = {"type": "function", "function": {"name": "x", "parameters": {"type": "object"}}}


@pytest.fixture
async def engine(model_path: Path) -> AsyncIterator[EmbeddedEngine]:
    made = EmbeddedEngine(EmbeddedOptions(policy="transformers", model_path=model_path, device="cpu", dtype="float32"))
    await made.start()
    yield made
    await made.close()


def request(**fields: Any) -> ChatRequest:
    return ChatRequest(model="policy", **{"messages": MESSAGES, "max_tokens": 24, **fields})


async def test_one_forward_pass_gives_back_the_logprobs(engine: EmbeddedEngine, model_path: Path) -> None:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    completion = await engine.chat(request(max_tokens=64), Sampling())
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype="float32")
    trace = np.concatenate([completion.prompt_ids, completion.response_ids]).astype(np.int64)
    with torch.inference_mode():
        logprobs = model(torch.from_numpy(trace)[None]).logits[0].log_softmax(-1)
    start = len(completion.prompt_ids)
    again = [float(logprobs[position - 1, trace[position]]) for position in range(start, len(trace))]
    assert np.abs(np.asarray(again) - completion.logprobs).max() < 1e-4


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=7),
        Sampling(temperature=0.2, top_p=0.8),
        Sampling(temperature=0.7, min_p=0.05, top_k=50, top_p=0.9),
        Sampling(repetition_penalty=1.3, temperature=0.3, top_k=5),
    ],
)
def test_logits_are_processed_as_transformers_does(model_path: Path, sampling: Sampling) -> None:
    torch: Any = importlib.import_module("torch")
    processors: Any = importlib.import_module("transformers").generation.logits_process
    prompt_ids, ids = [0, 5, 6], [7, 7, 8]
    logits = torch.randn(500, generator=torch.Generator().manual_seed(3)) * 3
    expected = logits.clone()[None]
    seen = torch.tensor([[*prompt_ids, *ids]])
    for processor in (
        processors.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        processors.TemperatureLogitsWarper(sampling.temperature),
        *([processors.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []),
        *([processors.TopKLogitsWarper(sampling.top_k)] if sampling.top_k > 0 else []),
        processors.TopPLogitsWarper(sampling.top_p),
    ):
        expected = processor(seen, expected)
    ours = log_distribution(torch, logits, sampling, prompt_ids, ids)
    torch.testing.assert_close(ours, expected[0].log_softmax(-1))
    assert 0 < torch.isfinite(ours).sum() <= 500


def test_penalties_count_sampled_tokens_only(model_path: Path) -> None:
    torch: Any = importlib.import_module("torch")
    logits = torch.zeros(10)
    ours = log_distribution(torch, logits, Sampling(presence_penalty=0.5, frequency_penalty=0.25), [1], [2, 2, 3])
    assert (ours - ours[0]).tolist() == pytest.approx([0, 0, -1.0, -0.75, 0, 0, 0, 0, 0, 0])


async def test_greedy_tokens_are_certain(engine: EmbeddedEngine) -> None:
    first, second = [await engine.chat(request(), Sampling(temperature=0)) for _ in range(2)]
    assert first.response_ids.tolist() == second.response_ids.tolist()
    assert not first.logprobs.any()


async def test_a_seed_fixes_the_answer(engine: EmbeddedEngine) -> None:
    first, again = [await engine.chat(request(), Sampling(seed=1)) for _ in range(2)]
    other = await engine.chat(request(), Sampling(seed=2))
    assert first.response_ids.tolist() == again.response_ids.tolist() != other.response_ids.tolist()
    assert (first.finish_reason, len(first.response_ids)) == ("length", 24)


async def test_stop_strings_end_the_answer_and_cut_only_its_text(engine: EmbeddedEngine) -> None:
    whole = await engine.chat(request(), Sampling(seed=1))
    word = whole.message["content"][10:14]
    stopped = await engine.chat(request(stop=[word]), Sampling(seed=1))
    ids = stopped.response_ids.tolist()
    assert ids == whole.response_ids[: len(ids)].tolist()
    assert len(ids) < len(whole.response_ids)
    assert stopped.message["content"] == whole.message["content"].partition(word)[0]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("fields", [{"max_tokens": 41}, {"max_tokens": 80, "stop": ["e"]}, {"tools": [TOOL]}])
async def test_a_streamed_answer_is_the_same_answer(engine: EmbeddedEngine, fields: dict[str, Any]) -> None:
    whole = await engine.chat(request(**fields), Sampling(seed=2))
    received, told = Received(), 0

    def take(delta: Delta) -> None:
        nonlocal told
        told += bool(delta.content)
        received.add(delta)

    streamed = await engine.chat(request(**fields, stream=True), Sampling(seed=2), take)
    assert received.message() == streamed.message == whole.message
    assert received.response_ids == streamed.response_ids.tolist() == whole.response_ids.tolist()
    assert np.asarray(received.logprobs, np.float32).tolist() == streamed.logprobs.tolist()
    np.testing.assert_allclose(streamed.logprobs, whole.logprobs, atol=1e-5)  # its prompt is in a slot already
    assert streamed.finish_reason == whole.finish_reason
    assert told > ("stop" not in fields), "the text did not come whole at the end"


async def test_the_end_of_turn_is_sampled_and_unspoken(engine: EmbeddedEngine) -> None:
    """A random model ends a turn once in some thousand tokens: with all tokens of the vocabulary alike."""
    completion = await engine.chat(request(max_tokens=30_000), Sampling(temperature=100.0, seed=9))
    assert completion.finish_reason == "stop"
    assert completion.response_ids[-1] == 1
    assert "<|im_end|>" not in completion.message["content"]


async def test_cancelling_stops_the_worker(engine: EmbeddedEngine) -> None:
    """Regression: a hung-up harness must not keep the only worker busy with 30,000 tokens."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await engine.chat(request(max_tokens=None), Sampling(temperature=0))
    async with asyncio.timeout(60):
        await engine.chat(request(max_tokens=1), Sampling())


async def test_context_length_and_refusals(engine: EmbeddedEngine) -> None:
    assert engine.max_model_len == 32_768
    with pytest.raises(EngineError, match=r"tool_choice: .*use engine=vllm"):
        await engine.chat(request(tools=[TOOL], tool_choice="required"), Sampling())


async def test_a_context_beyond_the_positions_of_the_model_is_refused(model_path: Path) -> None:
    """Guards against tokens at positions that the model was never trained on: the harness was told more context."""
    made = EmbeddedEngine(EmbeddedOptions(policy="transformers", model_path=model_path, max_model_len=32_769))
    with pytest.raises(
        EngineError, match=r"engine\.max_model_len=32769: the model has 32768 positions .*set 32768 or less, or null"
    ):
        await made.start()
    await made.close()


async def test_positions_that_the_config_scales_count(model_path: Path, tmp_path: Path) -> None:
    """Guards against the refusal of Qwen's long context, whose config keeps `max_position_embeddings`."""
    directory = shutil.copytree(model_path, tmp_path / "scaled")
    config = json.loads((directory / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768, "rope_theta": 10_000.0}
    (directory / "config.json").write_text(json.dumps({**config, "rope_scaling": yarn, "rope_parameters": yarn}))
    made = EmbeddedEngine(EmbeddedOptions(policy="transformers", model_path=directory, max_model_len=131_072))
    await made.start()
    await made.close()
    assert made.max_model_len == 131_072


async def test_a_model_whose_config_names_no_length_is_loaded(model_path: Path, tmp_path: Path) -> None:
    """Guards against an AttributeError at the start: models such as Bloom have no `max_position_embeddings`."""
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    tokenizer.save_pretrained(tmp_path)
    config = transformers.BloomConfig(vocab_size=len(tokenizer), hidden_size=8, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    made = EmbeddedEngine(EmbeddedOptions(policy="transformers", model_path=tmp_path, device="cpu"))
    await made.start()
    await made.close()
    assert made.max_model_len == 65_536


async def test_a_strict_tool_is_refused_by_its_name(engine: EmbeddedEngine) -> None:
    """The refusal once looked for a field `tools.strict` of the request, and failed."""
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    with pytest.raises(EngineError, match=r"tools\.strict: .*use engine=vllm"):
        await engine.chat(request(tools=[strict]), Sampling())


async def test_tools_and_history_reach_the_models_own_template(engine: EmbeddedEngine) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "x", "arguments": '{"é":  1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "reasoning": "thought", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "result"}]},
    ]
    prompt = (await engine.chat(request(messages=messages, tools=[TOOL], max_tokens=1), Sampling())).prompt_ids
    embedded = EmbeddedEngine(EmbeddedOptions())
    await embedded.start()
    ours = (await embedded.chat(request(messages=messages, tools=[TOOL], max_tokens=1), Sampling())).prompt_ids
    assert prompt.tolist() == ours.tolist()
