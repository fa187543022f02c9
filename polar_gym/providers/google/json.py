"""Google's JSON, which has two spellings of each field's name and two base64 alphabets.

All messages of Google's API are protocol-buffer JSON, so `inlineData` may also be sent as `inline_data`. This holds
only for the fields of messages: tool arguments, tool results and the property names of schemas are data of the client.
"""

from __future__ import annotations

import re
from typing import Any

from polar_gym.providers.fields import expect, objects, optional, required

_UNDERSCORE = re.compile(r"(?<=[a-z0-9])_([a-z0-9])")
_URL_SAFE = str.maketrans("-_", "+/")


def camel(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the names of its fields in camelCase. The values of the fields are not changed."""
    return {_UNDERSCORE.sub(lambda found: found[1].upper(), name): value for name, value in message.items()}


def message_at(container: dict[str, Any], key: str, path: str = "") -> dict[str, Any]:
    """Return an optional message. An absent one has no fields."""
    return camel(optional(container, key, dict, path) or {})


def messages_at(container: dict[str, Any], key: str, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Return an optional list of messages, each with its path. A message alone counts as a list of one."""
    value = container.get(key)
    given = {key: [value]} if isinstance(value, dict) else container
    return [(message_path, camel(message)) for message_path, message in objects(given, key, path)]


def base64_at(container: dict[str, Any], key: str, path: str) -> str:
    """Return a field's base64 text in the alphabet that data URLs use."""
    return required(container, key, str, path).translate(_URL_SAFE)


def strings_at(container: dict[str, Any], key: str, path: str) -> list[str]:
    values = optional(container, key, list, path) or []
    return [expect(value, str, f"{path}.{key}[{i}]") for i, value in enumerate(values)]
