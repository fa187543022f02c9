"""The fidelity of a session: its sampled and trained tokens, why others are excluded, which continuations held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from polar_gym.record import common_prefix
from polar_gym.schema import Break, Fidelity, ModelCall, Trace

REFUSALS = ("context_length", "invalid_request", "not_found", "unreachable")
"""Kinds of errors of calls that no engine sampled for."""


def fidelity(calls: Sequence[ModelCall], traces: Sequence[Trace], excluded: Mapping[str, str]) -> Fidelity:
    """Return the fidelity of a session. Raises `AssertionError` when tokens were lost or trained twice, or when a
    spliced prompt does not begin with the prompt and answer of its parent."""
    lost: Counter[str] = Counter()
    unsent: Counter[str] = Counter()
    for call in calls:
        if call.call_id in excluded and len(call.response_ids):
            lost[excluded[call.call_id]] += len(call.response_ids)
        if call.engine_tokens is not None and call.engine_tokens > len(call.response_ids):
            unsent[call.outcome] += call.engine_tokens - len(call.response_ids)
    counted = Fidelity(
        sampled_tokens=sum(len(call.response_ids) for call in calls),
        trainable_tokens=sum(trace.trainable_tokens for trace in traces),
        excluded=dict(lost),
        calls=len(calls),
        traces=len(traces),
        traces_by_kind=dict(Counter(trace.kind for trace in traces)),
        traces_per_request=sum(bool(len(call.response_ids)) and call.call_id not in excluded for call in calls),
        single_tool_call=sum(call.single_tool_call for call in calls),
        unsent=dict(unsent),
        uncounted=dict(Counter(call.error_kind or call.outcome for call in calls if _uncounted(call))),
        edited_answers=len({each for call in calls if call.continuation == "spliced" for each in call.edited_answers}),
        prefill=sum(len(call.prompt_ids) for call in calls),
        scores=[score for call in calls for score in call.scores],
    )
    if not counted.exact:
        raise AssertionError(f"the builder lost tokens or trained some twice: {counted!r}")
    if wrong := next(miscounts(calls, traces, excluded), None):
        raise AssertionError(f"the builder is at fault: {wrong}")
    _count_continuations(counted, calls)
    return counted


def _uncounted(call: ModelCall) -> bool:
    """Return whether the engine may have sampled for the call, and gave no count."""
    refused = call.error_kind in REFUSALS and not len(call.prompt_ids)
    return call.engine_tokens is None and not refused


def miscounts(calls: Sequence[ModelCall], traces: Sequence[Trace], excluded: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each call of which other tokens are trained than all of them once, or none where it is excluded.
    Each call is counted separately: tokens lost of one call must not make up for tokens of another that are trained
    twice. `traces` name no other calls than these."""
    by_id = {call.call_id: call for call in calls}
    trained: Counter[str] = Counter()
    for trace in traces:
        for call in (by_id[call_id] for call_id in trace.call_ids):
            start = len(call.prompt_ids) - len(trace.prompt_ids)
            trained[call.call_id] += int(np.count_nonzero(trace.loss_mask[start : start + len(call.response_ids)]))
    for call in calls:
        due = 0 if call.call_id in excluded else len(call.response_ids)
        if trained[call.call_id] != due:
            why = f" (excluded: {excluded[call.call_id]})" if call.call_id in excluded else ""
            yield f"call {call.call_id}: the traces train {trained[call.call_id]} tokens of it, and {due} are due{why}"


def _count_continuations(counted: Fidelity, calls: Sequence[ModelCall]) -> None:
    by_id = {call.call_id: call for call in calls}
    for call in calls:
        parent = by_id.get(call.parent_id or "")
        if not len(call.prompt_ids):
            continue
        if parent is None:
            if call.splice_cause is not None:
                counted.breaks.append(Break(call_id=call.call_id, cause=call.splice_cause))
            continue
        position = first_difference(parent, call)
        if position is not None:
            if call.continuation == "spliced":
                raise AssertionError(
                    f"call {call.call_id} is marked spliced, but differs from its parent at {position}"
                )
            cause = call.splice_cause or "unknown"
            broken = Break(call_id=call.call_id, parent_id=parent.call_id, position=position, cause=cause)
            counted.breaks.append(broken)
        elif call.continuation == "spliced":
            counted.spliced += 1
            counted.prefill -= len(parent.prompt_ids) + len(parent.response_ids)
        else:
            counted.canonical += 1


def first_difference(parent: ModelCall, child: ModelCall) -> int | None:
    """Return the first position at which the child's prompt differs from the parent's prompt and answer, or None where
    it begins with all of them."""
    read, known = len(parent.prompt_ids), len(parent.prompt_ids) + len(parent.response_ids)
    for start, ids in ((0, parent.prompt_ids), (read, parent.response_ids)):
        again = child.prompt_ids[start : start + len(ids)]
        if (shared := common_prefix(ids, again)) < len(again):
            return start + shared
    return None if len(child.prompt_ids) >= known else len(child.prompt_ids)
