"""The laws between what an engine gave and what a gateway keeps. Each breach is one line that names what is wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from tests.exactness.books import CUT_OFF, Books, Call, Trace, same_logprob
from tests.exactness.choices import experts_of, from_npy, kept_at
from tests.exactness.matching import Matches, common, match, wrong_logprobs
from tests.exactness.recording import Answer

BOOKED = "every token that reached the gateway is in the books, once"
PROMPTS = "the prompt of each call is the one that the engine conditioned on"
LOGPROBS = "the logprobs of each call are the engine's"
ONCE = "each token is trained at most once, and where the call that sampled it stands"
BALANCE = "sampled = trained + excluded by name, in each session"
GRAMMAR = "no token that was sampled under a grammar is trained"
PREFIX = "each trace is a sequence that the engine saw"
OWNER = "each call is in the books of the session that asked"
CHOICES = "each trace has the experts of all its positions, and the sets of its trained tokens"
LAWS = (BOOKED, PROMPTS, LOGPROBS, ONCE, BALANCE, GRAMMAR, PREFIX, OWNER, CHOICES)

KILL_SLACK = 256
"""The most tokens of one answer that a gateway's socket may hold when the gateway is killed. The case D9 allows none of
those that a harness has seen."""
LEFT_SLACK = 64
"""The most tokens of one answer that a socket may hold when the gateway closes it, beside one event of the stream."""

Breaches = dict[str, list[str]]


def check(
    answers: Sequence[Answer], sessions: Sequence[Books], owners: Mapping[str, str] | None = None
) -> tuple[Breaches, Counter[str]]:
    """Return the breaches of each law, and figures. `owners`: a text in a request -> the session that asked it."""
    breaches: Breaches = {law: [] for law in LAWS}
    found = match(answers, [call for books in sessions for call in books.calls])
    breaches[BOOKED] += _unbooked(found)
    breaches[PROMPTS] += _other_prompts(found)
    breaches[LOGPROBS] += _other_logprobs(found)
    breaches[GRAMMAR] += _grammars(found, sessions)
    breaches[ONCE] += _trained_again(sessions)
    for books in sessions:
        breaches[ONCE] += _misplaced(books)
        breaches[BALANCE] += _balance(books)
        breaches[PREFIX] += _prefixes(books)
        breaches[OWNER] += _owners(books, owners or {})
        breaches[CHOICES] += _choices(books)
    return breaches, _figures(answers, sessions, found)


def _name(answer: Answer) -> str:
    return f"answer {answer.number} ({answer.path.rsplit('/', 1)[-1]}, {answer.end})"


def _unbooked(found: Matches) -> Iterator[str]:
    for answer in found.answers:
        if len(answer.sent.ids) > _slack(answer):
            yield f"{_name(answer)}: {len(answer.sent.ids)} tokens are in no call"
    for answer, call in found.pairs:
        due, held = answer.sent.ids, call.ids
        same = common(answer.given.ids, held)
        if same < len(held):
            yield f"{_name(answer)}: call {call.call_id} has other ids from place {same} of {len(due)} on"
        elif len(held) < len(due) - _slack(answer):
            yield f"{_name(answer)}: call {call.call_id} ({call.outcome}) holds {len(held)} of {len(due)} tokens"
    for call in found.calls:
        yield f"call {call.call_id}: {len(call.ids)} tokens that the engine gave to no other call, or never gave"


def _slack(answer: Answer) -> int:
    """Return how many tokens may have been in network buffers when the gateway left."""
    if answer.death is not None:
        return KILL_SLACK + answer.sent_to_the_dead
    return LEFT_SLACK + answer.interval if answer.end == "client gone" else 0


def _other_prompts(found: Matches) -> Iterator[str]:
    for answer, call in found.pairs:
        given = answer.given.prompt or []
        if given != call.prompt:
            place = common(given, call.prompt)
            yield f"{_name(answer)}: call {call.call_id} has another prompt from place {place} of {len(given)} on"


def _other_logprobs(found: Matches) -> Iterator[str]:
    for answer, call in found.pairs:
        wrong = wrong_logprobs(answer, call)
        if wrong or len(call.logprobs) != len(call.ids):
            yield f"{_name(answer)}: call {call.call_id} has {len(wrong)} other logprobs of {len(call.logprobs)}"


def _grammars(found: Matches, sessions: Sequence[Books]) -> Iterator[str]:
    trained = {call_id for books in sessions for call_id, count in _trained(books).items() if count}
    for answer, call in found.pairs:
        if answer.grammar and call.call_id in trained:
            yield f"{_name(answer)}: call {call.call_id} is trained, though sampled under {', '.join(answer.grammar)}"


def _spans(books: Books, trace: Trace) -> Iterator[tuple[Call | None, str, int, int]]:
    """Yield each call of a trace with the beginning and the end of its span in the trace's response."""
    by_id = {call.call_id: call for call in books.calls}
    for call_id in trace.call_ids:
        call = by_id.get(call_id)
        start = len(call.prompt) - len(trace.prompt) if call else 0
        yield call, call_id, start, start + (len(call.ids) if call else 0)


def _choices(books: Books) -> Iterator[str]:
    """Hold the records of a session against the choices of the stand-in, where the session has any."""
    if not any(call.line.get("routed_experts") for call in books.calls):
        return
    for trace in books.traces:
        ids, told = [*trace.prompt, *trace.ids], trace.line["routed_experts"]
        if told is None or not np.array_equal(from_npy(told), experts_of(ids)[:-1]):
            yield f"trace {trace.trace_id}: other experts than the engine's, or none"
        mask = trace.line["sampling_mask"] or {"offsets": [0] * (len(trace.ids) + 1), "token_ids": []}
        kept = [mask["token_ids"][start:end] for start, end in pairwise(mask["offsets"])]
        due = [
            kept_at(len(trace.prompt) + place, token) if trained else []
            for place, (token, trained) in enumerate(zip(trace.ids, trace.mask, strict=True))
        ]
        if kept != due:
            yield f"trace {trace.trace_id}: other sets than the engine's"


def _trained(books: Books) -> Counter[str]:
    """Return how many tokens of each call are trained, over all traces."""
    counted: Counter[str] = Counter()
    for trace in books.traces:
        for _, call_id, start, end in _spans(books, trace):
            counted[call_id] += sum(trace.mask[max(0, start) : end])
    return counted


def _trained_again(sessions: Sequence[Books]) -> Iterator[str]:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for books in sessions:
        for trace in books.traces:
            for _, call_id, start, end in _spans(books, trace):
                if any(trace.mask[max(0, start) : end]):
                    places[call_id].append(trace.trace_id)
    for call_id, traces in places.items():
        if len(traces) > 1:
            yield f"call {call_id} is trained {len(traces)} times: in {', '.join(traces)}"


def _misplaced(books: Books) -> Iterator[str]:
    for trace in books.traces:
        name = f"trace {trace.trace_id}"
        if not len(trace.ids) == len(trace.mask) == len(trace.logprobs):
            yield f"{name}: {len(trace.ids)} ids, {len(trace.mask)} mask values, {len(trace.logprobs)} logprobs"
            continue
        owned = [False] * len(trace.ids)
        for call, call_id, start, end in _spans(books, trace):
            if call is None or start < 0:
                continue
            owned[start:end] = [True] * (end - start)
            trained = sum(trace.mask[start:end])
            if trained not in (0, end - start):
                yield f"{name}: the mask has {trained} of the {end - start} tokens of call {call_id}"
            pairs = zip(trace.logprobs[start:end], call.logprobs, trace.mask[start:end], strict=False)
            wrong = sum(bool(mask) and not same_logprob(one, other) for one, other, mask in pairs)
            if wrong:
                yield f"{name}: {wrong} logprobs of call {call_id} are not those of its record"
        outside = sum(mask for mask, own in zip(trace.mask, owned, strict=True) if not own)
        if outside:
            yield f"{name}: {outside} tokens are trained that no call sampled there"


def _balance(books: Books) -> Iterator[str]:
    told = books.fidelity
    if not told:
        return
    trained = _trained(books)
    excluded: Counter[str] = Counter(told["excluded"])
    facts = {
        "sampled_tokens": sum(len(call.ids) for call in books.calls),
        "trainable_tokens": sum(sum(trace.mask) for trace in books.traces),
        "calls": len(books.calls),
    }
    for name, fact in facts.items():
        if told[name] != fact:
            yield f"session {books.session_id}: {name} is told as {told[name]} and is {fact}"
    untrained = sum(len(call.ids) for call in books.calls if not trained[call.call_id])
    if excluded.total() != untrained:
        yield f"session {books.session_id}: {excluded.total()} tokens are excluded by name, {untrained} are not trained"
    if set(excluded) == {"not_built"}:
        return
    cut_off = [call for call in books.calls if call.outcome in CUT_OFF]
    for outcome in (*CUT_OFF, "time"):
        named = (call for call in cut_off if outcome == ("time" if _by_time(call) else call.outcome))
        fact = sum(len(call.ids) for call in named)
        if excluded[outcome] != fact:
            yield f"session {books.session_id}: {excluded[outcome]} tokens are told as {outcome}, {fact} are"
    for call in cut_off:
        if trained[call.call_id]:
            yield f"session {books.session_id}: call {call.call_id} is {call.outcome} and trained"


def _by_time(call: Call) -> bool:
    return call.line.get("error_kind") == "time"


def _prefixes(books: Books) -> Iterator[str]:
    for trace in books.traces:
        sequence = trace.prompt + trace.ids
        before = 0
        for call, call_id, _, _ in _spans(books, trace):
            name = f"trace {trace.trace_id}: call {call_id}"
            if call is None:
                yield f"{name} is in no journal"
                continue
            seen = call.prompt + call.ids
            if sequence[: len(seen)] != seen:
                yield f"{name} was sampled after other ids, from place {common(sequence, seen)} on"
            if len(call.prompt) < before:
                yield f"{name} stands before the call that it continues"
            before = len(seen)


def _owners(books: Books, owners: Mapping[str, str]) -> Iterator[str]:
    for call in books.calls:
        if call.session_id != books.session_id:
            yield f"call {call.call_id}: of session {call.session_id}, in the books of {books.session_id}"
        for marker in _markers(call):
            owner = owners.get(marker)
            if owner is not None and owner != books.session_id:
                yield f"call {call.call_id}: {marker} was asked by session {owner}, not by {books.session_id}"


def _markers(call: Call) -> Iterable[str]:
    words = str(call.line["messages"]).split()
    return {word for word in words if word.startswith("asked-")}


def _figures(answers: Sequence[Answer], sessions: Sequence[Books], found: Matches) -> Counter[str]:
    figures: Counter[str] = Counter()
    for answer in answers:
        figures["engine answers"] += answer.own is None
        figures["tokens for the gateway's own requests" if answer.own else "tokens that the engine gave"] += len(
            answer.given.ids
        )
        figures["tokens sent to the gateway"] += 0 if answer.own else len(answer.sent.ids)
        figures[f"answers that ended: {answer.end}"] += answer.own is None
    for books in sessions:
        figures["sessions"] += 1
        figures["calls"] += len(books.calls)
        figures["traces"] += len(books.traces)
        figures["traces with experts"] += sum(bool(trace.line.get("routed_experts")) for trace in books.traces)
        figures["tokens in the books"] += sum(len(call.ids) for call in books.calls)
        figures["tokens trained"] += sum(sum(trace.mask) for trace in books.traces)
        for reason, count in (books.fidelity.get("excluded") or {}).items():
            figures[f"tokens excluded: {reason}"] += count
    figures["tokens sent and not in the books"] = sum(
        max(0, len(answer.sent.ids) - len(call.ids)) for answer, call in found.pairs
    ) + sum(len(answer.sent.ids) for answer in found.answers)
    return figures
