"""The tools of a Messages request as chat functions.

A tool with an `input_schema` is a function. The tools that Anthropic defines have a dated type and no schema, because
its models know them by heart. Two of them run on the client and can be called through a plain function: the shell
(`bash_*`) and the text editor (`text_editor_*`). The policy gets their schema. All others need Anthropic's servers or
an answer in a special form: web search and fetch, code execution, computer use, memory, tool search, MCP toolsets, and
future ones. They are withheld, by type.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polar_gym.providers import BadRequestError
from polar_gym.providers.fields import objects, optional, required, shown
from polar_gym.providers.tools import ToolChoice, Tools

_STRING = {"type": "string"}

_KNOWN_BY_HEART: dict[str, dict[str, Any]] = {
    "bash_": {
        "description": "Runs a command in a shell that keeps its state between calls.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {**_STRING, "description": "The command. Required unless `restart` is true."},
                "restart": {"type": "boolean", "description": "Start the shell afresh instead of running a command."},
            },
        },
    },
    "text_editor_": {
        "description": "Views, creates and edits text files.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {**_STRING, "enum": ["view", "create", "str_replace", "insert"]},
                "path": {**_STRING, "description": "Absolute path of a file, or to `view` also of a directory."},
                "view_range": {
                    "type": "array",
                    "items": {"type": "integer"},
                    "description": "For `view`: first and last line, counted from 1; a last line of -1 is the end.",
                },
                "file_text": {**_STRING, "description": "For `create`: the file's whole content."},
                "old_str": {**_STRING, "description": "For `str_replace`: the text to replace, found exactly once."},
                "new_str": {**_STRING, "description": "For `str_replace`, what replaces it."},
                "insert_line": {"type": "integer", "description": "For `insert`: the line after which to insert."},
                "insert_text": {**_STRING, "description": "For `insert`: the text to insert."},
            },
            "required": ["command", "path"],
        },
    },
}
"""Beginning of a type -> the function that stands for it."""


@dataclass(slots=True)
class OfferedTools(Tools):
    """The tools of a request, with the names of those withheld."""

    withheld_names: set[str] = field(default_factory=set)


def translate(body: dict[str, Any]) -> OfferedTools:
    """Return the tools of a request. Raises `BadRequestError`."""
    tools = OfferedTools()
    for path, tool in objects(body, "tools"):
        kind = optional(tool, "type", str, path) or "custom"
        known = (function for start, function in _KNOWN_BY_HEART.items() if kind.startswith(start))
        function = _custom(tool, path) if kind == "custom" else next(known, None)
        if function is None:
            tools.withheld.append(kind)
            tools.withheld_names.add(optional(tool, "name", str, path) or kind)
        else:
            tools.offer({"name": required(tool, "name", str, path), **function}, path)
    tools.withheld += [f"mcp:{required(server, 'name', str, path)}" for path, server in objects(body, "mcp_servers")]
    return tools


def _custom(tool: dict[str, Any], path: str) -> dict[str, Any]:
    given = {
        "description": optional(tool, "description", str, path),
        "parameters": required(tool, "input_schema", dict, path),
        "strict": optional(tool, "strict", bool, path),
    }
    return {key: value for key, value in given.items() if value is not None}


def tool_choice(body: dict[str, Any], tools: OfferedTools) -> ToolChoice:
    """Return the chat form of `tool_choice`. A withheld tool cannot be forced: an answer without it would pass for its
    result. Raises `BadRequestError`."""
    choice = optional(body, "tool_choice", dict)
    if choice is None:
        return None
    kind = required(choice, "type", str, "tool_choice")
    if kind in ("auto", "none"):
        return kind
    if kind == "any":
        return tools.required(kind)
    if kind != "tool":
        raise BadRequestError("tool_choice.type", f"{shown(kind)} is not supported; use auto, any, tool or none")
    name = required(choice, "name", str, "tool_choice")
    if name in tools.withheld_names:
        raise BadRequestError(
            "tool_choice.name", f"{shown(name)} is a tool of Anthropic's own that nothing can execute here; send 'auto'"
        )
    return tools.named(name)


def parallel_tool_calls(body: dict[str, Any]) -> bool | None:
    choice = optional(body, "tool_choice", dict) or {}
    disabled = optional(choice, "disable_parallel_tool_use", bool, "tool_choice")
    return None if disabled is None else not disabled
