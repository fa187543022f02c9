"""Which recorded call answers a request, when a session starts from the record of another one.

A request asks for a recorded call if it continues the same call, and if its messages and tools are those of the record.
The results of tools may differ: tools really run again. Each difference is returned, with the outcome of a comparison
that ignores times, dates, durations, process ids, hashes and temporary paths. In system text, user text and tool
descriptions only the volatile fields may differ that the harness's file names. Handles are those of the record
(`handles`), and a notice of the harness may come with another request of its conversation. All else must be equal.

A request that continues a call of which the record has no more continuations is new: the engine answers it. A request
that the record has in another form is a divergence. Conversations are matched separately, in any order of arrival.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import orjson

from polar_gym.schema import Message, ModelCall, Replayed, ToolDefinition, ToolDifference
from polar_gym.splicing.conversation import canonical
from polar_gym.splicing.handles import Handles

VOLATILE_LENGTH = 200
"""Characters of the longest text that a volatile field may stand for."""

_CHANGES = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)?"  # dates and times
    r"|\b\d{1,2}:\d\d(?::\d\d)?(?:[.,]\d+)?\b"
    r"|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\w*,? +(?:\d{1,2} )?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\w*"
    r"(?: +\d{1,2})?(?:,? +\d{4})?\b"
    r"|\b\d+(?:\.\d+)? ?(?:ns|us|µs|ms|s|sec|secs|seconds?)\b"  # durations
    r"|(?i:\b(?:pid|pgid|process(?: group)?(?: id)?)s?\b\W{0,4}(?:pgid\W{0,3})?\d+)"  # process ids
    r"|/(?:var/)?tmp/[^\s\"'`:,;)\]]+"  # temporary paths
    r"|\b0x[0-9a-fA-F]+\b|\b(?=[0-9a-f]*\d)[0-9a-f]{6,64}\b"  # addresses and hashes
)


class DivergenceError(Exception):
    """A request differs from the record. The text names the recorded call and the part that differs."""


@dataclass(slots=True)
class Recording:
    """The calls of a recorded session, and which of them were given out. `find` gives each out once."""

    session_id: str
    model: str
    """The engine's name of the model that sampled the record."""
    owned: bool
    volatile: Mapping[str, re.Pattern[str]]
    live_when_divergent: bool
    calls: Sequence[ModelCall]
    """All calls of the record, in the order of their indices, with messages in the engine's terms."""
    limit: int | None
    """How many of the delivered calls may be given out; None: all."""
    handles: Handles = field(default_factory=Handles)
    notice: re.Pattern[str] | None = None
    """See `Harness.notice`."""
    seconds: float = 0.0
    """How much of the agent's time the earlier attempts used, until the last call of each."""
    waiting: dict[str, ModelCall] = field(init=False)
    """The calls that are to be given out, by id."""
    left_out: list[ModelCall] = field(init=False)
    """The calls that are never given out and belong to the session's books, or come before the last one given out."""
    new_indices: Iterator[int] = field(init=False)
    """The indices of calls that the engine answers: all come after those of the record."""

    def __post_init__(self) -> None:
        delivered = [call for call in self.calls if call.outcome == "delivered"]
        self.waiting = {call.call_id: call for call in delivered[: self.limit]}
        last = max((call.index for call in self.waiting.values()), default=-1)
        others = [call for call in self.calls if call.call_id not in self.waiting]
        self.left_out = others if self.owned else [call for call in others if call.index < last]
        self.new_indices = itertools.count(max([last, *(call.index for call in self.left_out)]) + 1)

    @property
    def state(self) -> tuple[int | None, ...]:
        """Return the state that a branch starts from: how many calls it has of the record, and the seed of the first
        call that the recorded session sampled itself; that seed is of no other session. Empty where the session goes on
        with its own record: its seeds go on, too."""
        if self.owned:
            return ()
        own = (call for call in self.calls if call.branched_from is None)
        return self.limit, next((call.sampling.get("seed") for call in own), None)

    def find(
        self, parent_id: str | None, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> tuple[ModelCall, Replayed] | None:
        """Return the recorded call that a request asks for, and how the request differs; None: the request is new.

        `parent_id`: the call that the request continues. `messages` are in the engine's terms. Raises
        `DivergenceError`; with `live_when_divergent` the request is new instead.
        """
        alike = [call for call in self.waiting.values() if call.parent_id == parent_id]
        causes, found = [], []
        for call in alike:
            how = self._compare(call, messages, tools)
            if isinstance(how, Replayed):
                found.append((_weight(how), call.index, call, how))
            else:
                causes.append(f"call {call.index}: {how}")
        if found:
            _, _, call, how = min(found, key=lambda each: each[:2])
            del self.waiting[call.call_id]
            for said, recorded in zip(self._lasting(messages), self._lasting(call.messages), strict=True):
                if said["role"] == "tool":
                    _add(how.volatile, self.handles.learn(_text(said), _text(recorded)))
            return call, how
        others = (call for call in self.calls if call.call_id not in self.waiting and call.parent_id == parent_id)
        new = not causes or any(isinstance(self._compare(call, messages, tools), Replayed) for call in others)
        if new or self.live_when_divergent:
            return None
        raise DivergenceError(f"the request is none of those in the record of {self.session_id}: {'; '.join(causes)}")

    def _compare(self, call: ModelCall, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> Replayed | str:
        """Return how a request differs from that of a recorded call, or why the request is another one."""
        lasting = [place for place, message in enumerate(call.messages) if not self._is_notice(message)]
        there, here = [call.messages[place] for place in lasting], self._lasting(messages)
        now, then = [message["role"] for message in here], [message["role"] for message in there]
        if now != then:
            place = next(
                (i for i, (a, b) in enumerate(zip(now, then, strict=False)) if a != b), min(len(now), len(then))
            )
            return f"roles differ at message {place}: {now[place:][:1]} in place of {then[place:][:1]}"
        how = Replayed(session_id=self.session_id, owned=self.owned)
        if call.branched_from is not None:  # the recorded session was branched itself
            how = Replayed(session_id=call.branched_from, owned=False)
        notices, recorded_notices = self._notices(messages), self._notices(call.messages)
        moved = (notices - recorded_notices) + (recorded_notices - notices)
        _add(how.volatile, Counter(notice=moved.total()))
        new = max((place for place, message in enumerate(call.messages) if message["role"] == "assistant"), default=-1)
        for place, said, recorded in zip(lasting, here, there, strict=True):
            if said == recorded or canonical(said) == canonical(recorded):
                continue
            framed = _without_content(said) == _without_content(recorded)
            if said["role"] == "tool" and framed:
                if place > new:
                    how.differences.append(_difference(place, _text(recorded), _text(said)))
                continue
            texts = (_text(said), _text(recorded))
            if (
                said["role"] not in ("system", "user")
                or not framed
                or not self._equal_but_volatile(*texts, how.volatile)
            ):
                return f"the text of message {place} ({said['role']}) differs"
        described, recorded_tools = (
            orjson.dumps(list(each), option=orjson.OPT_SORT_KEYS).decode() for each in (tools, call.tools)
        )
        if described != recorded_tools and not self._equal_but_volatile(described, recorded_tools, how.volatile):
            return "the tools differ"
        return how

    def _equal_but_volatile(self, said: str, recorded: str, counts: dict[str, int]) -> bool:
        """Return whether two texts are equal but for the volatile fields, whose differences are added to `counts`."""
        used: dict[str, int] = {}
        for name, pattern in self.volatile.items():
            pairs = zip(pattern.findall(said), pattern.findall(recorded), strict=False)
            different = sum(one != other for one, other in pairs)
            if different:
                used[name] = different
            said, recorded = (pattern.sub(partial(_stands_in, f"<{name}>"), text) for text in (said, recorded))
        if said != recorded:
            return False
        _add(counts, used)
        return True

    def with_notices(self, messages: Sequence[Message], parent: ModelCall, new: Sequence[Message]) -> list[Message]:
        """Return the new messages of a request that continues `parent`, with the notices that `messages`, the whole
        request, has beyond those of the record."""
        missing = self._notices(messages) - self._notices(parent.messages)

        def is_due(notice: Message) -> bool:
            missing[canonical(notice)] -= 1
            return missing[canonical(notice)] >= 0

        kept = [message for message in new if not self._is_notice(message) or is_due(message)]
        return kept + [message for message in messages if self._is_notice(message) and is_due(message)]

    def _notices(self, messages: Sequence[Message]) -> Counter[bytes]:
        return Counter(canonical(message) for message in messages if self._is_notice(message))

    def _lasting(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages that are no notices."""
        return [message for message in messages if not self._is_notice(message)]

    def _is_notice(self, message: Message) -> bool:
        return self.notice is not None and message["role"] == "user" and bool(self.notice.fullmatch(_text(message)))


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        if count:
            counts[name] = counts.get(name, 0) + count


def _stands_in(name: str, found: re.Match[str]) -> str:
    """Return the text in place of a volatile field; a match that is too long or spans lines is no such field."""
    return found[0] if len(found[0]) > VOLATILE_LENGTH or "\n" in found[0] else name


def _weight(how: Replayed) -> int:
    return sum(1 if difference.only_volatile else 1000 for difference in how.differences)


def _without_content(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "content" and value not in (None, [], {})}


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else orjson.dumps(content, option=orjson.OPT_SORT_KEYS).decode()


def _difference(place: int, recorded: str, said: str) -> ToolDifference:
    shorter = min(len(recorded), len(said))
    start = next((i for i in range(shorter) if recorded[i] != said[i]), shorter)
    end = next((i for i in range(shorter - start) if recorded[-1 - i] != said[-1 - i]), shorter - start)
    only_volatile = normal(recorded) == normal(said)
    characters = max(len(recorded), len(said)) - start - end
    return ToolDifference(message=place, characters=characters, only_volatile=only_volatile)


def normal(text: str) -> str:
    """Return a tool's output without the parts that change from run to run: times, dates, durations, process ids,
    hashes and temporary paths."""
    return _CHANGES.sub("<>", text)
