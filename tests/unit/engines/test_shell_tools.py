"""A tool is called with arguments that fit its schema, in each form of JSON schema that tools have."""

from __future__ import annotations

from typing import Any

import pytest

from polar_gym.engines.embedded.shell_tools import example, find_shell, shell_arguments


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"const": 3}, 3),
        ({"enum": ["a", "b"]}, "a"),
        ({"type": ["null", "boolean"]}, False),
        ({"anyOf": [{"type": "null"}, {"type": "integer", "maximum": 5}]}, 5),
        ({"properties": {"a": {"type": "array"}, "b": {"type": "string"}}, "required": ["a"]}, {"a": []}),
        ({"properties": {"any": True}, "required": ["any"]}, {"any": ""}),
    ],
)
def test_the_example_of_a_schema(schema: dict[str, Any], value: object) -> None:
    assert example(schema) == value


def test_properties_that_permit_anything_do_not_hide_the_shell() -> None:
    """Guards against a session that ended with a 502: `true` is a schema, too."""
    parameters = {"properties": {"cmd": True, "command": {"type": "string"}, "extra": True}, "required": ["extra"]}
    shell = find_shell([{"type": "function", "function": {"name": "bash", "parameters": parameters}}])
    assert shell is not None
    assert shell_arguments(shell, "ls") == {"command": "ls", "extra": ""}
