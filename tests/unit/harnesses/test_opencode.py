"""What `harnesses/opencode.py` describes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar_gym.harnesses.opencode import HARNESS
from tests.support.harness_context import context

CONFIG = "/home/agent/.config/opencode/opencode.json"


def test_the_key_is_in_the_environment_only():
    launch = HARNESS.launch(context())
    assert "secret-key" not in json.dumps([list(launch.argv), dict(launch.files)])
    options = json.loads(launch.files[CONFIG])["provider"]["gateway"]["options"]
    variable = options["apiKey"].removeprefix("{env:").removesuffix("}")
    assert launch.environment[variable] == "secret-key"
    assert options["baseURL"] == "http://127.0.0.1:8080/v1"
    assert launch.stdin.decode() == "-do 'é'\n"
    assert all(path.startswith("/home/agent/") for path in launch.files)


@pytest.mark.parametrize(("length", "answer"), [(262144, 16384), (65536, 16384), (32768, 8192)])
def test_compaction_leaves_room_for_an_answer(length: int, answer: int):
    settings = json.loads(HARNESS.launch(context(length, model_name="a/b")).files[CONFIG])
    assert settings["model"] == settings["small_model"] == "gateway/a/b"
    assert settings["provider"]["gateway"]["models"]["a/b"]["limit"] == {"context": length, "output": answer}


def test_profiles():
    default, lean = (json.loads(HARNESS.launch(context(profile=p)).files[CONFIG]) for p in ("default", "lean"))
    assert set(lean) - set(default) == {"agent", "tools", "snapshot"}
    assert lean["agent"]["title"] == {"disable": True}
    assert [name for name, on in lean["tools"].items() if on] == ["bash", "read", "write", "edit"]


TITLE = {"role": "system", "content": "You are a title generator. You output ONLY a thread title."}
SUMMARY = {"role": "system", "content": "You are a context summarization agent. You are given"}
GO = {"role": "user", "content": "You are a title generator."}


@pytest.mark.parametrize(
    ("headers", "messages", "hints"),
    [
        ({}, None, {}),
        ({}, [], {}),
        ({}, ["no message"], {}),
        ({}, [{"role": "system", "content": None}], {}),
        ({}, [GO], {}),
        ({"x-session-id": "s"}, [GO], {"thread": "s"}),
        ({"X-Session-Id": "s", "X-Parent-Session-Id": "p"}, [GO], {"thread": "s", "kind": "subagent"}),
        ({"x-session-id": "s"}, [TITLE, GO], {"thread": "s", "kind": "auxiliary"}),
        ({"x-session-id": "s"}, [SUMMARY, GO], {"thread": "s", "kind": "compaction"}),
        ({"x-session-id": "s", "x-parent-session-id": "p"}, [SUMMARY], {"thread": "s", "kind": "compaction"}),
    ],
)
def test_what_a_request_is_for(headers: dict[str, str], messages: Any, hints: dict[str, str]):
    assert HARNESS.classify(headers, {"messages": messages}) == hints
