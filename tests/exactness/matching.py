"""Finds the call in the books that belongs to each answer of the engine, by its tokens alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.exactness.books import Call, same_logprob
from tests.exactness.recording import Answer


@dataclass(slots=True)
class Matches:
    """Answers beside their calls, and what is left of either."""

    pairs: list[tuple[Answer, Call]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    """Answers of which tokens were sent to the gateway, and which no call holds."""
    calls: list[Call] = field(default_factory=list)
    """Calls with tokens that no answer gave."""


def match(answers: Iterable[Answer], calls: Sequence[Call]) -> Matches:
    """Pair answers and calls, each at most once: by prompt and all tokens, then by prompt and first tokens, then by ids
    alone."""
    left = [answer for answer in answers if answer.given.ids and answer.own is None]
    free = [call for call in calls if call.ids]
    found = Matches()
    for key_of_answer, key_of_call in SAME:
        left, free = _pair(found, left, free, key_of_answer, key_of_call)
    left, free = _pair_beginnings(found, left, free)
    left, free = _pair(found, left, free, lambda answer: tuple(answer.sent.ids), lambda call: tuple(call.ids))
    # a call without tokens may still be the record of an answer whose tokens were lost
    empty = [call for call in calls if not call.ids and call.prompt]
    left, _ = _pair(
        found, left, empty, lambda answer: tuple(answer.given.prompt or ()), lambda call: tuple(call.prompt)
    )
    found.answers = [answer for answer in left if answer.sent.ids]
    found.calls = free
    return found


def _whole(prompt: Sequence[int] | None, ids: Sequence[int], logprobs: Sequence[float]) -> Any:
    return (tuple(prompt or ()), tuple(ids), tuple(round(value, 4) for value in logprobs))


SAME: tuple[tuple[Callable[[Answer], Any], Callable[[Call], Any]], ...] = (
    (
        lambda answer: _whole(answer.given.prompt, answer.sent.ids, answer.sent.logprobs),
        lambda call: _whole(call.prompt, call.ids, call.logprobs),
    ),
    (
        lambda answer: (tuple(answer.given.prompt or ()), tuple(answer.sent.ids)),
        lambda call: (tuple(call.prompt), tuple(call.ids)),
    ),
)


def _pair(
    found: Matches,
    answers: list[Answer],
    calls: list[Call],
    key_of_answer: Callable[[Answer], Any],
    key_of_call: Callable[[Call], Any],
) -> tuple[list[Answer], list[Call]]:
    """Pair those with equal keys; return the others."""
    waiting: defaultdict[Any, list[Call]] = defaultdict(list)
    for call in calls:
        waiting[key_of_call(call)].append(call)
    left: list[Answer] = []
    taken: set[int] = set()
    for answer in answers:
        candidates = waiting.get(key_of_answer(answer))
        if candidates:
            call = candidates.pop(0)
            taken.add(id(call))
            found.pairs.append((answer, call))
        else:
            left.append(answer)
    return left, [call for call in calls if id(call) not in taken]


def _pair_beginnings(found: Matches, answers: list[Answer], calls: list[Call]) -> tuple[list[Answer], list[Call]]:
    """Pair what has one prompt and begins alike, the longest common beginning first; return the others."""
    by_prompt: defaultdict[tuple[int, ...], list[Call]] = defaultdict(list)
    for call in calls:
        by_prompt[tuple(call.prompt)].append(call)
    left: list[Answer] = []
    taken: set[int] = set()
    for answer in answers:
        here = [call for call in by_prompt.get(tuple(answer.given.prompt or ()), ()) if id(call) not in taken]
        best = max(here, key=lambda call: common(answer.given.ids, call.ids), default=None)
        if best is not None and common(answer.given.ids, best.ids):
            taken.add(id(best))
            found.pairs.append((answer, best))
        else:
            left.append(answer)
    return left, [call for call in calls if id(call) not in taken]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def wrong_logprobs(answer: Answer, call: Call) -> list[int]:
    """Return the places at which a call's logprobs are not those of the engine."""
    pairs = zip(answer.given.logprobs, call.logprobs, strict=False)
    return [place for place, (one, other) in enumerate(pairs) if not same_logprob(one, other)]
