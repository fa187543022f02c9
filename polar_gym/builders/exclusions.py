"""Which calls are not trained on, and why.

A mistake of the policy is not a reason: without its failures, training would be biased. The one exception is an answer
that the end of the session's time cut, perhaps a loop: the gateway may not have received all of its tokens.
A harness that asks the same again leaves several answers to one prompt. Calls that were in flight together are one
question (a client's fallback beside its stream). The answer from which the conversation went on counts, or the last one
delivered where it went on from none of them. An answer that was complete before the same was asked again was rejected
by the harness: it is a separate branch. Calls of different threads are never one question, though two sub-agents may be
given the same words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from polar_gym.chat import has_media
from polar_gym.schema import TIME_UP, BuilderSpec, ModelCall


def exclusions(calls: Sequence[ModelCall], spec: BuilderSpec) -> dict[str, str]:
    """Return for each excluded call, by its id, why none of its tokens is trained on.

    Reasons: `abandoned`, `time` (cut by the end of the session's time), `failed`, `frozen` (another model answered),
    `sampling_mismatch`, `multimodal` (a trace carries ids, not media), `superseded`, `rejected`, `branched` (another
    session trains them), or `kind:<kind>`.
    """
    reasons: dict[str, str] = {}
    for call in calls:
        kind = call.kind
        if call.branched_from is not None:
            reasons[call.call_id] = "branched"
        elif call.outcome != "delivered":
            reasons[call.call_id] = TIME_UP if call.error_kind == TIME_UP else call.outcome
        elif call.frozen is not None:
            reasons[call.call_id] = "frozen"
        elif call.sampling_mismatch and not spec.train_on_sampling_mismatch:
            reasons[call.call_id] = "sampling_mismatch"
        elif any(has_media(message) for message in call.messages):
            reasons[call.call_id] = "multimodal"
        elif kind not in spec.train_kinds:
            reasons[call.call_id] = f"kind:{kind}"
    continued = {call.parent_id for call in calls}
    for group in _same_prompt(calls):
        for call in _losers(group, continued):
            reasons.setdefault(call.call_id, "superseded")
    for call_id in rejected(calls) if not spec.train_rejected else ():
        reasons.setdefault(call_id, "rejected")
    return reasons


def rejected(calls: Sequence[ModelCall]) -> list[str]:
    """Return the calls, by their ids, after which the same was asked again, and which no call continues. Among them may
    be calls that are excluded for another reason."""
    continued = {call.parent_id for call in calls}
    return [call.call_id for group in _same_prompt(calls) for call in group[:-1] if call.call_id not in continued]


def _same_prompt(calls: Sequence[ModelCall]) -> Iterator[list[ModelCall]]:
    """Yield each group of several delivered calls of one thread with identical prompts, in the order of their end."""
    alike: defaultdict[tuple[str | None, bytes], list[ModelCall]] = defaultdict(list)
    for call in calls:
        if call.outcome != "delivered" or not len(call.response_ids):
            continue
        alike[call.hints.get("thread"), blake2b(call.prompt_ids).digest()].append(call)
    for group in alike.values():
        if len(group) > 1:
            yield sorted(group, key=lambda call: (call.started_at + call.duration, call.index))


def _losers(group: Sequence[ModelCall], continued: set[str | None]) -> Iterator[ModelCall]:
    """Yield the calls that lost against others in flight at the same time: those that no call continues. Where none of
    them is continued, the last one wins."""
    for position, call in enumerate(group):
        rivals = [other for other in group if other is not call and _overlap(call, other)]
        if not rivals or call.call_id in continued:
            continue
        others_go_on = any(other.call_id in continued for other in rivals)
        ends_later = any(other in rivals for other in group[position + 1 :])
        if others_go_on or ends_later:
            yield call


def _overlap(one: ModelCall, other: ModelCall) -> bool:
    return one.started_at < other.started_at + other.duration and other.started_at < one.started_at + one.duration
