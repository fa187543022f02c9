"""The ids that leave with an answer, and the way back from them.

Harnesses re-serialise, trim and reorder what a model said, but hand every id back unchanged. So each id that leaves
names the call that it came from, and a later request is linked to its calls by id, never by text. Call ids are
unguessable, hence these are too: knowing one id of a session tells nothing about another's.

This is the one place where ids are made, read, and translated back to the engine's own.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

from polar_gym.schema import Message

_ITEM = re.compile(r"[a-z]+_(?P<call>.+)_\d+", re.ASCII)
_ANSWER = re.compile(r"(?:chatcmpl-|resp_)(?P<call>.+)")


def item(prefix: str, call_id: str, index: int) -> str:
    """The id of a part of an answer, e.g. `msg_<call_id>_1`. `prefix` is lower-case letters."""
    return f"{prefix}_{call_id}_{index}"


def tool_call(call_id: str, index: int) -> str:
    """The id of the answer's tool call number `index`, counted from 0."""
    return item("call", call_id, index)


def call_of(minted: str) -> str | None:
    """The call that `minted` came from; None for an id that was not minted here.

    Text that merely looks minted gives a call id that nobody knows: callers look it up.
    """
    match = _ANSWER.fullmatch(minted) or _ITEM.fullmatch(minted)
    return match["call"] if match else None


def carrier(call_id: str, index: int, text: str) -> str:
    """An opaque string that names the call and carries `text`, for wire formats whose clients hand such strings back
    untouched (`encrypted_content`). Nothing in it is secret: the client has just been told the same text."""
    return f"{item('carrier', call_id, index)}.{base64.urlsafe_b64encode(text.encode()).decode()}"


def carried(opaque: str) -> tuple[str, str] | None:
    """(call id, text) of a carrier; None for a string that was not minted here."""
    minted, _, encoded = opaque.partition(".")
    call_id = call_of(minted)
    if call_id is None:
        return None
    try:
        return call_id, base64.b64decode(encoded, altchars=b"-_", validate=True).decode()
    except ValueError:
        return None


class EngineIds:
    """The tool calls of one session: minted id -> the engine's own. Some templates print the ids."""

    def __init__(self) -> None:
        self._own: dict[str, str] = {}

    def mint(self, call_id: str, response: Message | None) -> list[str]:
        """Return the ids under which an answer's tool calls leave, and remember the engine's own."""
        calls = (response or {}).get("tool_calls") or []
        minted = [tool_call(call_id, index) for index in range(len(calls))]
        self._own.update(zip(minted, (call["id"] for call in calls), strict=True))
        return minted

    def restored(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the engine's own ids in place of the minted ones."""
        return [self._restored(message) for message in messages]

    def _restored(self, message: Message) -> Message:
        if message.get("tool_call_id") in self._own:
            return {**message, "tool_call_id": self._own[message["tool_call_id"]]}
        if calls := message.get("tool_calls"):
            own = [{**call, "id": self._own.get(call["id"], call["id"])} for call in calls]
            return {**message, "tool_calls": own}
        return message
