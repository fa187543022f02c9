"""The tools of a request in chat form, and the choice among them, for all wire formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from polar_gym.providers import BadRequestError
from polar_gym.providers.fields import shown
from polar_gym.schema import ToolDefinition

ToolChoice = str | dict[str, Any] | None


@dataclass(slots=True)
class Tools:
    """The tools of a request: those that the engine is offered, and those withheld."""

    definitions: list[ToolDefinition] = field(default_factory=list)
    withheld: list[str] = field(default_factory=list)

    def offer(self, function: dict[str, Any], path: str) -> None:
        """Add a function. Raises `BadRequestError` where another one has its name."""
        if any(known["function"]["name"] == function["name"] for known in self.definitions):
            raise BadRequestError(
                f"{path}.name", f"another tool is already called {shown(function['name'])}; rename one"
            )
        self.definitions.append({"type": "function", "function": function})

    def required(self, said: str, path: str = "tool_choice") -> ToolChoice:
        """Return the chat form of "call any function", which the client calls `said`."""
        if not self.definitions:
            raise BadRequestError(path, f"{said!r} needs `tools` that an engine can offer; send them or 'auto'")
        return "required"

    def named(self, name: str, path: str = "tool_choice") -> dict[str, Any]:
        """Return the chat form of "call this function". The function must be among the tools."""
        if all(tool["function"]["name"] != name for tool in self.definitions):
            raise BadRequestError(path, f"{shown(name)} is not among `tools`; name a tool that the request offers")
        return {"type": "function", "function": {"name": name}}


def openai_choice(choice: Any, tools: Tools, name_of: Callable[[dict[str, Any]], str | None]) -> ToolChoice:
    """Return the chat form of `tool_choice` in a request in OpenAI's forms.

    `name_of` returns the name of the tool that an object names, or None for an object of another kind.
    """
    if choice in (None, "auto", "none"):
        return choice
    if choice == "required":
        return tools.required(choice)
    name = name_of(choice) if isinstance(choice, dict) else None
    if name is None:
        raise BadRequestError(
            "tool_choice", f"{shown(choice)} is not supported; use 'auto', 'none', 'required' or one named function"
        )
    return tools.named(name)
