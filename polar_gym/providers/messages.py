"""Rules of the chat form that more than one wire format needs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from polar_gym.providers import BadRequestError
from polar_gym.providers.fields import required
from polar_gym.schema import Message

_KIND = re.compile(r"data:([\w.+/-]+)[;,]")
"""The beginning of a data URL, with the media type."""


def arranged(messages: list[Message]) -> list[Message]:
    """Return the messages with one system message at their beginning, and with results in the order of their calls."""
    return in_call_order(_merge_leading_system(messages))


def in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each turn's tool results in the order of its calls. Results of no call of it come last.

    Claude Code sends results in the order in which the tools ended, a race. Ids pair them with their calls, but most
    chat templates print no ids: there only the order says which result is that of which call.
    """
    ordered: list[Message] = []
    places: dict[str, int] = {}
    for is_result, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result:
            ordered += sorted(run, key=lambda result: places.get(result["tool_call_id"], len(places)))
        else:
            ordered += run
            places = {call["id"]: place for place, call in enumerate(ordered[-1].get("tool_calls") or [])}
    return ordered


def _merge_leading_system(messages: list[Message]) -> list[Message]:
    """Join the system messages that open a conversation into one, with blank lines between.

    Harnesses send several (instructions, permissions, skills), while chat templates know one. Later system messages
    stay in place. A single one is left exactly as it is.
    """
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    text = "\n\n".join(_text(message["content"]) for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def renumbered(origins: Mapping[int, str], before: Sequence[Message], after: Sequence[Message]) -> dict[int, str]:
    """Return `ChatRequest.origins` for messages whose beginning has become shorter or longer."""
    return {index - len(before) + len(after): origin for index, origin in origins.items()}


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n\n".join(part["text"] for part in content)


def left_out(what: str) -> dict[str, str]:
    """Return the content part that stands for a part that the chat form cannot hold. Clients send such parts because
    the policy opened a file: the policy is told, and the session goes on."""
    return {"type": "text", "text": f"[{what} left out: it cannot be read here]"}


def file_left_out(file: dict[str, Any], path: str) -> dict[str, str]:
    """Return the content part that stands for a file in one of OpenAI's forms. A file that is only named is refused."""
    if file.get("file_data") is None:
        raise BadRequestError(f"{path}.file_data", "is missing; send the file as a data URL, files are not stored")
    kind = _KIND.match(required(file, "file_data", str, path))
    return left_out(kind[1] if kind else "file")


def plain(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the parts of a content, or the text itself where they are a single text."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
