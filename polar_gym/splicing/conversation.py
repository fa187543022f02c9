"""Which known call a new request continues.

A request continues the deepest known call whose history plus answer it extends. An assistant turn is linked to its call
by ids first: tool-call ids and reasoning carriers name the call that they came from. Harnesses hand them back unchanged
while they re-serialise, trim and reorder the text around them. A turn without tool calls is linked by its text, and not
at all where several calls gave that text.

The words of a turn that is linked by ids therefore decide nothing: a turn that came back in other words is only named.
Everything else (system, user, tool results, tools) must be equal, after no more than a lossless canonicalisation: a
loose match would serve a stale context.

Histories are compared by running digests, so a known call costs a few bytes however long its history is.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from polar_gym.chat import LONG
from polar_gym.chat.messages import text_of
from polar_gym.schema import Message, ModelCall, ToolDefinition

Digest = bytes
LINE = orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
"""How a message is written: JSON text has no newline of its own, so that no message can spell the next one."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a request relates to the calls before it."""

    history: Digest
    """Digest of the request's messages, to be given to `Conversations.add` when the request is answered."""
    parent: ModelCall | None
    """The call whose history and answer the request extends; None: a new conversation."""
    new_messages: list[Message] = field(default_factory=list)
    """The messages after the parent's answer."""
    cause: str | None = None
    """Why no parent was found although the request names known calls: `history` (something before the named turn
    differs), `tools`, `partial_turn` (the turn came back without some of its tool calls, or without their results),
    `ambiguous` (several calls gave the answer that a turn without tool calls shows), `unknown_turn` (no call did)."""
    edited_answers: dict[str, list[str]] = field(default_factory=dict)
    """See `ModelCall.edited_answers`."""


@dataclass(slots=True)
class _Known:
    call: ModelCall
    history: Digest
    """Digest of the messages of its request."""
    tools: Digest
    tool_call_ids: tuple[str, ...]
    """As they were minted for the harness."""
    text: str = field(init=False)
    functions: dict[str, dict[str, Any]] = field(init=False)
    """Minted id -> function and arguments of a tool call."""
    identity: bytes = field(init=False)
    """The bytes that stand for the call's turn in the digest of a history."""

    def __post_init__(self) -> None:
        response = self.call.response or {}
        self.text = text_of(response).strip()
        made = (call["function"] for call in response.get("tool_calls") or [])
        self.functions = dict(zip(self.tool_call_ids, made, strict=True))
        encoded = (self.call.call_id if self.tool_call_ids else self.text).encode("utf-8", "surrogatepass")
        self.identity = b"call\0%d\0%b" % (len(encoded), encoded)  # length prefix: text cannot imitate what follows

    def edited_parts(self, turn: Message) -> list[str]:
        """Return the parts of the answer that came back with another meaning. Blanks at the ends, the form of JSON and
        the order of tool calls do not count, nor does reasoning that is left out."""
        edited = ["text"] if text_of(turn).strip() != self.text else []
        reasoning = turn.get("reasoning")
        if reasoning and reasoning.strip() != ((self.call.response or {}).get("reasoning") or "").strip():
            edited.append("reasoning")
        returned = {call["id"]: call["function"] for call in turn.get("tool_calls") or []}
        if self.functions != returned and _meanings(self.functions) != _meanings(returned):
            edited.append("tool_calls")
        return edited


class Conversations:
    """The delivered calls of one session, and which of them a request continues."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._by_tool_call: dict[str, str] = {}
        self._by_text: dict[tuple[Digest, str], list[str]] = {}

    def add(self, call: ModelCall, history: Digest, tool_call_ids: Sequence[str]) -> None:
        """Remember a call whose answer is about to be delivered. `tool_call_ids` are the ids that were minted for the
        harness, `history` is the `Continuation.history` of the call's request."""
        known = _Known(call, history, _digest_of(call.tools), tuple(tool_call_ids))
        self._known[call.call_id] = known
        for minted in tool_call_ids:
            self._by_tool_call[minted] = call.call_id
        if not tool_call_ids and call.response is not None:
            self._by_text.setdefault((history, known.text), []).append(call.call_id)

    def forget(self, call_id: str) -> None:
        """Remove a call whose answer did not reach the harness after all."""
        known = self._known.pop(call_id, None)
        if known is not None and not known.tool_call_ids and known.call.response is not None:
            self._by_text[(known.history, known.text)].remove(call_id)

    def continuation(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        origins: Mapping[int, str],
        long: Mapping[int, bytes] | None = None,
    ) -> Continuation:
        """Return which known call the messages continue. `origins`: see `ChatRequest`. `long`: the `identities_of_long`
        messages, where they are known."""
        walk = self._walk(messages, origins, long or {})
        cause: str | None = None
        for index, known, history in reversed(walk.linked):
            problem = self._problem(known, history, messages, index, tools)
            if problem is None:
                said = [(messages[place], each) for place, each, _ in walk.linked if place <= index]
                edited = {each.call.call_id: parts for turn, each in said if (parts := each.edited_parts(turn))}
                return Continuation(walk.history, known.call, list(messages[index + 1 :]), edited_answers=edited)
            cause = cause or problem
        if self._known:
            cause = cause or walk.unlinked
        return Continuation(walk.history, None, list(messages), cause)

    def _problem(
        self,
        known: _Known,
        history: Digest,
        messages: Sequence[Message],
        index: int,
        tools: Sequence[ToolDefinition],
    ) -> str | None:
        """Return why a conversation cannot go on from a turn that is linked to `known`, or None where it can."""
        if history != known.history:
            return "history"
        returned = [call["id"] for call in messages[index].get("tool_calls") or []]
        if sorted(returned) != sorted(known.tool_call_ids):
            return "partial_turn"
        if not _answered_once(returned, messages[index + 1 :]):
            return "partial_turn"
        return None if _digest_of(tools) == known.tools else "tools"

    def _walk(self, messages: Sequence[Message], origins: Mapping[int, str], long: Mapping[int, bytes]) -> _Walk:
        """Return the linked turns of a history, and its digest.

        In the digest, a linked turn with tool calls counts by its call and not by its words. A turn without tool calls
        counts by the text that the policy said, because a second call with the same text must not change the digests
        of known histories.
        """
        walk = _Walk()
        running = hashlib.blake2b(digest_size=16)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                running.update(long.get(index) or _identity(message))
                continue
            history = running.digest()
            candidates = self._candidates(message, history, origins.get(index))
            if len(candidates) == 1:
                walk.linked.append((index, candidates[0], history))
            else:
                walk.unlinked = "ambiguous" if candidates else "unknown_turn"
            running.update(candidates[0].identity if candidates else _identity(message))
        walk.history = running.digest()
        return walk

    def _candidates(self, message: Message, history: Digest, origin: str | None) -> list[_Known]:
        """Return the calls that a turn may have come from. The turn is linked where exactly one is returned."""
        named = {self._by_tool_call.get(call["id"]) for call in message.get("tool_calls") or []}
        if origin is not None:
            named.add(origin)
        if named:
            known = self._known.get(named.pop() or "")
            return [known] if known is not None and not named else []
        return [self._known[call_id] for call_id in self._by_text.get((history, text_of(message).strip()), [])]


@dataclass(slots=True)
class _Walk:
    linked: list[tuple[int, _Known, Digest]] = field(default_factory=list)
    """Index of each linked turn, its call, and the digest of the messages before it."""
    history: Digest = b""
    unlinked: str | None = None
    """Why the last assistant turn that has no link has none: `ambiguous` or `unknown_turn`."""


async def identities_of_long(messages: Sequence[Message]) -> dict[int, bytes]:
    """Return the bytes that stand for each long message in the digest of a history, by its index. They are made in a
    thread: their hash takes most of the time, and releases the interpreter's lock."""
    long = [index for index, message in enumerate(messages) if _characters(message.get("content")) > LONG]
    return {index: await asyncio.to_thread(_identity, messages[index]) for index in long}


def _characters(value: Any) -> int:
    """Return the length of all texts in a message's content."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict | list):
        return sum(map(_characters, value.values() if isinstance(value, dict) else value))
    return 0


def _identity(message: Message) -> bytes:
    """Return the bytes that stand for a message in the digest of a history."""
    data = canonical(message)
    return data if len(data) <= LONG else hashlib.sha256(data).digest()


def canonical(message: Message) -> bytes:
    """Return the bytes of a message, which differ only where a chat template could tell two messages apart: key order
    does not count, one text block is its string, cache markers and empty fields are left out."""
    if isinstance(message.get("content"), str) and "cache_control" not in message and all(message.values()):
        return orjson.dumps(message, option=LINE)  # the same bytes as below, in less time
    slim: dict[str, Any] = {key: value for key, value in message.items() if value not in (None, [], {})}
    content = slim.get("content", "")
    if isinstance(content, list):
        parts = [{key: value for key, value in part.items() if key != "cache_control"} for part in content]
        is_text = len(parts) == 1 and parts[0].get("type") == "text"
        content = parts[0]["text"] if is_text else parts
    slim["content"] = content
    slim.pop("cache_control", None)
    return orjson.dumps(slim, option=LINE)


def _meanings(functions: Mapping[str, dict[str, Any]]) -> dict[str, tuple[str, Any]]:
    """Return for each tool call the function's name and the value of its arguments, or the text that is not JSON."""
    return {each: (function["name"], _value(function["arguments"])) for each, function in functions.items()}


def _value(arguments: str) -> Any:
    try:
        return orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return arguments


def _answered_once(tool_call_ids: Sequence[str], later: Sequence[Message]) -> bool:
    results = [message.get("tool_call_id") for message in later if message["role"] == "tool"]
    return all(results.count(tool_call_id) == 1 for tool_call_id in tool_call_ids)


def _digest_of(tools: Sequence[ToolDefinition]) -> Digest:
    return hashlib.blake2b(orjson.dumps(list(tools), option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
