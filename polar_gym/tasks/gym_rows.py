"""Reads rows in NeMo Gym's form: `responses_create_params` with `input` and `tools`, and fields of the environment.

A command-line agent takes one instruction. It is made of the row's messages: those of the system and of the developer,
then those of the user. The row itself goes to the environment's server as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SPEAKERS = ("system", "developer", "user")
_TEXT = ("input_text", "text")


def is_gym_row(row: Mapping[str, Any]) -> bool:
    return "responses_create_params" in row and "problem_statement" not in row


def of_gym_row(place: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a task. Its id is the row's `instance_id`, or follows from the row's content.

    Raises `ValueError` that names the place and the field.
    """
    try:
        digest = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]
    except TypeError as error:  # Parquet has more types; the environment's server takes JSON
        raise ValueError(f"{place}: {error}; write the columns of such values as text") from error
    params = row["responses_create_params"]
    if not isinstance(params, Mapping) or not isinstance(params.get("input"), str | list):
        raise ValueError(f"{place}: responses_create_params.input: expected a text or a list of messages")
    return {
        "instance_id": row.get("instance_id") or f"gym-{digest}",
        "problem_statement": _instruction(f"{place}: responses_create_params", params),
        "gym_row": dict(row),
        **{name: row[name] for name in ("image", "workspace") if name in row},
    }


def _instruction(place: str, params: Mapping[str, Any]) -> str:
    given = params["input"]
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    texts = [("system", str(params["instructions"]))] if params.get("instructions") else []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in SPEAKERS:
            raise ValueError(
                f"{place}.input[{number}]={str(message)[:100]}: a command-line agent takes one instruction, made of "
                f"messages of {', '.join(SPEAKERS)}; leave out rows that begin in mid-conversation"
            )
        texts.append((message["role"], _text(f"{place}.input[{number}].content", message.get("content"))))
    return "\n\n".join(text for _, text in sorted(texts, key=lambda each: each[0] == "user"))


def _text(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, Mapping) and part.get("type") in _TEXT for part in parts):
        raise ValueError(f"{place}: expected text, got {str(content)[:100]}; a command-line agent is given text alone")
    return "\n".join(str(part.get("text", "")) for part in parts)
