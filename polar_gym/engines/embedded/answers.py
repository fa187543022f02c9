"""From sampled pieces to an assistant message, as vLLM's reasoning and hermes tool-call parsers make it.

The parser looks at tags, and not at text that happens to spell one: an argument may contain the words `</tool_call>`.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, NamedTuple

from polar_gym.chat.messages import assistant_message, canonical_json
from polar_gym.schema import Message

THINK, END_THINK, CALL, END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
TAGS = (THINK, END_THINK, CALL, END_CALL)


class Piece(NamedTuple):
    """A tag, or text between tags."""

    text: str
    is_tag: bool


def split_tags(text: str) -> list[Piece]:
    """Split plain text into pieces, for tokenizers that may have no tokens for the tags."""
    parts = re.split("(" + "|".join(map(re.escape, TAGS)) + ")", text)
    return [Piece(part, is_tag=part in TAGS) for part in parts if part]


def first_stop(pieces: list[Piece], stop: list[str]) -> tuple[int, str] | None:
    """Return where the first stop string begins, and the string. None where the text has no stop string."""
    text = "".join(piece.text for piece in pieces)
    return min(((position, word) for word in stop if (position := text.find(word)) >= 0), default=None)


def cut_at_stop(pieces: list[Piece], stop: list[str]) -> list[Piece]:
    """Return the pieces before the first stop string."""
    found = first_stop(pieces, stop)
    if found is None:
        return pieces
    kept, left = [], found[0]
    for piece in pieces:
        whole = len(piece.text) <= left
        kept.append(piece if whole else Piece(piece.text[:left], is_tag=False))
        left -= len(piece.text)
        if left <= 0:
            break
    return [piece for piece in kept if piece.text]


def parse_answer(pieces: list[Piece], *, calls: bool, thinking: bool = False) -> Message:
    """Return the assistant message that the pieces say. With `calls` false, tool calls stay text. `thinking`: the
    prompt has opened the thinking already."""
    reasoning, rest = split_reasoning(pieces, thinking=thinking)
    start = next((index for index, piece in enumerate(rest) if piece == (CALL, True)), None)
    if calls and start is not None:
        tool_calls = _tool_calls(rest[start:])
        if tool_calls:
            content = text_of(rest[:start])
            return assistant_message(content if content.strip() else None, reasoning, tool_calls)
    return assistant_message(text_of(rest), reasoning, [])


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def opens_thinking(prompt: list[Piece]) -> bool:
    """Return whether the end of a prompt has opened the answer's thinking, as some chat templates do."""
    spoken = [piece for piece in prompt if piece.text.strip()]
    return bool(spoken) and spoken[-1] == (THINK, True)


def split_reasoning(pieces: list[Piece], *, thinking: bool) -> tuple[str | None, list[Piece]]:
    """Return the reasoning, and the pieces after it.

    Thinking lasts until `</think>`, or to the end of an answer that was cut off. It begins where the answer begins, or
    not at all, so that later tokens do not change the meaning of earlier ones. Within thinking, `<think>` is ignored.
    """
    if not thinking:
        first = next((index for index, piece in enumerate(pieces) if piece.text.strip()), None)
        if first is None or pieces[first] != (THINK, True):
            return None, pieces
        pieces = pieces[first + 1 :]
    end = next((index for index, piece in enumerate(pieces) if piece == (END_THINK, True)), len(pieces))
    return text_of([piece for piece in pieces[:end] if piece != (THINK, True)]), pieces[end + 1 :]


def _tool_calls(pieces: list[Piece]) -> list[dict[str, Any]]:
    """Return every call from the first `<tool_call>` on, or none at all if one call is broken, as vLLM does."""
    bodies: list[str] = []
    inside = False
    for piece in pieces:
        if piece == (CALL, True):
            bodies.append("")
            inside = True
        elif piece == (END_CALL, True):
            inside = False
        elif inside:
            bodies[-1] += piece.text
    try:
        return [_tool_call(json.loads(body)) for body in bodies]
    except (ValueError, TypeError, KeyError):
        return []


def _tool_call(call: Any) -> dict[str, Any]:
    if not isinstance(call["name"], str):
        raise TypeError(f"a function's name is a string, got {call['name']!r}")
    call["name"].encode()  # half an emoji raises UnicodeEncodeError, which is a ValueError
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call["name"], "arguments": canonical_json(call["arguments"])},
    }
