"""The end of a conversation, in a few short lines for a person who watches."""

from __future__ import annotations

from collections.abc import Sequence

from polar_gym.chat.messages import text_of
from polar_gym.schema import ModelCall

LINES, CHARACTERS = 4, 300


def last_lines(calls: Sequence[ModelCall]) -> list[tuple[str, str]]:
    """Return role and text of the latest call's last messages, its answer included. A long text keeps its end."""
    if not calls:
        return []
    call = calls[-1]
    lines: list[tuple[str, str]] = []
    for message in [*call.messages[-LINES:], *([call.response] if call.response else [])]:
        texts = [message.get("reasoning") or "", text_of(message, "\n")]
        texts += [
            f"{made['function']['name']} {made['function']['arguments']}" for made in message.get("tool_calls") or []
        ]
        lines += [(str(message.get("role")), text[-CHARACTERS:]) for text in texts if text]
    return lines[-LINES:]
