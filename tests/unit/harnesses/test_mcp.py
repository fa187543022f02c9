"""The MCP server of an environment in the configuration of each harness that takes one."""

from __future__ import annotations

import dataclasses

import pytest

from polar_gym.harnesses import HARNESSES, Launch
from tests.support.harness_context import context

URL = "http://127.0.0.1:8080/mcp"
TAKING = [name for name in HARNESSES.names() if HARNESSES.get(name).npm_package]


def words(launch: Launch) -> str:
    return " ".join([*launch.argv, *launch.files.values(), *launch.environment.values()])


@pytest.mark.parametrize("profile", ["default", "lean"])
@pytest.mark.parametrize("name", TAKING)
def test_only_a_task_with_tools_changes_the_configuration(name: str, profile: str) -> None:
    launch = HARNESSES.get(name).launch
    without = context(profile=profile)
    assert URL not in words(launch(without))
    said = words(launch(dataclasses.replace(without, mcp_url=URL)))
    assert URL in said
    assert HARNESSES.get(name).mcp_prefix is not None
    assert "secret-key" in said


def test_programs_find_the_server_in_a_variable() -> None:
    own = context(command="true")
    launch = HARNESSES.get("command").launch
    assert "POLAR_GYM_MCP_URL" not in launch(own).environment
    assert launch(dataclasses.replace(own, mcp_url=URL)).environment["POLAR_GYM_MCP_URL"] == URL
