"""Several answers at once, slots that outlive an answer, and weights that change while answers are sampled."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_gym.chat import ChatRequest, Completion, Delta
from polar_gym.engines import EngineError, Updating
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.engines.embedded.slots import Separate, Slots, caches
from polar_gym.schema import Sampling

SLOTS = 3
WORDS = ("one", "two words", "three words here", "a few more words than that, for another length")


@pytest.fixture
async def engine(model_path: Path) -> AsyncIterator[EmbeddedEngine]:
    made = EmbeddedEngine(EmbeddedOptions(policy="transformers", model_path=model_path, device="cpu", slots=SLOTS))
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def model(model_path: Path) -> Any:
    transformers: Any = importlib.import_module("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(model_path).eval()


def request(words: str, max_tokens: int = 24) -> ChatRequest:
    return ChatRequest(model="policy", messages=[{"role": "user", "content": words}], max_tokens=max_tokens)


async def begun(
    engine: EmbeddedEngine, requests: Sequence[ChatRequest], sampling: Sampling
) -> list[asyncio.Task[Completion]]:
    """Return calls that are being sampled, one for each request."""
    began = [asyncio.Event() for _ in requests]
    calls = [
        asyncio.create_task(engine.chat(request, sampling, lambda _, each=each: each.set()))
        for request, each in zip(requests, began, strict=True)
    ]
    for each in began:
        await each.wait()
    return calls


async def calls_in_all_slots(engine: EmbeddedEngine) -> list[asyncio.Task[Completion]]:
    """Return calls that are being sampled, one for each slot."""
    return await begun(engine, [request("go on", 20_000)] * SLOTS, Sampling())


def weights(model: Any) -> dict[str, Any]:
    """Return other weights of the same model."""
    return {name: tensor * 1.1 for name, tensor in model.state_dict().items()}


def logprobs(model: Any, state: dict[str, Any], ids: np.ndarray) -> np.ndarray:
    """Return the logprob of each id but the first, from one pass with these weights."""
    torch: Any = importlib.import_module("torch")
    model.load_state_dict(state)
    tokens = torch.tensor(ids.tolist())
    with torch.inference_mode():
        scores = model(input_ids=tokens[None]).logits[0, :-1].float().log_softmax(-1)
    return scores.gather(-1, tokens[1:, None])[:, 0].numpy()


def same(one: Completion, other: Completion) -> None:
    assert one.response_ids.tolist() == other.response_ids.tolist()
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


async def test_answers_that_are_sampled_together_are_those_sampled_alone(engine: EmbeddedEngine) -> None:
    """There are more answers than slots: some wait for another's slot."""
    work = [(request(words, 10 + 7 * seed), Sampling(seed=seed)) for seed, words in enumerate(WORDS * 2)]
    together = await asyncio.gather(*(engine.chat(*each) for each in work))
    for each, found in zip(work, together, strict=True):
        same(await engine.chat(*each), found)


@pytest.mark.parametrize("kind", [Slots, Separate])
def test_a_step_for_several_is_a_pass_over_each(model: Any, kind: type[Any]) -> None:
    torch: Any = importlib.import_module("torch")
    caches = Slots(torch, model, 3) if kind is Slots else Separate(torch, model)
    sequences = [[5, 6, 7], list(range(20, 320)), [9]]
    with torch.inference_mode():
        slots = [caches.begin(ids, len(ids))[0] for ids in sequences]
        for tokens in ([11, 12, 13], [14, 15, 16]):
            logits = caches.step(slots, tokens)
            for ids, token in zip(sequences, tokens, strict=True):
                ids.append(token)
        whole = [model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in sequences]
    torch.testing.assert_close(logits, torch.stack(whole), atol=1e-4, rtol=0)


def test_a_prompt_takes_what_a_slot_knows_of_it(model: Any) -> None:
    torch: Any = importlib.import_module("torch")
    caches = Slots(torch, model, 2)
    with torch.inference_mode():
        first, known, _ = caches.begin([1, 2, 3, 4], 99)
        assert known == 0
        caches.step([first], [5])
        caches.end(first)
        slot, known, logits = caches.begin([1, 2, 3, 4, 5, 6], 99)  # the conversation goes on
        assert (slot, known) == (first, 5)
        torch.testing.assert_close(logits, model(input_ids=torch.tensor([[1, 2, 3, 4, 5, 6]])).logits[0, -1])
        other, known, logits = caches.begin([1, 2, 9], 99)  # another one begins alike, while the first is sampled
        assert (other == slot, known) == (False, 2)
        torch.testing.assert_close(logits, model(input_ids=torch.tensor([[1, 2, 9]])).logits[0, -1])
        caches.end(other)
        assert caches.begin([1, 2, 9], 99)[1] == 2, "the last id of a prompt is always run"
        caches.end(other)
        assert caches.begin([1, 2, 9, 9], 1)[1] == 1
        caches.forget()
        caches.end(other)
        assert caches.begin([1, 2, 9, 9], 99)[1] == 0


@pytest.mark.parametrize("as_directory", [False, True])
async def test_new_weights_sample_from_the_next_token_on(
    engine: EmbeddedEngine, model: Any, tmp_path: Path, as_directory: bool
) -> None:
    """No token of the second span may be sampled from keys and values of the old weights."""
    assert isinstance(engine, Updating)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new = weights(model)
    model.load_state_dict(new)
    model.save_pretrained(tmp_path)
    calls = await begun(engine, [request(words, 1000) for words in WORDS[:2]], Sampling(seed=1))
    await engine.set_weights(tmp_path if as_directory else new, "v1")
    for done in await asyncio.gather(*calls):
        first, second = done.weight_versions
        assert (first.version, first.start, first.end) == ("initial", 0, second.start)
        assert (second.version, second.end) == ("v1", len(done.response_ids))
        ids = np.concatenate([done.prompt_ids, done.response_ids])
        for span, state in ((first, old), (second, new)):
            own = logprobs(model, state, ids)[len(done.prompt_ids) - 1 :]
            np.testing.assert_allclose(done.logprobs[span.start : span.end], own[span.start : span.end], atol=1e-4)
    again = await engine.chat(request(WORDS[0]), Sampling())
    assert [span.version for span in again.weight_versions] == ["v1"]


async def test_after_an_update_that_was_cancelled_the_weights_have_no_old_name(engine: EmbeddedEngine) -> None:
    """Guards against tokens of new weights under the name of the old ones: Ctrl-C ends the waiting for an update, and
    not the update."""
    reading, release = threading.Event(), threading.Event()

    class Slow(dict[str, Any]):
        def items(self) -> Any:
            reading.set()
            release.wait()
            return super().items()

    model: Any = engine._policy._model  # type: ignore[attr-defined]
    updating = asyncio.create_task(engine.set_weights(Slow(weights(model)), "v1"))
    await asyncio.to_thread(reading.wait)
    updating.cancel()
    await asyncio.wait([updating])
    release.set()
    done = await engine.chat(request(WORDS[0]), Sampling())
    assert [span.version for span in done.weight_versions] == ["v1"], "the policy went on with the update"
    assert engine.weight_version == "unknown (the update to v1 failed)"


async def test_the_weights_of_another_model_are_refused(engine: EmbeddedEngine, model: Any) -> None:
    with pytest.raises(EngineError, match="the weights are not this model's"):
        await engine.set_weights({}, "v1")
    scripted = EmbeddedEngine(EmbeddedOptions())
    with pytest.raises(EngineError, match=r"engine\.policy=scripted has no weights"):
        await scripted.set_weights(model.state_dict(), "v1")


async def test_an_engine_that_is_closed_ends_its_calls(engine: EmbeddedEngine) -> None:
    began = asyncio.Event()

    def told(delta: Delta) -> None:
        began.set()

    call = asyncio.create_task(engine.chat(request("go on", 100_000), Sampling(), told))
    await began.wait()
    await engine.close()
    with pytest.raises(EngineError, match="the engine was closed"):
        await call


async def test_a_failing_pass_fails_its_own_answers_only(engine: EmbeddedEngine) -> None:
    model: Any = engine._policy._model  # type: ignore[attr-defined]

    for earlier in (0, 1):  # the prompt fails, or the step after it
        calls = count()

        def fail(*_: Any, earlier: int = earlier, calls: count[int] = calls) -> None:
            if next(calls) == earlier:
                raise RuntimeError("no memory")

        hook = model.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no memory"):
            await engine.chat(request("a"), Sampling(seed=1))
        hook.remove()
    assert len((await engine.chat(request("a", 3), Sampling(seed=1))).response_ids) > 0


async def test_a_prompt_that_failed_leaves_no_trace(engine: EmbeddedEngine) -> None:
    """Its slot is free, and holds no keys and values of it."""
    model: Any = engine._policy._model  # type: ignore[attr-defined]
    work = request("some words"), Sampling(seed=1)
    alone = await engine.chat(*work)
    await engine.set_weights(model.state_dict(), "v1")  # the slots are forgotten

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    hook = model.register_forward_pre_hook(fail)
    for _ in range(4):  # more than there are slots
        with pytest.raises(RuntimeError, match="no memory"):
            await engine.chat(*work)
    hook.remove()
    same(await engine.chat(*work), alone)


async def test_weights_that_are_no_numbers_fail_the_calls_until_better_ones_come(engine: EmbeddedEngine) -> None:
    model: Any = engine._policy._model  # type: ignore[attr-defined]
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    work = [(request(words), Sampling(seed=seed)) for seed, words in enumerate(WORDS)]
    expected = [await engine.chat(*each) for each in work]
    await engine.set_weights({name: tensor * np.nan for name, tensor in good.items()}, "v1")
    async with asyncio.timeout(60):
        for result in await asyncio.gather(*(engine.chat(*each) for each in work), return_exceptions=True):
            assert isinstance(result, RuntimeError)
    await engine.set_weights(good, "v2")
    for found, wanted in zip(await asyncio.gather(*(engine.chat(*each) for each in work)), expected, strict=True):
        same(found, wanted)


async def test_refused_weights_change_nothing(engine: EmbeddedEngine, model: Any) -> None:
    wrong = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    wrong["lm_head.weight"] = wrong["lm_head.weight"][:-1]
    work = request("some words"), Sampling(seed=1)
    before = await engine.chat(*work)
    with pytest.raises(EngineError, match=r"lm_head\.weight"):
        await engine.set_weights(wrong, "v1")
    same(await engine.chat(*work), before)


async def test_a_pass_that_fails_after_new_weights_fails_its_own_answer_only(engine: EmbeddedEngine) -> None:
    model: Any = engine._policy._model  # type: ignore[attr-defined]
    calls = await calls_in_all_slots(engine)
    numbers = count()

    def fail(_: Any, __: Any, fields: dict[str, Any]) -> None:
        if fields["input_ids"].shape[1] > 1 and next(numbers) == 0:
            raise RuntimeError("no memory")

    hook = model.register_forward_pre_hook(fail, with_kwargs=True)
    await engine.set_weights(weights(model), "v1")
    hook.remove()
    (failed,), others = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert "no memory" in str(failed.exception())
    for other in others:
        other.cancel()
    await asyncio.wait(others)
    assert all(other.cancelled() for other in others)


async def test_a_cancelled_call_that_waits_for_a_slot_ends_at_once(engine: EmbeddedEngine) -> None:
    calls = await calls_in_all_slots(engine)
    asked = replace(request("wait", 5), prompt_ids=np.array([5, 6, 7], np.int32))
    waiting = asyncio.create_task(engine.chat(asked, Sampling()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert not any(call.done() for call in calls)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)


async def test_a_closed_engine_refuses_calls(engine: EmbeddedEngine) -> None:
    await engine.close()
    for _ in range(2):
        async with asyncio.timeout(60):
            with pytest.raises(EngineError, match="the engine was closed"):
                await engine.chat(request("a"), Sampling())


def test_a_model_with_attention_of_its_own_gets_separate_caches(model: Any) -> None:
    """GPT-Neo's layers look back at `window_size` ids, which its config tells in words of its own."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    assert isinstance(caches(torch, model, 2), Slots)
    config = transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
    )
    assert isinstance(caches(torch, transformers.GPTNeoForCausalLM(config), 2), Separate)
