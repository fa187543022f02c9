"""The ids that leave with an answer, and how they are read when they come back.

Harnesses re-serialise, trim and reorder the text of an answer, but hand every id back unchanged. Therefore each id that
leaves names the call of its answer, and a later request is linked to its calls by id first. Call ids cannot be guessed,
and so these ids cannot either: one id of a session says nothing about the ids of another.

Ids are made, read, and translated back to the ids of the engine in this module only.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

from polar_gym.schema import Message

_ITEM = re.compile(r"[a-z]+_(?P<call>.+)_\d+", re.ASCII)
_ANSWER = re.compile(r"(?:chatcmpl-|resp_)(?P<call>.+)")


def item(prefix: str, call_id: str, index: int) -> str:
    """Return the id of a part of an answer, e.g. `msg_<call_id>_1`. `prefix` is lower-case letters."""
    return f"{prefix}_{call_id}_{index}"


def tool_call(call_id: str, index: int) -> str:
    """Return the id of the answer's tool call number `index`, counted from 0."""
    return item("call", call_id, index)


def call_of(minted: str) -> str | None:
    """Return the call that `minted` names, or None for an id that was not minted here.

    Text that only looks minted gives an unknown call id: the caller has to look the call up.
    """
    match = _ANSWER.fullmatch(minted) or _ITEM.fullmatch(minted)
    return match["call"] if match else None


def carrier(call_id: str, index: int, text: str) -> str:
    """Return an opaque string that names the call and carries `text`, for wire formats whose clients hand such strings
    back untouched (`encrypted_content`). The string holds no secret: the client has just received the same text."""
    return f"{item('carrier', call_id, index)}.{base64.urlsafe_b64encode(text.encode()).decode()}"


def carried(opaque: str) -> tuple[str, str] | None:
    """Return (call id, text) of a carrier, or None for a string that was not minted here."""
    minted, _, encoded = opaque.partition(".")
    call_id = call_of(minted)
    if call_id is None:
        return None
    try:
        return call_id, base64.b64decode(encoded, altchars=b"-_", validate=True).decode()
    except ValueError:
        return None


class EngineIds:
    """The tool-call ids of one session: minted id -> id that the engine gave. Some chat templates print these ids."""

    def __init__(self) -> None:
        self._own: dict[str, str] = {}

    def mint(self, call_id: str, response: Message | None) -> list[str]:
        """Return the ids under which an answer's tool calls leave, and remember the ids that the engine gave."""
        calls = (response or {}).get("tool_calls") or []
        minted = [tool_call(call_id, index) for index in range(len(calls))]
        self._own.update(zip(minted, (call["id"] for call in calls), strict=True))
        return minted

    def restored(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the ids that the engine gave in place of the minted ids."""
        return [self._restored(message) for message in messages]

    def _restored(self, message: Message) -> Message:
        if message.get("tool_call_id") in self._own:
            return {**message, "tool_call_id": self._own[message["tool_call_id"]]}
        if calls := message.get("tool_calls"):
            own = [{**call, "id": self._own.get(call["id"], call["id"])} for call in calls]
            return {**message, "tool_calls": own}
        return message
