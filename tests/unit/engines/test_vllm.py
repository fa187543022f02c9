"""The vLLM engine where the server is at fault: what cannot be had from a healthy one (see tests/e2e/test_vllm.py).

A small HTTP server answers with what an old, a busy or a broken engine puts on the wire.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from polar_gym.engines import EngineError, http
from polar_gym.engines.vllm import VllmEngine, VllmOptions
from polar_gym.schema import Sampling
from tests.support.vllm_stand_in import REQUEST, answer, started


async def test_an_engine_too_old_for_ids_is_refused_at_the_start() -> None:
    with pytest.raises(EngineError, match=r"without token ids.*return_token_ids.*vLLM 0\.10\.2"):
        async with started(lambda body: answer(None, 1)):
            pass


async def test_a_url_where_something_else_listens_is_named() -> None:
    """Guards against a traceback where engine.url is that of a web page."""
    with pytest.raises(
        EngineError, match=r"/v1/chat/completions answered with text that is not JSON .*Check engine\.url"
    ):
        async with started(lambda body: web.Response(text="<html>", content_type="text/html")):
            pass


async def test_an_answer_without_a_logprob_for_each_id_is_refused() -> None:
    with pytest.raises(EngineError, match="2 ids but 1 logprobs"):
        async with started(lambda body: answer([5, 6], 1)):
            pass


@pytest.mark.parametrize(
    ("logprob", "words"), [(None, "the logprob None for token 1 of 2"), (float("nan"), "text that is not JSON")]
)
async def test_a_logprob_that_is_no_number_is_refused(logprob: float | None, words: str) -> None:
    """Guards against a journal that cannot be read again, JSON having no such numbers, and training on them."""

    def overflown(body: dict[str, Any]) -> web.Response:
        made = orjson.loads(str(answer([5, 6], 2).text))
        made["choices"][0]["logprobs"]["content"][1]["logprob"] = logprob
        return web.json_response(made)

    with pytest.raises(EngineError, match=words):
        async with started(overflown):
            pass


@pytest.mark.parametrize("logprob", [1e-2, 7.14])
async def test_logits_in_place_of_logprobs_are_refused(logprob: float) -> None:
    """Guards against training on what an engine sends with `--logprobs-mode processed_logits`, also one that was
    started anew with it after the probe."""
    mode = ["logprobs"]

    def handle(body: dict[str, Any]) -> web.Response:
        made = orjson.loads(str(answer([5, 6], 2).text))
        if mode == ["logits"]:
            made["choices"][0]["logprobs"]["content"][1]["logprob"] = logprob
        return web.json_response(made)

    words = rf"the logprob {logprob:.2f} for token 1 of 2, which is above 0: .*--logprobs-mode processed_logprobs"
    async with started(handle) as engine:
        mode[:] = ["logits"]
        with pytest.raises(EngineError, match=words):
            await engine.chat(REQUEST, Sampling())
        with pytest.raises(EngineError, match=words):
            await engine.start()


async def test_logits_that_are_all_below_zero_are_known_by_their_sum() -> None:
    """The sampled token alone may pass for a logprob."""

    def handle(body: dict[str, Any]) -> web.Response:
        made = orjson.loads(str(answer([5], 1).text))
        made["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = [{"logprob": -0.5}, {"logprob": -0.6}]
        return web.json_response(made)

    with pytest.raises(EngineError, match=r"of 2 tokens whose probabilities add up to exp\(0\.14\): these are logits"):
        async with started(handle):
            pass


@pytest.mark.parametrize(("processed", "highest"), [(True, -6.0), (True, -33.0), (False, -33.0)])
async def test_logits_whose_sum_passes_for_one_of_probabilities_are_refused(highest: float, processed: bool) -> None:
    """Guards against a model whose logits are all below zero: nothing that it sends is a logprob above zero."""

    def handle(body: dict[str, Any]) -> web.Response:
        logits = [highest - place / 2 for place in range(10)]
        scaled = [logit / body["temperature"] for logit in logits] if processed else logits
        kept = scaled[: body["top_k"]] if processed and body["top_k"] > 0 else scaled
        made = orjson.loads(str(answer([5], 1).text))
        listed = kept + [-9999.0] * (10 - len(kept))  # vLLM's place-holder of minus infinity
        made["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = [{"logprob": each} for each in listed]
        return web.json_response(made)

    with pytest.raises(EngineError, match=r"add up to exp\(-?\d+\.\d\d\): these are logits\..*--logprobs-mode"):
        async with started(handle):
            pass


async def test_rounding_may_carry_a_logprob_above_zero() -> None:
    def handle(body: dict[str, Any]) -> web.Response:
        made = orjson.loads(str(answer([5], 1).text))
        entry = {"logprob": 3.8e-6}
        made["choices"][0]["logprobs"]["content"][0] = entry | {"top_logprobs": [entry, {"logprob": -16.0}]}
        return web.json_response(made)

    async with started(handle) as engine:
        completion = await engine.chat(REQUEST, Sampling())
    assert completion.logprobs[0] > 0


async def test_what_is_sent_and_what_is_kept() -> None:
    seen: list[dict[str, Any]] = []

    def handle(body: dict[str, Any]) -> web.Response:
        seen.append(body)
        return answer([5], 1, content="", reasoning_content="hm", function_call=None)

    async with started(handle, api_key="secret") as engine:
        completion = await engine.chat(REQUEST, Sampling(top_p=0.9))
        assert (engine.model, engine.max_model_len, engine.logprobs_mode) == ("m", 4096, "raw")
    assert completion.message == {"role": "assistant", "content": "", "reasoning": "hm"}
    sent = seen[-1]
    assert sent.pop("headers")["Authorization"] == "Bearer secret"
    assert sent.pop("cache_salt")
    assert sent == {
        "model": "m",
        "messages": REQUEST.messages,
        "stream": True,
        "stream_interval": 64,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": True,
        "return_weight_versions": True,
        **Sampling(top_p=0.9).model_dump(exclude={"seed"}),
    }, "and no tool_choice, which vLLM refuses where there are no tools"


async def test_nothing_said_beside_a_call_is_none() -> None:
    call = {"id": "chatcmpl-tool-1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    async with started(lambda body: answer([5], 1, content="", tool_calls=[call])) as engine:
        completion = await engine.chat(REQUEST, Sampling())
    assert completion.message == {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_engine_is_asked_again(status: int) -> None:
    refusals = 1

    def handle(body: dict[str, Any]) -> web.Response:
        nonlocal refusals
        if refusals:
            refusals -= 1
            return web.json_response({"error": {"message": "paused"}}, status=status)
        return answer([5], 1)

    async with started(handle) as engine:
        assert (await engine.chat(REQUEST, Sampling())).response_ids.tolist() == [5]
    assert refusals == 0


@pytest.mark.parametrize(
    ("status", "becomes", "words"),
    [(500, 502, "answered 500: broken"), (401, 502, "check its api_key"), (404, 404, "broken")],
)
async def test_failures_name_the_server(status: int, becomes: int, words: str) -> None:
    broken = web.json_response({"error": {"message": "broken"}}, status=status)
    with pytest.raises(EngineError, match=words) as failure:
        async with started(lambda body: broken):
            pass
    assert failure.value.status == becomes


async def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "START_PATIENCE_SECONDS", 0.1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        engine = VllmEngine(VllmOptions(url=url))
        with pytest.raises(EngineError, match=f"vLLM at {url} cannot be reached") as failure:
            async with asyncio.timeout(60):
                await engine.start()
        await engine.close()
    assert (failure.value.status, failure.value.kind) == (503, "unreachable")


def test_the_url_is_required() -> None:
    with pytest.raises(EngineError, match=r"engine\.url=http"):
        VllmEngine(VllmOptions())


def by_temperature(body: dict[str, Any]) -> web.Response:
    """Raw logprobs: the same at every temperature."""
    return answer([5], 1)


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        *((Sampling(), None), (Sampling(seed=1, top_k=0), None), (Sampling(temperature=0.7), "temperature")),
        *((Sampling(top_p=0.9), "top_p"), (Sampling(top_k=5), "top_k"), (Sampling(min_p=0.1), "min_p")),
    ],
)
async def test_raw_logprobs_that_do_not_fit_the_sampling_are_warned_of_once(
    sampling: Sampling, named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(by_temperature) as engine:
        assert engine.logprobs_mode == "raw"
        for _ in range(2):
            await engine.chat(REQUEST, sampling)
    warnings = [record.message for record in caplog.records if "--logprobs-mode processed_logprobs" in record.message]
    assert len(warnings) == (named is not None)
    assert all(f"before {named};" in warning for warning in warnings)


async def test_processed_logprobs_fit_every_sampling(caplog: pytest.LogCaptureFixture) -> None:
    def processed(body: dict[str, Any]) -> web.Response:
        scaled = np.array([-0.5, -1.5]) / body["temperature"]
        top = [{"logprob": each} for each in scaled - np.logaddexp.reduce(scaled)]
        entry = {"token": "a", "logprob": -0.5, "top_logprobs": top}
        choice = {
            "message": {"content": "a"},
            "finish_reason": "stop",
            "token_ids": [5],
            "logprobs": {"content": [entry]},
        }
        return web.json_response({"choices": [choice], "prompt_token_ids": [1, 2]})

    async with started(processed) as engine:
        assert engine.info.logprobs_mode == "processed"
        await engine.chat(REQUEST, Sampling(temperature=0.7))
    assert "--logprobs-mode" not in caplog.text


async def test_a_set_version_salts_the_prefix_cache_and_versions_are_read_where_named() -> None:
    """`return_weight_versions` is vLLM 0.33's; its answer is taken to have the form of `generate`."""
    seen: list[dict[str, Any]] = []

    def handle(body: dict[str, Any]) -> web.Response:
        seen.append(body)
        spans = [{"version": "1", "start": 0, "end": 1}]
        choice = {"message": {"content": "a"}, "finish_reason": "stop", "token_ids": [5], "weight_versions": spans}
        choice["logprobs"] = {"content": [{"logprob": -0.5}]}
        return web.json_response({"choices": [choice], "prompt_token_ids": [1, 2]})

    async with started(handle, chat_template_kwargs={"enable_thinking": False}) as engine:
        await engine.chat(REQUEST, Sampling())
        before = seen[-1]["cache_salt"]
        engine.weight_version = "1"
        completion = await engine.chat(REQUEST, Sampling())
    assert before != seen[-1]["cache_salt"]
    assert seen[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert [(span.version, span.start, span.end) for span in completion.weight_versions] == [("1", 0, 1)]
    assert not completion.weight_versions[0].estimated


async def test_another_context_length_than_the_servers_is_refused() -> None:
    """Guards against traces of up to the server's length where a trainer's maximum was set here."""
    with pytest.raises(EngineError, match=r"engine\.max_model_len=1024: http://.* states 4096 for 'm'; leave the"):
        async with started(lambda body: answer([5], 1), max_model_len=1024):
            pass
    async with started(lambda body: answer([5], 1), max_model_len=4096) as engine:
        assert engine.info.max_model_len == 4096


async def test_a_lora_adapter_is_asked_by_its_name_and_told_with_its_base() -> None:
    """Guards against looking for a tokenizer in the directory of an adapter, which has none."""
    async with started(lambda body: answer([5], 1), model="adapter") as engine:
        assert (engine.info.model, engine.info.base_model, engine.info.tokenizer) == ("adapter", "m", "/weights/m")
    async with started(lambda body: answer([5], 1)) as engine:
        assert (engine.info.model, engine.info.base_model) == ("m", None)


async def test_weights_that_vllm_cannot_read_are_refused(tmp_path: Path) -> None:
    async with started(lambda body: answer([3], 1)) as engine:
        with pytest.raises(EngineError, match="reads weights from a directory"):
            await engine.set_weights({}, "1")
        with pytest.raises(EngineError, match="start vLLM with VLLM_SERVER_DEV_MODE=1"):
            await engine.set_weights(tmp_path, "1")
        assert engine.weight_version is None
