"""What the Gemini CLI's file describes, and what it reads in a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar_gym.harnesses.gemini_cli import HARNESS
from tests.support.harness_context import context

SETTINGS = "/home/agent/.gemini/settings.json"


def test_the_key_is_in_the_environment_only():
    launch = HARNESS.launch(context())
    assert launch.environment["GEMINI_API_KEY"] == "secret-key"
    assert "secret-key" not in json.dumps([list(launch.argv), dict(launch.files)])
    assert launch.environment["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:8080"
    assert launch.stdin.decode() == "-do 'é'\n"


@pytest.mark.parametrize(("length", "limit"), [(65536, 16384), (8192, 4096)])
def test_an_answer_leaves_room_for_the_prompt(length: int, limit: int):
    settings = json.loads(HARNESS.launch(context(length=length, model_name="some/m")).files[SETTINGS])
    (override,) = settings["modelConfigs"]["customOverrides"]
    assert override["match"] == {"model": "some/m"}
    assert override["modelConfig"]["generateContentConfig"] == {"maxOutputTokens": limit}


def test_only_the_lean_profile_has_its_own_prompt_and_tools():
    default, lean = HARNESS.launch(context()), HARNESS.launch(context(profile="lean"))
    assert "GEMINI_SYSTEM_MD" not in default.environment
    assert "core" not in json.loads(default.files[SETTINGS])["tools"]
    assert lean.environment["GEMINI_SYSTEM_MD"] in lean.files
    assert "run_shell_command" in json.loads(lean.files[SETTINGS])["tools"]["core"]


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"googleSearch": {}}, {"functionDeclarations": [{"name": name} for name in names]}]


SUMMARISE = {"parts": [{"text": "distil the history into a <state_snapshot>"}]}


@pytest.mark.parametrize(
    ("body", "hints"),
    [
        ({"stream": "stream", "tools": tools("run_shell_command")}, {}),
        ({"stream": "stream", "tools": tools("read_file", "complete_task")}, {"kind": "subagent"}),
        ({"stream": None, "systemInstruction": SUMMARISE}, {"kind": "compaction"}),
        ({"stream": None, "model": "gemini-3-flash-preview"}, {"kind": "auxiliary"}),
        ({"stream": None, "tools": "?", "systemInstruction": 3}, {"kind": "auxiliary"}),
        ({"stream": "stream", "tools": [3, {"functionDeclarations": [None, {}]}]}, {}),
    ],
)
def test_what_a_request_is_for(body: dict[str, Any], hints: dict[str, str]):
    assert HARNESS.classify({}, body) == hints
