"""Mistakes planted in clean records, each of which the laws must report by name.

Where a mistake would be consistent in a careless gateway, it is planted in journal, trace and balance alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from tests.exactness import laws
from tests.exactness.books import Books, Call, Trace
from tests.exactness.choices import from_npy, to_npy
from tests.exactness.clients import clean_sessions
from tests.exactness.counters import COUNTED, check_counters
from tests.exactness.recording import Answer
from tests.exactness.stage import staged
from tests.exactness.stand_in import StandIn


@dataclass(slots=True)
class Records:
    """All that the laws read: a recording, the books and the engine's counter."""

    answers: list[Answer]
    sessions: list[Books]
    owners: dict[str, str]
    sampled: int

    def breaches(self) -> laws.Breaches:
        found, _ = laws.check(self.answers, self.sessions, self.owners)
        return found | {COUNTED: list(check_counters(self.sampled, self.answers, self.sessions))}

    def trained(self, least: int = 4) -> tuple[Books, Trace, Call, int]:
        """Return a trained call with its books, its trace and the place of its first token in the trace."""
        return next(self._trained(least))

    def two_trained(self) -> tuple[tuple[Books, Trace, Call, int], tuple[Books, Trace, Call, int]]:
        """Return trained calls of two sessions, whose answers begin with different tokens."""
        pairs = combinations(self._trained(4), 2)
        return next((one, two) for one, two in pairs if one[0] is not two[0] and one[2].ids[0] != two[2].ids[0])

    def _trained(self, least: int) -> Iterator[tuple[Books, Trace, Call, int]]:
        for books in self.sessions:
            by_id = {call.call_id: call for call in books.calls}
            for trace in books.traces:
                call = by_id[trace.call_ids[-1]]
                start = len(call.prompt) - len(trace.prompt)
                if len(call.ids) >= least and all(trace.mask[start : start + len(call.ids)]):
                    yield books, trace, call, start


async def clean_records(directory: Path) -> Records:
    """Return the records of sessions in which nothing fails."""
    engine = StandIn()
    await engine.start()
    async with staged(engine.url, directory) as stage:
        await clean_sessions(stage)
        records = Records(stage.answers(), stage.books(), stage.owners, engine.sampled)
    await engine.stop()
    return records


Plant = Callable[[Records], None]
MUTATIONS: dict[str, tuple[str, Plant]] = {}
"""Name -> (the law that must name it, how it is planted)."""
OF_CHOICES: dict[str, tuple[str, Plant]] = {}
"""The same for records with the sampler's choices."""


def _mutation(law: str) -> Callable[[Plant], Plant]:
    def add(plant: Plant) -> Plant:
        planted = OF_CHOICES if law == laws.CHOICES else MUTATIONS
        planted[plant.__name__.strip("_").replace("_", " ")] = (law, plant)
        return plant

    return add


def missed(records: Records, mutations: Mapping[str, tuple[str, Plant]] = MUTATIONS) -> list[str]:
    """Plant each mistake in a copy of the records; return those that their law does not report as one more breach."""
    found, clean = [], records.breaches()
    for name, (law, plant) in mutations.items():
        planted = copy.deepcopy(records)
        plant(planted)
        if len(planted.breaches()[law]) <= len(clean[law]):
            found.append(f"{name}: not reported by the law {law!r}")
    return found


def _told(books: Books, **more: int) -> None:
    for name, count in more.items():
        books.fidelity[name] += count


@_mutation(laws.BOOKED)
def _dropped_token(records: Records) -> None:
    books, trace, call, _ = records.trained()
    for values in (call.ids, call.logprobs, trace.ids, trace.logprobs, trace.mask):
        values.pop()
    _told(books, sampled_tokens=-1, trainable_tokens=-1)


@_mutation(laws.BOOKED)
def _dropped_tail_of_a_call_that_was_left(records: Records) -> None:
    books, call = next(
        (books, call)
        for books in records.sessions
        for call in books.calls
        if call.outcome == "abandoned" and len(call.ids) > 1
    )
    call.ids, call.logprobs = call.ids[:-1], call.logprobs[:-1]
    _told(books, sampled_tokens=-1)
    books.fidelity["excluded"]["abandoned"] -= 1


@_mutation(laws.BOOKED)
def _missing_call(records: Records) -> None:
    books, trace, call, _ = records.trained()
    books.calls.remove(call)
    books.traces.remove(trace)
    _told(books, sampled_tokens=-len(call.ids), trainable_tokens=-len(call.ids), calls=-1, traces=-1)


@_mutation(laws.BOOKED)
def _call_written_twice(records: Records) -> None:
    books, _, call, _ = records.trained()
    again = copy.deepcopy(call)
    again.call_id += "-again"
    books.calls.append(again)
    _told(books, sampled_tokens=len(call.ids), calls=1)


@_mutation(laws.BOOKED)
def _swapped_order(records: Records) -> None:
    _, trace, call, start = records.trained()
    place = next(place for place in range(len(call.ids) - 1) if call.ids[place] != call.ids[place + 1])
    for ids, at in ((call.ids, place), (trace.ids, start + place)):
        ids[at], ids[at + 1] = ids[at + 1], ids[at]


@_mutation(laws.BOOKED)
def _other_token(records: Records) -> None:
    _, trace, call, start = records.trained()
    call.ids[1] ^= 1
    trace.ids[start + 1] ^= 1


@_mutation(laws.BOOKED)
def _invented_token(records: Records) -> None:
    books, trace, call, _ = records.trained()
    for ids, logprobs in ((call.ids, call.logprobs), (trace.ids, trace.logprobs)):
        ids.append(7)
        logprobs.append(-1.0)
    trace.mask.append(1)
    _told(books, sampled_tokens=1, trainable_tokens=1)


@_mutation(laws.PROMPTS)
def _token_of_another_session(records: Records) -> None:
    (_, trace, call, start), (_, other_trace, other, other_start) = records.two_trained()
    for one, two, begin, end in ((call, other, None, None), (trace, other_trace, start, other_start)):
        mine, theirs = one.ids[begin:], two.ids[end:]
        one.ids[begin:], two.ids[end:] = theirs, mine
        mine, theirs = one.logprobs[begin:], two.logprobs[end:]
        one.logprobs[begin:], two.logprobs[end:] = theirs, mine
    for each, at in ((trace, start), (other_trace, other_start)):
        each.mask[at:] = [1] * len(each.ids[at:])


@_mutation(laws.PROMPTS)
def _other_prompt(records: Records) -> None:
    _, trace, call, _ = records.trained()
    call.prompt[0] ^= 1
    trace.prompt[0] ^= 1


@_mutation(laws.LOGPROBS)
def _shifted_logprobs(records: Records) -> None:
    _, trace, call, start = records.trained()
    call.logprobs = call.logprobs[1:] + call.logprobs[:1]
    trace.logprobs[start : start + len(call.ids)] = call.logprobs


@_mutation(laws.LOGPROBS)
def _logprob_a_little_off(records: Records) -> None:
    _, trace, call, start = records.trained()
    call.logprobs[2] -= 1e-4
    trace.logprobs[start + 2] = call.logprobs[2]


@_mutation(laws.ONCE)
def _logprob_of_the_trace_off(records: Records) -> None:
    _, trace, _, start = records.trained()
    trace.logprobs[start + 1] -= 1e-3


@_mutation(laws.ONCE)
def _token_trained_twice(records: Records) -> None:
    books, trace, _, _ = records.trained()
    again = copy.deepcopy(trace)
    again.trace_id += "-again"
    books.traces.append(again)
    _told(books, trainable_tokens=sum(trace.mask), sampled_tokens=sum(trace.mask))


@_mutation(laws.ONCE)
def _hole_in_the_mask(records: Records) -> None:
    books, trace, _, start = records.trained()
    trace.mask[start] = 0
    _told(books, trainable_tokens=-1)
    books.fidelity["excluded"]["failed"] = books.fidelity["excluded"].get("failed", 0) + 1


@_mutation(laws.ONCE)
def _mask_over_tokens_of_the_harness(records: Records) -> None:
    trace, start = next(
        (trace, len(call.prompt) - len(trace.prompt))
        for books in records.sessions
        for trace in books.traces
        for call in books.calls
        if call.call_id == trace.call_ids[-1] and len(trace.call_ids) > 1
    )
    trace.mask[start - 1] = 1


@_mutation(laws.BALANCE)
def _exclusion_that_is_not_told(records: Records) -> None:
    books = next(books for books in records.sessions if books.fidelity["excluded"])
    books.fidelity["excluded"].clear()


@_mutation(laws.BALANCE)
def _cut_off_call_that_is_trained(records: Records) -> None:
    _, _, call, _ = records.trained()
    call.outcome = "failed"


@_mutation(laws.GRAMMAR)
def _token_under_a_grammar(records: Records) -> None:
    _, _, call, _ = records.trained()
    for answer in records.answers:
        if answer.sent.ids == call.ids:
            answer.body |= {"tools": [{"type": "function"}], "tool_choice": "required"}


@_mutation(laws.PREFIX)
def _trace_that_nobody_saw(records: Records) -> None:
    _, trace, _, _ = records.trained()
    trace.prompt[-1] ^= 1


@_mutation(laws.PREFIX)
def _calls_of_a_trace_out_of_order(records: Records) -> None:
    trace = next(trace for books in records.sessions for trace in books.traces if len(trace.call_ids) > 1)
    trace.call_ids.reverse()


@_mutation(laws.OWNER)
def _call_in_the_books_of_another_session(records: Records) -> None:
    (books, trace, call, _), (other, _, _, _) = records.two_trained()
    books.calls.remove(call)
    books.traces.remove(trace)
    other.calls.append(call)
    other.traces.append(trace)


@_mutation(COUNTED)
def _tokens_that_only_the_engine_counted(records: Records) -> None:
    records.sampled += 10_000


@_mutation(laws.CHOICES)
def _experts_shifted_by_a_position(records: Records) -> None:
    _, trace, _, _ = records.trained()
    trace.line["routed_experts"] = to_npy(np.roll(from_npy(trace.line["routed_experts"]), 1, axis=0))


@_mutation(laws.CHOICES)
def _set_of_another_token(records: Records) -> None:
    _, trace, _, _ = records.trained()
    trace.line["sampling_mask"]["token_ids"][-1] += 1
