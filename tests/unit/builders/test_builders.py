"""The laws of the builders: tokens are conserved, a trace is what the model saw, nothing is trained twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_gym.builders import build_trajectory
from polar_gym.builders.exclusions import exclusions
from polar_gym.builders.fidelity import fidelity
from polar_gym.builders.trace import merge_path, verify_trace
from polar_gym.builders.tree import token_tree
from polar_gym.registry import UnknownNameError
from polar_gym.schema import BuilderSpec, ModelCall, Replayed, Trajectory
from tests.support.call_trees import at, parallel_sessions, sessions
from tests.support.calls import make_call

BUILDERS = st.sampled_from(["prefix_merging", "per_request"])


def build(calls: list[ModelCall], name: str = "prefix_merging", **options: Any) -> Trajectory:
    return build_trajectory(calls, BuilderSpec(name=name, **options))


@settings(max_examples=200)
@given(name=BUILDERS, calls=sessions())
def test_laws(name: str, calls: list[ModelCall]) -> None:
    trajectory = build(calls, name)
    fidelity = trajectory.fidelity
    assert fidelity.sampled_tokens == sum(len(call.response_ids) for call in calls)
    assert fidelity.sampled_tokens == fidelity.trainable_tokens + sum(fidelity.excluded.values())

    trained: Counter[str] = Counter()
    by_id = {call.call_id: call for call in calls}
    for trace in trajectory.traces:
        verify_trace(trace, calls)
        assert len(trace.response_ids) == len(trace.loss_mask) == len(trace.logprobs)
        assert not trace.logprobs[trace.loss_mask == 0].any()
        for call_id in trace.call_ids:
            call = by_id[call_id]
            start = len(call.prompt_ids) - len(trace.prompt_ids)
            span = trace.loss_mask[start : start + len(call.response_ids)]
            assert span.all() or not span.any(), "a call is trained whole or not at all"
            trained[call_id] += bool(len(span)) and bool(span.all())
    wanted = {
        call.call_id
        for call in calls
        if len(call.response_ids) and call.outcome == "delivered" and not call.sampling_mismatch
    }
    assert {call_id for call_id, times in trained.items() if times} == wanted
    assert all(times <= 1 for times in trained.values())


@settings(max_examples=200)
@given(name=BUILDERS, calls=parallel_sessions(), train_rejected=st.booleans())
def test_laws_of_calls_in_flight_at_once(name: str, calls: list[ModelCall], train_rejected: bool) -> None:
    trajectory = build(calls, name, train_rejected=train_rejected)  # raises where a call is not trained once, or wholly
    excluded = exclusions(calls, BuilderSpec(name=name, train_rejected=train_rejected))
    for trace in trajectory.traces:
        verify_trace(trace, calls)
        assert trace.trainable_tokens
        assert trace.call_ids[-1] not in excluded
    delivered = [call for call in calls if call.outcome == "delivered" and len(call.response_ids)]
    for call in delivered:
        same_thread = [each for each in delivered if each.hints.get("thread") == call.hints.get("thread")]
        same_prompt = [each for each in same_thread if np.array_equal(each.prompt_ids, call.prompt_ids)]
        kept = [each for each in same_prompt if excluded.get(each.call_id) not in ("superseded", "rejected")]
        assert kept, "of the answers to one question of a thread at least one counts"
        went_on = any(each.parent_id == call.call_id for each in calls)
        assert not went_on or any(each is call for each in kept)


@given(calls=sessions())
def test_a_calls_parent_is_the_longest_earlier_sequence_that_its_prompt_begins_with(calls: list[ModelCall]) -> None:
    """The definition, call by call: guards against a tree that is fast and wrong."""
    nodes = token_tree(calls)
    assert [node.call for node in nodes] == [call for call in calls if len(call.response_ids)]
    for place, node in enumerate(nodes):
        prompt = node.call.prompt_ids.tobytes()
        earlier = [(each.call.prompt_ids.tobytes() + each.call.response_ids.tobytes(), each) for each in nodes[:place]]
        continued = [(len(known), each.call.index, each) for known, each in earlier if prompt.startswith(known)]
        assert node.parent is (max(continued)[2] if continued else None)


@given(calls=sessions())
def test_prefix_merging_joins_all_that_continues(calls: list[ModelCall]) -> None:
    """A delivered call whose prompt is exactly an earlier sequence is never a trace of its own beginning."""
    roots = {trace.call_ids[0] for trace in build(calls).traces}
    for call in calls:
        continues = any(
            len(earlier.response_ids)
            and call.prompt_ids[: len(earlier.prompt_ids) + len(earlier.response_ids)].tolist()
            == [*earlier.prompt_ids.tolist(), *earlier.response_ids.tolist()]
            for earlier in calls[: call.index]
        )
        assert not (continues and call.call_id in roots)


def test_a_chain_is_one_trace_with_interstitials_masked() -> None:
    calls = [make_call(0, [1, 2], [3, 4]), make_call(1, [1, 2, 3, 4, 5, 6], [7])]
    (trace,) = build(calls).traces
    assert trace.prompt_ids.tolist() == [1, 2]
    assert trace.response_ids.tolist() == [3, 4, 5, 6, 7]
    assert trace.loss_mask.tolist() == [1, 1, 0, 0, 1]
    np.testing.assert_array_equal(trace.logprobs, np.array([-1, -1, 0, 0, -0.5], dtype=np.float32))


@pytest.mark.parametrize("name", ["prefix_merging", "per_request"])
def test_messages_hold_the_answers_whose_tokens_are_in_the_ids(name: str) -> None:
    """Guards against SFT on answers as a harness restated them, without the policy's reasoning."""
    asked = [{"role": "user", "content": "list"}]
    said = [{"role": "assistant", "content": f"cd /w && ls {i}", "reasoning": f"think {i}"} for i in range(3)]
    restated = [{"role": "assistant", "content": f"ls {i}"} for i in range(3)]
    output = {"role": "user", "content": "done"}
    calls = [
        make_call(0, [1], [2], messages=asked, response=said[0]),
        make_call(
            1,
            [1, 2, 3],
            [4],
            messages=[*asked, restated[0], output],
            response=said[1],
            parent_id="call0",
            continuation="spliced",
        ),
        make_call(
            2,
            [1, 2, 3, 4, 5],
            [6],
            messages=[*asked, restated[0], output, restated[1], output],
            response=said[2],
            parent_id="call1",
            continuation="spliced",
        ),
    ]
    trace = build(calls, name).traces[-1]
    assert trace.messages == [*asked, said[0], output, said[1], output, said[2]]
    calls[1].continuation, seen = "canonical", {**restated[0], "reasoning": "think"}
    calls[1].messages = [*asked, seen, output]
    trace = build(calls, name).traces[-1]
    assert trace.messages == [*asked, seen, output, said[1], output, said[2]], "the words that were templated"
    calls[2].continuation = "canonical"
    trace = build(calls, name).traces[-1]
    assert trace.messages == [*asked, restated[0], output, restated[1], output, said[2]], "the template wrote its words"


def test_a_broken_prefix_forks_and_drops_no_later_call() -> None:
    """Guards against a broken chain losing every later call."""
    calls = [
        make_call(0, [1, 2], [3, 4]),
        make_call(1, [1, 2, 3, 9, 5], [6], parent_id="call0", continuation="canonical", splice_cause="off"),
        make_call(2, [1, 2, 3, 9, 5, 6, 7], [8], parent_id="call1", continuation="canonical", splice_cause="off"),
    ]
    trajectory = build(calls)
    assert [trace.call_ids for trace in trajectory.traces] == [["call0"], ["call1", "call2"]]
    assert trajectory.fidelity.trainable_tokens == 4
    assert trajectory.fidelity.canonical == 1
    (broken,) = trajectory.fidelity.breaks
    assert (broken.call_id, broken.parent_id, broken.position, broken.cause) == ("call1", "call0", 3, "off")


def test_a_spliced_prompt_that_is_none_is_an_error() -> None:
    calls = [make_call(0, [1, 2], [3]), make_call(1, [1, 2, 9], [6], parent_id="call0", continuation="spliced")]
    with pytest.raises(AssertionError, match="call1 is marked spliced, but differs from its parent at 2"):
        build(calls)


def test_of_identical_requests_in_flight_the_one_that_is_continued_counts() -> None:
    calls = [
        make_call(0, [1], [2, 2], **at(0, 5)),
        make_call(1, [1], [3], **at(1, 9)),
        make_call(2, [1, 2, 2, 4], [5], **at(20, 1), parent_id="call0", continuation="spliced"),
    ]
    trajectory = build(calls)
    assert [trace.call_ids for trace in trajectory.traces] == [["call0", "call2"]]
    assert trajectory.fidelity.excluded == {"superseded": 1}


def test_of_identical_requests_in_flight_that_nothing_continues_the_last_delivered_counts() -> None:
    calls = [make_call(0, [1], [2, 2], **at(0, 5)), make_call(1, [1], [3], **at(1, 2))]
    trajectory = build(calls)
    assert [trace.call_ids for trace in trajectory.traces] == [["call0"]]
    assert trajectory.fidelity.excluded == {"superseded": 1}


def test_parallel_subagents_with_one_prompt_are_no_retries_of_each_other() -> None:
    """Guards against leaving out the one that answers at once, because only the other's conversation went on."""
    calls = [
        make_call(0, [1], [2, 2], **at(0, 5), hints={"thread": "a"}),
        make_call(1, [1], [3], **at(1, 2), hints={"thread": "b"}),
        make_call(2, [1, 2, 2, 4], [5], **at(9, 1), hints={"thread": "a"}, parent_id="call0", continuation="spliced"),
    ]
    for train_rejected in (True, False):
        trajectory = build(calls, train_rejected=train_rejected)
        assert [trace.call_ids for trace in trajectory.traces] == [["call0", "call2"], ["call1"]]
        assert trajectory.fidelity.excluded == {}


def test_an_answer_that_was_asked_for_again_is_the_policys_failure_and_trained() -> None:
    """Guards against hiding a policy's broken tool calls, which would bias it."""
    calls = [make_call(0, [1], [2, 2], **at(0, 1)), make_call(1, [1], [3], **at(2, 1))]
    assert build(calls).fidelity.trainable_tokens == 3
    assert build(calls, train_rejected=False).fidelity.excluded == {"rejected": 2}


def test_calls_that_saw_an_image_are_not_trained() -> None:
    """A trace carries ids; the pixels behind them would be missing."""
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    assert build([make_call(0, [1], [2, 2], messages=[image])]).fidelity.excluded == {"multimodal": 2}


def test_titles_are_not_trained_and_subagents_are() -> None:
    calls = [make_call(0, [1], [2, 2], hints={"kind": "auxiliary"}), make_call(1, [5], [3], hints={"kind": "subagent"})]
    trajectory = build(calls)
    assert trajectory.fidelity.excluded == {"kind:auxiliary": 2}
    assert trajectory.fidelity.traces_by_kind == {"subagent": 1}


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_summary_asked_for_in_the_very_conversation_is_no_part_of_its_trace(goes_on: bool) -> None:
    """Guards against a compaction that is labelled, and trained, as the main thread that it is about."""
    calls = [make_call(0, [1], [2, 2]), make_call(1, [1, 2, 2, 3], [4], hints={"kind": "compaction"})]
    if goes_on:
        calls.append(make_call(2, [1, 2, 2, 5], [6]))
    main, compaction = build(calls).traces
    assert (main.kind, main.call_ids) == ("main", ["call0", "call2"] if goes_on else ["call0"])
    assert (compaction.kind, compaction.call_ids) == ("compaction", ["call0", "call1"])
    assert (main.trainable_tokens, compaction.trainable_tokens) == (3 if goes_on else 2, 1)
    assert compaction.loss_mask.tolist() == [0, 0, 0, 1]


def test_a_retried_call_leaves_the_kept_answer_in_the_chain() -> None:
    """Guards against training on the abandoned answer of a retry while losing the one that was kept."""
    calls = [
        make_call(0, [1], [2, 3]),
        make_call(1, [1, 2, 3, 4], [5, 5], outcome="abandoned"),
        make_call(2, [1, 2, 3, 4], [6]),
        make_call(3, [1, 2, 3, 4, 6, 7], [8]),
    ]
    trajectory = build(calls)
    assert [trace.call_ids for trace in trajectory.traces] == [["call0", "call2", "call3"]]
    assert trajectory.fidelity.excluded == {"abandoned": 2}


@pytest.mark.parametrize(
    "last",
    [
        {"outcome": "abandoned", "response": {"role": "assistant", "content": "Half a"}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        {"sampling_mismatch": ["tool_choice"], "finish_reason": "length"},
    ],
)
def test_a_trace_ends_with_the_last_answer_that_is_not_excluded(last: dict[str, Any]) -> None:
    """Guards against a trace that ends in half an answer, or in an image's ids without the image, which trainers and
    datasets take for the end of the conversation."""
    messages, response = [{"role": "user", "content": "Hi."}], {"role": "assistant", "content": "Hello."}
    calls = [
        make_call(0, [1], [2, 2], messages=messages, response=response, finish_reason="stop"),
        make_call(1, [1, 2, 2, 3], [4], **last),
        make_call(2, [1, 2, 2, 3, 4, 5], [6], **last),
    ]
    (trace,) = build(calls).traces
    assert (trace.call_ids, trace.response_ids.tolist()) == (["call0"], [2, 2])
    assert (trace.messages, trace.finish_reason) == ([*messages, response], "stop")


def test_a_shared_span_is_trained_in_the_longer_path() -> None:
    calls = [make_call(0, [1], [2]), make_call(1, [1, 2, 3], [4]), make_call(2, [1, 2, 5], [6, 6, 6])]
    by_last = {trace.call_ids[-1]: trace for trace in build(calls).traces}
    assert by_last["call1"].loss_mask.tolist() == [0, 0, 1]
    assert by_last["call2"].loss_mask.tolist() == [1, 0, 1, 1, 1]


def test_mismatched_calls_are_trained_when_the_task_says_so() -> None:
    calls = [make_call(0, [1], [2, 3], sampling_mismatch=["tool_choice"])]
    assert build(calls).fidelity.excluded == {"sampling_mismatch": 2}
    assert build(calls, train_on_sampling_mismatch=True).fidelity.trainable_tokens == 2


def test_a_builder_that_trains_one_call_twice_and_another_never_is_an_error() -> None:
    """Guards against a plug-in whose sum is right and whose traces are not."""
    calls = [make_call(0, [1], [2, 3]), make_call(1, [4], [5, 6])]
    twice = [merge_path([calls[0]], {"call0"}) for _ in range(2)]
    with pytest.raises(AssertionError, match="call call0: the traces train 4 tokens of it, and 2 are due"):
        fidelity(calls, twice, {})


@pytest.mark.parametrize(("name", "places"), [("prefix_merging", [3]), ("per_request", [3, 3])])
def test_traces_of_a_branch_name_the_session_that_sampled_their_beginning(name: str, places: list[int]) -> None:
    """Guards against traces of single calls that look as if their whole prompt were the branch's own."""
    recorded = make_call(0, [1], [2, 3], replayed=Replayed(session_id="origin", owned=False))
    calls = [recorded, make_call(1, [1, 2, 3, 4], [5]), make_call(2, [1, 2, 3, 4, 5, 6], [7]), make_call(3, [8], [9])]
    trajectory = build(calls, name)
    *shared, own = [(trace.branched_from, trace.shared_prefix) for trace in trajectory.traces]
    assert (shared, own) == ([("origin", place) for place in places], (None, 0))
    assert trajectory.branched == 1


def test_an_unknown_builder_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown builder 'stitching'; known: per_request, prefix_merging"):
        build([], "stitching")


def test_verify_trace_finds_a_token_that_was_never_sampled() -> None:
    calls = [make_call(0, [1, 2], [3, 4])]
    (trace,) = build(calls).traces
    trace.response_ids[0] = 8
    with pytest.raises(ValueError, match="call0 does not hold what it sampled"):
        verify_trace(trace, calls)
