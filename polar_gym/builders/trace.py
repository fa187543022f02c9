"""A path of calls, each the exact token prefix of the next, as one training sequence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from polar_gym.builders.replay import routed_experts, sampling_mask
from polar_gym.schema import Message, ModelCall, Sampling, Trace, Turn, WeightVersion

SHAPING = tuple(name for name in Sampling.model_fields if name != "seed")


def merge_path(path: Sequence[ModelCall], trainable: Collection[str]) -> Trace:
    """Return the trace of `path`. Calls whose ids are not in `trainable` are context only.

    Invariant: the ids before each sampled span are the prompt ids that the engine echoed for that call.
    """
    root, last = path[0], path[-1]
    start = len(root.prompt_ids)
    response_ids = np.concatenate([last.prompt_ids[start:], last.response_ids])
    loss_mask = np.zeros(len(response_ids), dtype=np.int8)
    logprobs = np.zeros(len(response_ids), dtype=np.float32)
    versions: list[WeightVersion] = []
    turns: list[Turn] = []
    for call in path:
        offset = len(call.prompt_ids) - start
        end = offset + len(call.response_ids)
        turns.append(Turn(call_id=call.call_id, start=offset, end=end, sampling=_shaping(call)))
        if call.call_id in trainable:
            loss_mask[offset:end] = 1
            logprobs[offset:end] = call.logprobs
        versions.extend(
            span.model_copy(update={"start": offset + span.start, "end": offset + span.end})
            for span in call.weight_versions
        )
    return Trace(
        trace_id=f"{root.session_id}/{last.call_id}",
        session_id=root.session_id,
        kind=last.kind,
        prompt_ids=root.prompt_ids,
        response_ids=response_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        weight_versions=versions,
        messages=[*last.messages, *([last.response] if last.response else [])],
        tools=last.tools,
        finish_reason=last.finish_reason,
        call_ids=[call.call_id for call in path],
        sampling=_shaping(last),
        sampling_mask=sampling_mask(path, trainable),
        turns=turns,
    )


def seen_messages(last: ModelCall, calls: Mapping[str, ModelCall]) -> list[Message]:
    """Return the messages of a call and its answer, as the model saw them. `calls`: by id.

    A harness may hand an answer back in other words, or without its reasoning. A spliced prompt has the answer's own
    tokens, and so the answer itself stands in its place here, after the messages that its own call saw.
    """
    messages = [*last.messages, *([last.response] if last.response else [])]
    call, parent = last, calls.get(last.parent_id or "")
    while call.continuation == "spliced" and parent is not None:
        place = len(parent.messages)
        if parent.response and place < len(call.messages) and call.messages[place]["role"] == "assistant":
            messages[: place + 1] = [*parent.messages, parent.response]
        call, parent = parent, calls.get(parent.parent_id or "")
    return messages


def _shaping(call: ModelCall) -> dict[str, Any]:
    return {name: call.sampling[name] for name in SHAPING if name in call.sampling}


def verify_trace(trace: Trace, calls: Sequence[ModelCall]) -> None:
    """Check the trace against the calls that it was made of: exact equality, any dtype.

    Raises `ValueError` naming the call whose tokens are not where they were sampled.
    """
    by_id = {call.call_id: call for call in calls}
    sequence = np.concatenate([trace.prompt_ids, trace.response_ids])
    trained = np.concatenate([np.zeros(len(trace.prompt_ids), dtype=np.int8), trace.loss_mask])
    logprobs = np.concatenate([np.zeros(len(trace.prompt_ids), dtype=np.float32), trace.logprobs])
    for call_id in trace.call_ids:
        if call_id not in by_id:
            raise ValueError(f"trace {trace.trace_id}: there is no record of call {call_id}")
        call = by_id[call_id]
        start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.response_ids)
        if not np.array_equal(sequence[:start], call.prompt_ids):
            raise ValueError(f"trace {trace.trace_id}: call {call_id} was not sampled after the ids before its span")
        if not np.array_equal(sequence[start:end], call.response_ids):
            raise ValueError(f"trace {trace.trace_id}: the span of call {call_id} does not hold what it sampled")
        if trained[start:end].any() and not np.array_equal(logprobs[start:end], call.logprobs):
            raise ValueError(f"trace {trace.trace_id}: the span of call {call_id} does not hold its logprobs")
        if trained[start:end].any() and call.sampling_mask is not None:
            _verify_mask(trace, call)
        trained[start:end] = 0
    if trained.any():
        raise ValueError(f"trace {trace.trace_id}: {int(trained.sum())} trainable tokens were sampled by no call")
    last = by_id[trace.call_ids[-1]]
    if trace.routed_experts is not None and not np.array_equal(trace.routed_experts, _experts(last, by_id)):
        raise ValueError(f"trace {trace.trace_id}: the routed experts are not those that its calls recorded")


def _experts(last: ModelCall, calls: Mapping[str, ModelCall]) -> Any:
    recorded = routed_experts(last, calls)
    return () if recorded is None else recorded


def _verify_mask(trace: Trace, call: ModelCall) -> None:
    """Check that the trace has the call's sampling mask, and that each token was drawn from its own set."""
    assert call.sampling_mask is not None
    start = len(call.prompt_ids) - len(trace.prompt_ids)
    held = [] if trace.sampling_mask is None else trace.sampling_mask.sets()[start : start + len(call.response_ids)]
    kept = call.sampling_mask.sets()
    if len(held) != len(kept) or not all(map(np.array_equal, held, kept)):
        raise ValueError(f"trace {trace.trace_id}: the span of call {call.call_id} does not hold its sampling mask")
    for token, ids in zip(call.response_ids, kept, strict=True):
        if len(ids) and token not in ids:
            raise ValueError(f"trace {trace.trace_id}: call {call.call_id} sampled {token}, which its mask cuts off")
