"""What the harness files describe."""

from __future__ import annotations

import json
import tomllib

import pytest

from polar_gym.harnesses import Launch
from polar_gym.harnesses import codex as codex_module
from polar_gym.harnesses import pi as pi_module
from tests.support.harness_context import context


@pytest.mark.parametrize("module", [pi_module, codex_module])
def test_the_key_is_in_the_environment_only(module):
    launch: Launch = module.launch(context())
    assert "secret-key" in launch.environment.values()
    assert "secret-key" not in json.dumps([list(launch.argv), dict(launch.files)])
    assert launch.stdin.decode() == "-do 'é'\n"
    assert all(path.startswith("/home/agent/") for path in launch.files)


@pytest.mark.parametrize(("length", "limit"), [(262144, 235929), (65536, 49152), (32768, 24576)])
def test_codex_leaves_room_for_an_answer(length: int, limit: int):
    settings = tomllib.loads(codex_module.launch(context(length=length)).files["/home/agent/.codex/config.toml"])
    assert settings["model_context_window"] == length
    assert settings["model_auto_compact_token_limit"] == limit


def test_codex_profiles():
    name = 'a "quoted" é\\name'
    default, lean = (codex_module.launch(context(profile=profile, model_name=name)) for profile in ("default", "lean"))
    settings = tomllib.loads(default.files["/home/agent/.codex/config.toml"])
    assert settings["model"] == name
    assert settings["model_providers"]["gateway"]["base_url"] == "http://127.0.0.1:8080/v1"
    assert settings["features"] == {"plugins": False, "remote_plugin": False, "apps": False}
    assert "model_catalog_json" not in settings
    lean_settings = tomllib.loads(lean.files["/home/agent/.codex/config.toml"])
    (model,) = json.loads(lean.files[lean_settings["model_catalog_json"]])["models"]
    assert (model["slug"], model["context_window"]) == (name, 65536)


def test_pi_settings_shrink_with_the_context():
    launch = pi_module.launch(context(length=16384))
    settings = json.loads(launch.files["/home/agent/.pi/agent/settings.json"])
    assert settings == {"compaction": {"reserveTokens": 2048, "keepRecentTokens": 4096}}
    provider = json.loads(launch.files["/home/agent/.pi/agent/models.json"])["providers"]["gateway"]
    assert provider["baseUrl"] == "http://127.0.0.1:8080/v1"
    assert launch.environment[provider["apiKey"]] == "secret-key"


TURN, COMPACTION, PREWARM = (json.dumps({"request_kind": kind}) for kind in ("turn", "compaction", "prewarm"))


@pytest.mark.parametrize(
    ("headers", "hints"),
    [
        ({}, {}),
        ({"thread-id": "t", "x-codex-turn-metadata": TURN}, {"thread": "t"}),
        ({"Thread-Id": "t", "X-Codex-Turn-Metadata": COMPACTION}, {"thread": "t", "kind": "compaction"}),
        ({"x-codex-turn-metadata": PREWARM}, {"kind": "auxiliary"}),
        ({"x-codex-turn-metadata": TURN, "x-openai-subagent": "collab_spawn"}, {"kind": "subagent"}),
        ({"x-codex-turn-metadata": COMPACTION, "x-openai-subagent": "collab_spawn"}, {"kind": "compaction"}),
        ({"x-codex-turn-metadata": "not JSON"}, {}),
        ({"x-codex-turn-metadata": "[]"}, {}),
        ({"x-codex-turn-metadata": "[" * 8000}, {}),
    ],
)
def test_codex_says_what_a_request_is_for(headers: dict[str, str], hints: dict[str, str]):
    assert codex_module.HARNESS.classify(headers, {}) == hints


SUMMARIZER = "You are a context summarization assistant. Your task is"


@pytest.mark.parametrize(
    ("messages", "hints"),
    [
        (None, {}),
        ([], {}),
        (["no message"], {}),
        ([{"role": "system", "content": None}], {}),
        ([{"role": "user", "content": SUMMARIZER}], {}),
        ([{"role": "system", "content": "You are an expert coding assistant"}], {}),
        ([{"role": "system", "content": SUMMARIZER}], {"kind": "compaction"}),
    ],
)
def test_a_compaction_of_pi_is_known_by_its_system_prompt(messages: object, hints: dict[str, str]):
    assert pi_module.HARNESS.classify({"user-agent": "x"}, {"messages": messages}) == hints
