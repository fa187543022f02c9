"""The law between an engine's own counter of sampled tokens and the books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tests.exactness.books import Books
from tests.exactness.recording import Answer

COUNTED = "sampled by the engine = in the books + never sent, by name and within bounds"
BUFFERS = 64
"""The most tokens of one answer that may be in network buffers when its stream is left."""


def never_sent(sampled: int, answers: Sequence[Answer], sessions: Sequence[Books]) -> Counter[str]:
    """Return the tokens that `sampled` counts and the books do not hold, by cause. All are measured but `sampled, never
    streamed`, which is the engine's counter without what the recorder saw and the engine counted by request."""
    causes: Counter[str] = Counter()
    for answer in answers:
        if answer.own is not None:
            causes[f"the gateway's own {answer.own}"] += _counted(answer)
        else:
            causes[f"streamed, not passed on: {answer.end}"] += len(answer.given.ids) - len(answer.sent.ids)
            causes["counted by request, never streamed"] += _counted(answer) - len(answer.given.ids)
    sent = sum(len(answer.sent.ids) for answer in answers if answer.own is None)
    causes["passed on, not in the books"] = sent - sum(len(call.ids) for books in sessions for call in books.calls)
    causes["sampled, never streamed"] = sampled - sum(map(_counted, answers))
    return Counter({cause: count for cause, count in causes.items() if count})


def check_counters(sampled: int, answers: Sequence[Answer], sessions: Sequence[Books]) -> Iterator[str]:
    """Yield the breaches of the law."""
    causes = never_sent(sampled, answers, sessions)
    cut_off = [answer for answer in answers if answer.end != "whole"]
    for answer in cut_off:
        unsent = len(answer.given.ids) - len(answer.sent.ids)
        if unsent > _bound(answer):
            yield f"answer {answer.number} ({answer.end}): {unsent} tokens were given and not passed on"
    for answer in (answer for answer in answers if answer.own is None):
        if (unsent := _counted(answer) - len(answer.given.ids)) > _bound(answer):
            yield f"answer {answer.number} ({answer.end}): the engine counts {unsent} tokens more than it streamed"
    allowed = sum(map(_bound, cut_off))
    unseen = causes["sampled, never streamed"]
    if not 0 <= unseen <= allowed:
        yield f"{unseen} tokens were sampled and never streamed; {len(cut_off)} answers that were left allow {allowed}"


def _counted(answer: Answer) -> int:
    return max(len(answer.given.ids), answer.given.counted or 0)


def _bound(answer: Answer) -> int:
    return answer.interval + BUFFERS
