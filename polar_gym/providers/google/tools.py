"""The tools of a Google request as chat functions, and its schemas as JSON Schema.

Google describes parameters in JSON Schema (`parametersJsonSchema`), which is passed on as it is, or in a dialect of
OpenAPI (`parameters`). The dialect has types in capitals, `nullable`, and 64-bit numbers as strings. Tools that
Google's servers execute are withheld, because no engine can execute them.
"""

from __future__ import annotations

from typing import Any

from polar_gym.providers import BadRequestError
from polar_gym.providers.fields import expect, optional, required, shown
from polar_gym.providers.google.json import camel, message_at, messages_at, strings_at
from polar_gym.providers.tools import ToolChoice, Tools
from polar_gym.schema import ToolDefinition

_NOT_JSON_SCHEMA = ("type", "nullable", "properties", "items", "anyOf", "propertyOrdering", "ref", "defs")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def tools_of(body: dict[str, Any]) -> Tools:
    """Return the tools of a request. Raises `BadRequestError`."""
    tools = Tools()
    for path, tool in messages_at(body, "tools"):
        tools.withheld += [name for name, value in tool.items() if name != "functionDeclarations" and value is not None]
        for function_path, declaration in messages_at(tool, "functionDeclarations", path):
            tools.offer(_function(declaration, function_path), function_path)
    return tools


def _function(declaration: dict[str, Any], path: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": required(declaration, "name", str, path)}
    if description := optional(declaration, "description", str, path):
        function["description"] = description
    if (schema := schema_of(declaration, "parametersJsonSchema", "parameters", path)) is not None:
        function["parameters"] = schema
    return function


def schema_of(container: dict[str, Any], json_key: str, openapi_key: str, path: str) -> dict[str, Any] | None:
    """Return the schema under either key, as JSON Schema."""
    if (schema := optional(container, json_key, dict, path)) is not None:
        return schema
    openapi = optional(container, openapi_key, dict, path)
    return None if openapi is None else json_schema(openapi, f"{path}.{openapi_key}")


def json_schema(openapi: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a schema in Google's OpenAPI dialect as JSON Schema."""
    given, schema = camel(openapi), {}
    kind, nullable = optional(given, "type", str, path), optional(given, "nullable", bool, path)
    if kind is not None and kind != "TYPE_UNSPECIFIED":
        schema["type"] = [kind.lower(), "null"] if nullable else kind.lower()
    schema |= {key: value for key, value in given.items() if key not in _NOT_JSON_SCHEMA and value is not None}
    if (ref := optional(given, "ref", str, path)) is not None:
        schema["$ref"] = ref.replace("#/defs/", "#/$defs/")
    for key in _COUNTS:
        if isinstance(count := schema.get(key), str) and count.isdecimal():
            schema[key] = int(count)
    if nullable and (values := optional(given, "enum", list, path)) is not None:
        schema["enum"] = [*values, None]
    for key, own in (("properties", "properties"), ("defs", "$defs")):
        if (named := optional(given, key, dict, path)) is not None:
            schema[own] = {
                name: json_schema(expect(value, dict, f"{path}.{key}.{name}"), f"{path}.{key}.{name}")
                for name, value in named.items()
            }
    if (items := optional(given, "items", dict, path)) is not None:
        schema["items"] = json_schema(items, f"{path}.items")
    if isinstance(others := given.get("additionalProperties"), dict):
        schema["additionalProperties"] = json_schema(others, f"{path}.additionalProperties")
    if (choices := optional(given, "anyOf", list, path)) is not None:
        schema["anyOf"] = [
            json_schema(expect(choice, dict, f"{path}.anyOf[{i}]"), f"{path}.anyOf[{i}]")
            for i, choice in enumerate(choices)
        ] + ([{"type": "null"}] if nullable else [])
    return schema


def choice_of(body: dict[str, Any], tools: Tools) -> tuple[ToolChoice, list[ToolDefinition]]:
    """Return (chat form of `toolConfig`, the functions that may be called). Several allowed names shorten the list."""
    path, offered = "toolConfig.functionCallingConfig", tools.definitions
    config = message_at(message_at(body, "toolConfig"), "functionCallingConfig", "toolConfig")
    mode = optional(config, "mode", str, path)
    if mode in (None, "MODE_UNSPECIFIED"):
        return None, offered
    if mode in ("AUTO", "NONE"):
        return mode.lower(), offered
    if mode not in ("ANY", "VALIDATED"):
        raise BadRequestError(f"{path}.mode", f"{shown(mode)} is not a mode; use AUTO, ANY, VALIDATED or NONE")
    allowed = strings_at(config, "allowedFunctionNames", path)
    chosen = [tools.named(name, f"{path}.allowedFunctionNames") for name in allowed]
    if mode == "ANY" and len(chosen) == 1:
        return chosen[0], offered
    choice = "auto" if mode == "VALIDATED" else tools.required(mode, f"{path}.mode")
    return choice, [tool for tool in offered if not allowed or tool["function"]["name"] in allowed]
