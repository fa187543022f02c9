"""The assistant message in chat form, the same from every engine, and the text of any message."""

from __future__ import annotations

import json
import re
from typing import Any

from polar_gym.schema import Message

LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def canonical_json(value: Any) -> str:
    """Return JSON as chat templates print it: `", "` and `": "`, keys in order of insertion, non-ASCII characters
    kept. Lone surrogates stay escaped, because they have no UTF-8 form."""
    return LONE_SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", json.dumps(value, ensure_ascii=False))


def assistant_message(content: str | None, reasoning: str | None, tool_calls: list[dict[str, Any]]) -> Message:
    """Return an assistant message. `content` is always a key, and None where the answer is nothing but calls. The other
    keys are left out where they would be empty."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning"] = reasoning
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message


def text_of(message: Message, joiner: str = "") -> str:
    """Return the text of a message's content, its parts joined. Parts without text are left out."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return joiner.join(part["text"] for part in content if isinstance(part.get("text"), str))
