"""Finding a harness's shell tool by its schema, and filling in a tool's arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from polar_gym.schema import ToolDefinition

SHELL_WORDS = ("bash", "shell", "exec_command", "execute_command", "run_command", "terminal")
COMMAND_PROPERTIES = ("command", "cmd", "commands")

EXAMPLES: dict[str, Any] = {
    "string": "Run a scripted command",
    "integer": 60_000,
    "number": 60_000,
    "boolean": False,
    "array": [],
    "null": None,
}
"""One value of each JSON type. The number suits a timeout, in milliseconds or in seconds."""


@dataclass(frozen=True, slots=True)
class ShellTool:
    definition: ToolDefinition
    command_property: str

    @property
    def name(self) -> str:
        return self.definition["function"]["name"]

    @property
    def parameters(self) -> dict[str, Any]:
        return self.definition["function"]["parameters"]


def find_shell(tools: list[ToolDefinition]) -> ShellTool | None:
    """Return the tool that runs shell commands: its name says so, and it takes a command."""
    for word in SHELL_WORDS:
        for tool in tools:
            function = tool["function"]
            properties = (function.get("parameters") or {}).get("properties") or {}
            for name in COMMAND_PROPERTIES:
                if word in function["name"].lower() and _type(properties.get(name, {})) in ("string", "array"):
                    return ShellTool(tool, name)
    return None


def shell_arguments(shell: ShellTool, command: str) -> dict[str, Any]:
    """Return arguments that run `command`. Other required properties get an example value.

    A list named `commands` holds commands, any other one the words of one command.
    """
    value: str | list[str] = command
    if _type(shell.parameters["properties"][shell.command_property]) == "array":
        value = [command] if shell.command_property == "commands" else ["bash", "-lc", command]
    return example(shell.parameters) | {shell.command_property: value}


def no_shell(tools: list[ToolDefinition]) -> str:
    """Return what to say where `find_shell` finds nothing."""
    names = ", ".join(sorted({tool["function"]["name"] for tool in tools})) or "none"
    return f"the scripted policy knows no tool that runs commands among those offered: {names}"


def example(schema: dict[str, Any] | bool) -> Any:
    """Return the smallest plausible instance of a JSON schema: required properties only."""
    if isinstance(schema, bool):  # `true` permits anything
        return ""
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    if "default" in schema:
        return schema["default"]
    kind = _type(schema)
    if "type" not in schema and (choices := [each for each in _choices(schema) if _type(each) == kind]):
        return example(choices[0])
    if kind in ("object", None):
        properties = schema.get("properties") or {}
        return {name: example(properties.get(name, {"type": "string"})) for name in schema.get("required") or []}
    if kind in ("integer", "number"):
        return max(schema.get("minimum", -math.inf), min(EXAMPLES[kind], schema.get("maximum", math.inf)))
    return EXAMPLES[kind]


def _type(schema: dict[str, Any] | bool) -> str | None:
    """Return the JSON type of a schema, the first that is not null where it has several."""
    if isinstance(schema, bool):
        return None
    kinds = schema.get("type") or [_type(choice) for choice in _choices(schema)]
    if isinstance(kinds, str):
        return kinds
    return next((kind for kind in kinds if kind not in (None, "null")), None)


def _choices(schema: dict[str, Any]) -> list[dict[str, Any] | bool]:
    return schema.get("anyOf") or schema.get("oneOf") or []
