"""The laws of the recorded choices: a trace has the experts of all its positions, and the sets of its own tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.builders import build_trajectory
from polar_gym.builders.trace import verify_trace
from polar_gym.schema import BuilderSpec, ModelCall, SamplingMask
from tests.support.call_trees import parallel_sessions
from tests.support.calls import make_call
from tests.support.choices import experts, recorded


@given(
    name=st.sampled_from(["prefix_merging", "per_request"]), calls=parallel_sessions(), lost=st.sets(st.integers(0, 9))
)
def test_a_trace_has_the_choices_of_its_sequence(name: str, calls: list[ModelCall], lost: set[int]) -> None:
    by_id = {call.call_id: call for call in recorded(calls, lost)}
    for trace in build_trajectory(calls, BuilderSpec(name=name)).traces:
        verify_trace(trace, calls)
        last, ids = by_id[trace.call_ids[-1]], [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
        if last.routed_experts is None:
            assert trace.routed_experts is None, "what the sampler chose after the parent's answer is not known"
        else:
            assert np.array_equal(trace.routed_experts, experts(ids)[:-1])  # type: ignore[arg-type]
        kept = trace.sampling_mask.sets() if trace.sampling_mask else [[]] * len(trace.response_ids)
        of_lost = np.zeros(len(trace.response_ids), bool)
        for call in (by_id[call_id] for call_id in trace.call_ids if by_id[call_id].sampling_mask is None):
            start = len(call.prompt_ids) - len(trace.prompt_ids)
            of_lost[start : start + len(call.response_ids)] = True
        due = [
            [token, 7] if trained and not lost_here else []
            for token, trained, lost_here in zip(trace.response_ids, trace.loss_mask, of_lost, strict=True)
        ]
        assert [list(ids) for ids in kept] == due


def built(**fields: Any) -> tuple[Any, list[ModelCall]]:
    calls = recorded([make_call(0, [1, 2], [3]), make_call(1, [1, 2, 3, 4], [5, 6], parent_id="call0")])
    for name, value in fields.items():
        setattr(calls[1], name, value)
    return build_trajectory(calls, BuilderSpec(name="prefix_merging")).traces[0], calls


def test_verify_finds_experts_of_other_positions() -> None:
    trace, calls = built()
    trace.routed_experts = np.roll(trace.routed_experts, 1, axis=0)
    with pytest.raises(ValueError, match="the routed experts are not those that its calls recorded"):
        verify_trace(trace, calls)


def test_verify_finds_sets_of_other_tokens() -> None:
    trace, calls = built()
    trace.sampling_mask = SamplingMask.of([[1]] * len(trace.response_ids))
    with pytest.raises(ValueError, match="the span of call call0 does not hold its sampling mask"):
        verify_trace(trace, calls)


def test_verify_finds_a_token_outside_of_its_own_set() -> None:
    trace, calls = built(sampling_mask=SamplingMask.of([[8, 9], [6]]))
    with pytest.raises(ValueError, match="call call1 sampled 5, which its mask cuts off"):
        verify_trace(trace, calls)


@pytest.mark.parametrize("offsets", [[], [0, 2], [1, 3], [0, 2, 1, 3]])
def test_offsets_that_divide_nothing_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets do not divide the 3 token ids"):
        SamplingMask(offsets=offsets, token_ids=[1, 2, 3])  # type: ignore[arg-type]


def test_a_call_needs_a_set_for_each_sampled_token() -> None:
    with pytest.raises(ValueError, match="2 sampled ids but 1 sets in its sampling mask"):
        make_call(0, [1], [2, 3], sampling_mask=SamplingMask.of([[2]]))


def test_a_record_with_choices_survives_json() -> None:
    _, (_, call) = built()
    again = ModelCall.from_json(call.to_json())
    assert np.array_equal(again.routed_experts, call.routed_experts)  # type: ignore[arg-type]
    assert again.routed_experts is not None
    assert again.routed_experts.dtype == np.uint8
    assert again.to_json() == call.to_json()
