"""What `harnesses/qwen_code.py` describes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar_gym.harnesses.qwen_code import HARNESS
from tests.support.harness_context import context

SETTINGS = "/home/agent/.qwen/settings.json"


def test_the_key_is_in_the_environment_only():
    launch = HARNESS.launch(context())
    assert launch.environment["OPENAI_API_KEY"] == "secret-key"
    assert "secret-key" not in json.dumps([list(launch.argv), dict(launch.files)])
    assert launch.environment["OPENAI_BASE_URL"] == "http://127.0.0.1:8080/v1"
    assert launch.stdin.decode() == "-do 'é'\n"


@pytest.mark.parametrize(("length", "answer"), [(262144, 16384), (65536, 16384), (32768, 8192)])
def test_an_answer_fits_beside_what_is_not_compacted(length: int, answer: int):
    settings = json.loads(HARNESS.launch(context(length)).files[SETTINGS])
    generation = settings["model"]["generationConfig"]
    assert (generation["contextWindowSize"], generation["samplingParams"]) == (length, {"max_tokens": answer})


def test_profiles():
    default, lean = (HARNESS.launch(context(profile=profile, model_name="-odd")) for profile in ("default", "lean"))
    assert "--model=-odd" in default.argv
    assert not any(argument.startswith("--system-prompt") for argument in default.argv)
    assert any(argument.startswith("--system-prompt=You are") for argument in lean.argv)
    default_tools, lean_tools = (json.loads(launch.files[SETTINGS])["tools"] for launch in (default, lean))
    assert "tool_search" in default_tools["exclude"]
    assert set(default_tools["exclude"]) < set(lean_tools["exclude"])
    assert "core" not in default_tools


SUMMARY = {"role": "user", "content": [{"type": "text", "text": "Then, generate the <state_snapshot>."}]}
TOOL = {"type": "function", "function": {"name": "edit"}}


@pytest.mark.parametrize(
    ("body", "hints"),
    [
        ({}, {}),
        ({"messages": "no list"}, {}),
        ({"messages": []}, {}),
        ({"messages": [{"role": "user", "content": "go"}]}, {}),
        ({"messages": [SUMMARY]}, {"kind": "compaction"}),
        ({"messages": [SUMMARY, {"role": "user", "content": "go"}]}, {}),
        ({"messages": [SUMMARY], "tools": [TOOL]}, {}),
    ],
)
def test_a_compaction_is_known_by_its_last_message(body: dict[str, Any], hints: dict[str, str]):
    assert HARNESS.classify({}, body) == hints
