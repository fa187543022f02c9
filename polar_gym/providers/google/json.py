"""What Google's JSON asks of a reader: both spellings of a field's name, and bytes in either base64 alphabet.

Every message of Google's is protocol-buffer JSON, so `inlineData` may also be sent as `inline_data`. Only the messages'
own fields are spelled that way: tool arguments, tool results and schemas' property names are somebody's data.
"""

from __future__ import annotations

import re
from typing import Any

from polar_gym.providers.fields import expect, objects, optional, required

_UNDERSCORE = re.compile(r"(?<=[a-z0-9])_([a-z0-9])")
_URL_SAFE = str.maketrans("-_", "+/")


def camel(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its own fields' names in camelCase; what is in them is left alone."""
    return {_UNDERSCORE.sub(lambda found: found[1].upper(), name): value for name, value in message.items()}


def message_at(container: dict[str, Any], key: str, path: str = "") -> dict[str, Any]:
    """An optional message; an absent one has no fields."""
    return camel(optional(container, key, dict, path) or {})


def messages_at(container: dict[str, Any], key: str, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """An optional list of messages, each with its own path. One message alone is as good as a list of one."""
    value = container.get(key)
    given = {key: [value]} if isinstance(value, dict) else container
    return [(message_path, camel(message)) for message_path, message in objects(given, key, path)]


def base64_at(container: dict[str, Any], key: str, path: str) -> str:
    """Base64 text, in the alphabet that data URLs use."""
    return required(container, key, str, path).translate(_URL_SAFE)


def strings_at(container: dict[str, Any], key: str, path: str) -> list[str]:
    values = optional(container, key, list, path) or []
    return [expect(value, str, f"{path}.{key}[{i}]") for i, value in enumerate(values)]
