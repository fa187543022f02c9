"""What `harnesses/mini_swe_agent.py` and `harnesses/mistral_vibe.py` describe."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from polar_gym.harnesses.mini_swe_agent import HARNESS as MINI
from polar_gym.harnesses.mistral_vibe import HARNESS as VIBE
from tests.support.harness_context import context

MINI_SETTINGS = "/home/agent/.config/mini-swe-agent/gateway.yaml"
VIBE_SETTINGS = "/home/agent/.vibe/config.toml"


@pytest.mark.parametrize(("harness", "variable"), [(MINI, "OPENAI_API_KEY"), (VIBE, "POLAR_GYM_API_KEY")])
def test_the_key_is_in_the_environment_only(harness: Any, variable: str):
    launch = harness.launch(context())
    assert launch.environment[variable] == "secret-key"
    assert "secret-key" not in json.dumps([list(launch.argv), dict(launch.files)])


def test_the_instruction_is_no_argument():
    assert VIBE.launch(context()).stdin.decode() == "-do 'é'\n"


@given(st.text())
@example("🎉")
@example("\x00\x7f\x85\u2028\ufeff\uffff \\ud83c\\udf89 \t\r\n'\"")
def test_mini_gets_the_instruction_as_it_is(instruction: str):
    """An emoji became two lone surrogates, of which mini died before its first call."""
    settings = MINI.launch(context(instruction=instruction)).files[MINI_SETTINGS]
    assert yaml.safe_load(settings)["run"] == {"task": instruction}


@pytest.mark.parametrize(("length", "answer"), [(262144, 16384), (32768, 8192)])
def test_an_answer_fits_beside_what_vibe_does_not_compact(length: int, answer: int):
    settings = tomllib.loads(VIBE.launch(context(length)).files[VIBE_SETTINGS])
    (model,) = settings["models"]
    assert (model["max_context_length"], model["max_output_tokens"]) == (length, answer)
    assert settings["auto_compact_threshold"] + answer <= length
    assert settings["providers"][0]["api_base"] == "http://127.0.0.1:8080/v1"


def test_profiles():
    for harness in (MINI, VIBE):
        default, lean = (harness.launch(context(profile=profile)) for profile in ("default", "lean"))
        assert (default.argv, default.files) != (lean.argv, lean.files)
    agent = yaml.safe_load(MINI.launch(context(profile="lean")).files[MINI_SETTINGS])["agent"]
    assert "{{task}}" in agent["instance_template"]
    assert MINI.ends_by in agent["instance_template"]


CHECKPOINT = "CRITICAL: Respond with text only.\n\nYou are performing a CONTEXT CHECKPOINT COMPACTION. Create ..."
SUMMARIZER = "You are a dedicated conversation summarizer. You read a transcript ..."
GO = {"role": "user", "content": "go"}


@pytest.mark.parametrize(
    ("messages", "hints"),
    [
        ("no list", {}),
        ([], {}),
        ([GO], {}),
        ([GO, {"role": "user", "content": CHECKPOINT}], {"kind": "compaction"}),
        ([{"role": "user", "content": CHECKPOINT}, GO], {}),
        ([{"role": "system", "content": SUMMARIZER}, GO], {"kind": "compaction"}),
    ],
)
def test_vibe_has_two_ways_to_compact(messages: Any, hints: dict[str, str]):
    assert VIBE.classify({}, {"messages": messages}) == hints
