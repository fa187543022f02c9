"""The embedded engine with tiny mixture-of-experts models: what is recorded of the sampler's choices, and repeated."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from polar_gym.chat import ChatRequest
from polar_gym.engines import EngineError, Replay
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.schema import ReplayRecord, Sampling
from tests.support.tiny_model import write_tiny_model, write_tiny_moe

BOTH: list[ReplayRecord] = ["routed_experts", "sampling_mask"]
CUT = Sampling(temperature=0.8, top_p=0.95, seed=3)


def model(directory: Path, family: str | None, **more: Any) -> Path:
    """A tiny model of a family of `MOE`, with `more` fields of its config; None: a dense one."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not here; `make test` runs these on the interpreter that has it")
    if family is None:
        write_tiny_model(directory)
    else:
        write_tiny_moe(directory, family, **more)
    return directory


def engine_of(path: Path, *record: ReplayRecord) -> EmbeddedEngine:
    options = EmbeddedOptions(
        policy="transformers", model_path=path, device="cpu", dtype="float32", record=list(record)
    )
    return EmbeddedEngine(options)


@pytest.fixture(scope="module", params=["Qwen3Moe", "Mixtral"])
def model_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture
async def engine(model_path: Path) -> AsyncIterator[EmbeddedEngine]:
    made = engine_of(model_path, *BOTH)
    await made.start()
    yield made
    await made.close()


def request(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "Say something."}]
    return ChatRequest(model="policy", **{"messages": messages, "max_tokens": 24, **fields})


async def test_an_answer_holds_the_choices_of_its_sampler(engine: EmbeddedEngine, model_path: Path) -> None:
    """The experts are those of transformers' own record of one pass over the whole sequence."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    assert engine.info.records == BOTH
    answer = await engine.chat(request(), CUT)
    ids = np.concatenate([answer.prompt_ids, answer.response_ids])
    assert answer.routed_experts is not None
    assert (answer.routed_experts.dtype, answer.routed_experts.shape) == (np.uint8, (len(ids) - 1, 2, 2))
    own = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype="float32")
    with torch.inference_mode():
        logits = own(torch.from_numpy(ids.astype(np.int64))[None], output_router_logits=True).router_logits
    expected = torch.stack(logits, 1).topk(2).indices[:-1]
    assert answer.routed_experts.tolist() == expected.tolist()
    assert answer.sampling_mask is not None
    sets = answer.sampling_mask.sets()
    assert len(sets) == 24
    assert all(token in kept for token, kept in zip(answer.response_ids, sets, strict=True))
    assert {len(kept) for kept in sets} != {0}
    assert max(map(len, sets)) < 4096


async def test_only_new_and_wanted_choices_are_told(engine: EmbeddedEngine, model_path: Path) -> None:
    whole = await engine.chat(request(), Sampling(seed=1))
    assert whole.routed_experts is not None
    assert whole.sampling_mask is None, "nothing was cut"
    rest = await engine.chat(request(prompt_ids=whole.prompt_ids, routed_positions=9), Sampling(seed=1))
    assert rest.routed_experts is not None
    assert rest.routed_experts.tolist() == whole.routed_experts[9:].tolist()
    plain = engine_of(model_path)
    await plain.start()
    answer = await plain.chat(request(), CUT)
    await plain.close()
    assert (plain.info.records, answer.routed_experts, answer.sampling_mask) == ([], None, None)


@pytest.mark.parametrize("sampling", [CUT, Sampling(temperature=1.3, top_k=7), Sampling(min_p=0.1), Sampling()])
async def test_one_pass_with_the_same_choices_gives_back_the_logprobs(
    engine: EmbeddedEngine, sampling: Sampling
) -> None:
    answer = await engine.chat(request(), sampling)
    ids, start = np.concatenate([answer.prompt_ids, answer.response_ids]), len(answer.prompt_ids)
    replay = Replay.neutral(len(ids))
    replay.routed_experts = answer.routed_experts
    replay.temperature[start:] = sampling.temperature
    if answer.sampling_mask is not None:
        replay.kept[start:] = answer.sampling_mask.sets()
    again = await engine.replay(ids, replay)
    assert np.isnan(again[0])
    assert np.abs(again[start:] - answer.logprobs).max() < 1e-4


async def test_answers_sampled_together_have_their_own_choices(tmp_path: Path) -> None:
    """Guards against the choices of several passes in one step taken for those of one pass: a model with a sliding
    window has no slots, and each of its answers has a pass for itself."""
    engine = engine_of(model(tmp_path, "Mixtral", sliding_window=8), *BOTH)
    await engine.start()
    seeds = [Sampling(seed=seed) for seed in range(4)]
    alone = [await engine.chat(request(), sampling) for sampling in seeds]
    together = await asyncio.gather(*(engine.chat(request(), sampling) for sampling in seeds))
    await engine.close()
    for expected, answer in zip(alone, together, strict=True):
        assert answer.response_ids.tolist() == expected.response_ids.tolist()
        assert answer.routed_experts is not None
        assert expected.routed_experts is not None
        assert answer.routed_experts.tolist() == expected.routed_experts.tolist()


async def test_choices_of_another_model_are_refused(engine: EmbeddedEngine, tmp_path: Path) -> None:
    ids = np.arange(8, 16, dtype=np.int32)
    for shape, number, told in (((7, 3, 2), 0, "of 3 layers, 2 for each"), ((7, 2, 2), 99, "from 0 to 99")):
        replay = Replay.neutral(len(ids))
        replay.routed_experts = np.full(shape, number, np.uint8)
        with pytest.raises(EngineError, match=f"{told}.*has 2 MoE layers, each of which chooses 2 of [48] experts"):
            await engine.replay(ids, replay)
    replay = Replay.neutral(len(ids))
    replay.kept[5] = np.asarray([7, 4096], np.int32)
    with pytest.raises(EngineError, match="its 4096 tokens do not include token 4096"):
        await engine.replay(ids, replay)
    dense = engine_of(model(tmp_path, None))
    await dense.start()
    replay = Replay.neutral(len(ids))
    replay.routed_experts = np.zeros((7, 2, 2), np.uint8)
    with pytest.raises(EngineError, match=r"routed experts of a trace: .*Qwen3ForCausalLM has no MoE layers"):
        await dense.replay(ids, replay)
    await dense.close()


@pytest.mark.parametrize(
    ("family", "told"),
    [(None, "Qwen3ForCausalLM has no MoE layers"), ("Phimoe", "made 0 choices by torch.topk among 4")],
)
async def test_a_model_whose_routers_cannot_be_read_is_refused(tmp_path: Path, family: str | None, told: str) -> None:
    engine = engine_of(model(tmp_path, family), "routed_experts")
    with pytest.raises(EngineError, match=rf"engine\.record=routed_experts: engine\.model_path={tmp_path}: .*{told}"):
        await engine.start()


def test_a_script_has_nothing_to_record() -> None:
    with pytest.raises(ValidationError, match=r"engine\.record=\['sampling_mask'\]: a script .*policy=transformers"):
        EmbeddedOptions(record=["sampling_mask"])
