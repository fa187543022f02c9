"""The tools of a Responses request as chat functions, and the way back from a call of one.

Responses has tools that chat does not have: freeform (`custom`) tools, namespaces, a built-in local shell. Each becomes
a function that an engine can offer, and an entry in `surfaces` says how its calls must look to the client. Tools that
OpenAI's servers execute are withheld, because no engine can execute them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polar_gym.chat.messages import canonical_json
from polar_gym.providers import BadRequestError
from polar_gym.providers.fields import objects, optional, required, shown
from polar_gym.providers.json_text import parsed
from polar_gym.providers.tools import Tools

LOCAL_SHELL = "local_shell"

_SERVER_SIDE = (
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "mcp",
    "tool_search",
    "web_search",
)
"""Types, or beginnings of dated types (`web_search_preview_2025_03_11`), of tools that OpenAI's servers execute."""

_NO_DESCRIPTION = "Tools in the {} namespace."
"""Codex's words for a namespace that has no description. Another description stands before that of the first tool."""

_LOCAL_SHELL_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
}


@dataclass(slots=True)
class OfferedTools(Tools):
    """The tools of a request, with the form in which the client knows them."""

    surfaces: dict[str, dict[str, str]] = field(default_factory=dict)
    """Function name -> {`kind`, `name`, `namespace`?}, for each function that the client knows by another kind or name.
    Kinds: `function`, `custom`, `local_shell`."""


def translate(body: dict[str, Any]) -> OfferedTools:
    """Return the tools of a request. Raises `BadRequestError`."""
    tools = OfferedTools()
    for path, tool in objects(body, "tools"):
        _add(tools, tool, path, namespace=None)
    return tools


def _add(tools: OfferedTools, tool: dict[str, Any], path: str, namespace: str | None) -> None:
    kind = required(tool, "type", str, path)
    if kind == "function":
        _offer(tools, tool, path, namespace, kind, _function(tool, path))
    elif kind == "custom":
        _offer(tools, tool, path, namespace, kind, _freeform(tool, path))
    elif kind == LOCAL_SHELL:
        shell = {"description": "Runs a command on the user's machine.", "parameters": _LOCAL_SHELL_PARAMETERS}
        _offer(tools, {"name": LOCAL_SHELL}, path, namespace, kind, shell)
    elif kind == "namespace" and namespace is None:
        name, about = required(tool, "name", str, path), optional(tool, "description", str, path)
        first = len(tools.definitions)
        for inner_path, inner in objects(tool, "tools", path):
            _add(tools, inner, inner_path, namespace=name)
        if about and about != _NO_DESCRIPTION.format(name) and len(tools.definitions) > first:
            function = tools.definitions[first]["function"]
            function["description"] = "\n\n".join(filter(None, (about, function.get("description"))))
    elif kind.startswith(_SERVER_SIDE):
        tools.withheld.append(kind)
    else:
        raise BadRequestError(f"{path}.type", f"{shown(kind)} is not supported; use function, custom or namespace")


def _offer(
    tools: OfferedTools, tool: dict[str, Any], path: str, namespace: str | None, kind: str, function: dict[str, Any]
) -> None:
    name = required(tool, "name", str, path)
    flat = flat_name(name, namespace)
    tools.offer({"name": flat, **function}, path)
    if kind != "function" or namespace is not None:
        tools.surfaces[flat] = {"kind": kind, "name": name} | ({"namespace": namespace} if namespace else {})


def _function(tool: dict[str, Any], path: str) -> dict[str, Any]:
    optional(tool, "description", str, path)
    optional(tool, "parameters", dict, path)
    optional(tool, "strict", bool, path)
    return {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}


def _freeform(tool: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a function for a freeform tool, whose plain text is the one string `input`. The tool's grammar cannot be
    enforced through a function call, so the model is shown the grammar."""
    wanted = "The tool's whole input, as plain text."
    layout = optional(tool, "format", dict, path) or {}
    if definition := optional(layout, "definition", str, f"{path}.format"):
        wanted += f" It must follow this {layout.get('syntax', '')} grammar:\n{definition}"
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string", "description": wanted}},
        "required": ["input"],
        "additionalProperties": False,
    }
    description = optional(tool, "description", str, path)
    return ({"description": description} if description else {}) | {"parameters": parameters}


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool of a namespace among chat functions."""
    return f"{namespace}__{name}" if namespace else name


def freeform_arguments(text: str) -> str:
    """Return the function arguments that a freeform input stands for."""
    return canonical_json({"input": text})


def freeform_input(arguments: str) -> str:
    """Return the freeform input that function arguments stand for. Arguments of another shape are handed over as they
    are, and the tool then reports the model's mistake."""
    given = parsed(arguments)
    if isinstance(given, dict) and isinstance(given.get("input"), str):
        return given["input"]
    return arguments


def shell_arguments(action: dict[str, Any]) -> str:
    """Return the function arguments that a local shell action stands for."""
    return canonical_json({key: value for key, value in action.items() if key != "type" and value not in (None, {})})


def shell_action(arguments: str) -> dict[str, Any] | None:
    """Return the local shell action that function arguments stand for, or None where they name no command."""
    given = parsed(arguments)
    if not isinstance(given, dict) or not isinstance(given.get("command"), list):
        return None
    optional_parts = {key: given[key] for key in ("working_directory", "timeout_ms", "user") if key in given}
    return {"type": "exec", "command": given["command"], "env": given.get("env") or {}, **optional_parts}
