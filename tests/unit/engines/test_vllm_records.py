"""The sampler's choices on vLLM's wire, and settings under which vLLM does not tell them.

`recorded/generate_with_records.txt` was written by the classes of vLLM 0.32 that write such a stream. The CPU build
samples without these choices, so that no test here can have them from a live server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import ValidationError

from polar_gym.chat import Completion
from polar_gym.engines import EngineError
from polar_gym.engines.http import Http
from polar_gym.engines.vllm import VllmEngine, VllmOptions
from polar_gym.engines.vllm.stream import StreamedAnswer
from polar_gym.schema import ReplayRecord, Sampling
from tests.exactness.stand_in import StandIn

RECORDED = (Path(__file__).parent / "recorded" / "generate_with_records.txt").read_bytes()
EVENTS = [line.removeprefix(b"data: ") for line in RECORDED.split(b"\n\n") if line]
EXPERTS = [[[3, 5], [1, 7]], [[0, 2], [6, 4]], [[7, 1], [5, 0]], [[2, 6], [3, 1]]]
BOTH: list[ReplayRecord] = ["routed_experts", "sampling_mask"]


def read(records: list[ReplayRecord], sampling: Sampling, events: list[bytes] = EVENTS) -> Completion:
    answer = StreamedAnswer(Http("vLLM", "http://engine", None, 0.0), lambda _: None, None, records)
    answer.take(events)
    answer.say({"content": "a"}, "stop")
    return answer.completion(sampling.model_dump())


def test_experts_and_kept_tokens_are_read_from_vllms_events() -> None:
    completion = read(BOTH, Sampling(top_p=0.95))
    assert completion.routed_experts is not None
    assert completion.sampling_mask is not None
    assert (completion.routed_experts.tolist(), completion.routed_experts.dtype) == (EXPERTS, np.uint8)
    assert [kept.tolist() for kept in completion.sampling_mask.sets()] == [[4, 21, 30], [2, 9]]
    assert completion.response_ids.tolist() == [21, 2]


def test_sets_of_sampling_that_cuts_nothing_are_not_kept() -> None:
    assert read(BOTH, Sampling(temperature=0.5)).sampling_mask is None


def test_records_that_are_not_asked_for_are_not_kept() -> None:
    completion = read([], Sampling(top_p=0.95))
    assert (completion.routed_experts, completion.sampling_mask) == (None, None)


WRONG = {
    "no experts": (1, "routed_experts", None, "engine.record=routed_experts: .* answered with none; .*-routed-experts"),
    "no array": (1, "routed_experts", "AAAA", "routed_experts: .* expected an array in NumPy's .npy form"),
    "a set missing": (0, "sampling_mask", [], "sampling_mask: .* answered with 1 sets for 2 tokens; .*-sampling-mask"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wanted_record_that_is_missing_or_damaged_is_an_error(wrong: str) -> None:
    place, field, value, words = WRONG[wrong]
    events = list(EVENTS)
    event = orjson.loads(events[place])
    event["choices"][0][field] = value
    events[place] = orjson.dumps(event)
    with pytest.raises(EngineError, match=words):
        read(BOTH, Sampling(top_p=0.95), events)


@pytest.mark.parametrize("field", [{"path": "chat"}, {"prefix_field": "required_prefix_token_ids"}])
def test_a_path_that_tells_no_records_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"engine.record=\['sampling_mask'\]: .* drop engine\."):
        VllmOptions(url="http://engine", record=["sampling_mask"], **field)


async def test_a_server_without_the_flag_is_refused_at_the_start() -> None:
    server = StandIn(records=False)
    await server.start()
    engine = VllmEngine(VllmOptions(url=server.url, record=BOTH))
    try:
        with pytest.raises(EngineError, match="start vLLM with --enable-return-routed-experts"):
            await engine.start()
    finally:
        await engine.close()
        await server.stop()
