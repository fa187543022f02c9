"""Finds the tool calls that the policy attempted, and says what the engine's parser made of each.

Each opening marker among the sampled ids begins an attempt, also where the parsed message has no call for the marker.
Where the ids show no marker, the message's text is searched, because parsers leave broken calls there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator
from jsonschema.validators import create
from numpy.typing import NDArray

from polar_gym.schema import Message, ModelCall, ToolAttempt, ToolStatus

MARKERS: dict[str, str | None] = {
    "<tool_call>": "</tool_call>",  # Hermes, Qwen (JSON and XML), GLM, ERNIE, Granite 4
    "[TOOL_CALLS]": None,  # Mistral
    "<|python_tag|>": None,  # Llama 3
    "<|python_start|>": "<|python_end|>",  # Llama 4
    "<｜tool▁call▁begin｜>": "<｜tool▁call▁end｜>",  # DeepSeek
    "<|tool_call_begin|>": "<|tool_call_end|>",  # Kimi
    "<minimax:tool_call>": "</minimax:tool_call>",
    "<TOOLCALL>": "</TOOLCALL>",  # Nemotron
    "<|START_ACTION|>": "<|END_ACTION|>",  # Command
}
"""Opening marker of a tool call -> closing marker; None where the call ends at the next marker, or with the answer."""

_CHECKED = (
    *("type", "enum", "const", "properties", "required", "additionalProperties", "items", "anyOf", "oneOf", "allOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems"),
)
"""Keywords of a schema. References and regular expressions are left out: the agent may write a schema that takes
forever."""
_Validator = create({}, {name: Draft202012Validator.VALIDATORS[name] for name in _CHECKED})
MAX_SCHEMA = 30_000
"""Characters of the longest schema that is checked."""


def tool_attempts(call: ModelCall, markers: Mapping[int, str]) -> list[ToolAttempt]:
    """Return the attempts in an answer to a call with tools. `markers`: the tokens of the engine that are markers."""
    message = call.response or {}
    functions = [made["function"] for made in message.get("tool_calls") or []]
    tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in call.tools}
    spans = _spans(call.response_ids, markers)
    broken = max(0, len(spans) - len(functions)) if spans else _left_in_text(message, tools)
    attempts = [ToolAttempt(call_id=call.call_id, status=_status(each, tools), name=each["name"]) for each in functions]
    attempts += [ToolAttempt(call_id=call.call_id, status="malformed") for _ in range(broken)]
    if len(spans) == len(attempts) and not (functions and broken):  # else which span is whose is not known
        for attempt, span in zip(attempts, spans, strict=True):
            attempt.span = span
    return attempts


def _spans(ids: NDArray[np.int32], markers: Mapping[int, str]) -> list[tuple[int, int]]:
    """Return the spans from each opening marker to its closing one, else to the next marker or the answer's end."""
    found = [(place, markers[int(ids[place])]) for place in np.flatnonzero(np.isin(ids, list(markers))).tolist()]
    return [
        (start, end + (following == MARKERS[word]))
        for (start, word), (end, following) in pairwise([*found, (len(ids), "")])
        if word in MARKERS
    ]


def _left_in_text(message: Message, names: Iterable[str]) -> int:
    """Return how many attempts the text shows, by markers or as a bare call of a tool (pythonic, or JSON)."""
    content = str(message.get("content") or "")
    text = f"{message.get('reasoning') or ''}\n{content}"
    name = "|".join(map(re.escape, names))
    bare = rf'\s*(?:\[(?:{name})\(|\{{\s*"name"\s*:\s*"(?:{name})")'
    return sum(map(text.count, MARKERS)) or int(re.match(bare, content) is not None)


def _status(function: Mapping[str, Any], tools: Mapping[str, Any]) -> ToolStatus:
    if function["name"] not in tools:
        return "unknown_tool"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, TypeError, RecursionError):
        return "malformed"
    if not isinstance(arguments, dict):
        return "malformed"
    return "ok" if _accepts(tools[function["name"]], arguments) else "schema_violation"


def _accepts(schema: Any, arguments: dict[str, Any]) -> bool:
    """Return whether a schema accepts the arguments. A schema that cannot be checked accepts all."""
    try:
        described = str(schema)
        unbounded = len(described) > MAX_SCHEMA or "'patternProperties'" in described
        return unbounded or _Validator(schema).is_valid(arguments)
    except Exception:  # noqa: BLE001 - for schemas that are none, jsonschema raises errors of many kinds
        return True
