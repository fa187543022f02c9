"""What `harnesses/command.py` describes."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from polar_gym.config.loading import load_config
from polar_gym.errors import ConfigError
from polar_gym.harnesses.command import HARNESS
from polar_gym.harnesses.install import toolchain_mounts
from tests.support.harness_context import context

HARD = "say \"{api_key}\" and 'é' $(echo no) \\ `no`\n-x"


def test_a_list_is_started_as_it_is():
    launch = HARNESS.launch(
        context(command=["agent", "--task={instruction}", "{base_url}/v1", "{api_key}", "{model}", "{other}"])
    )
    assert launch.argv == ["agent", "--task=-do 'é'\n", "http://127.0.0.1:8080/v1", "secret-key", "policy", "{other}"]
    assert launch.stdin.decode() == "-do 'é'\n"


def test_a_string_is_a_shell_command_in_which_a_placeholder_is_one_word():
    launch = HARNESS.launch(context(instruction=HARD, command="printf '%s|' {instruction} {model} | cat; cat"))
    done = subprocess.run(launch.argv, input=launch.stdin, capture_output=True, check=True, timeout=10)
    assert done.stdout.decode() == f"{HARD}|policy|{HARD}"


def test_the_environment_is_that_of_the_sdks():
    launch = HARNESS.launch(context(command="agent", environment={"URL": "{base_url}/x", "GEMINI_API_KEY": "own"}))
    assert launch.environment == {
        "OPENAI_BASE_URL": "http://127.0.0.1:8080/v1",
        "OPENAI_API_KEY": "secret-key",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:8080",
        "ANTHROPIC_API_KEY": "secret-key",
        "GOOGLE_GEMINI_BASE_URL": "http://127.0.0.1:8080",
        "GEMINI_API_KEY": "own",
        "POLAR_GYM_MODEL": "policy",
        "URL": "http://127.0.0.1:8080/x",
    }


def test_nothing_is_installed(tmp_path: Any):
    assert toolchain_mounts(HARNESS, tmp_path) == ([], [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"harness\.command: is required"),
        ({"command": ""}, "harness.command='': .*expected a command line, or a list of arguments"),
        ({"command": []}, r"harness.command=\[\]: .*expected a command line, or a list of arguments"),
        ({"command": "x", "env": {}}, "harness.env={}: unknown key; known here: command, environment"),
    ],
)
def test_errors_name_the_key(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(settings={"harness": {"name": "command", **settings}})
