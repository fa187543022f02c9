"""What the Claude Code file describes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar_gym.harnesses.claude_code import HARNESS, launch
from tests.support.harness_context import context


@pytest.mark.parametrize("profile", ["default", "lean"])
def test_the_key_is_in_the_environment_only(profile: Any):
    started = launch(context(profile=profile))
    assert started.environment["ANTHROPIC_API_KEY"] == "secret-key"
    assert "secret-key" not in json.dumps([list(started.argv), dict(started.files)])
    assert started.environment["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080"
    assert started.stdin.decode() == "-do 'é'\n"
    assert ("--tools" in started.argv) == (profile == "lean")


def test_every_model_of_its_own_is_the_policy():
    started = launch(context(model_name="named"))
    assert started.argv[started.argv.index("--model") + 1] == "named"
    assert started.environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "named"
    assert started.environment["CLAUDE_CODE_SUBAGENT_MODEL"] == "named"


@pytest.mark.parametrize(
    ("length", "answer", "window"),
    [(262144, "16384", "262144"), (65536, "16384", "100000"), (32768, "8192", None), (8192, "2048", None)],
)
def test_the_limits_follow_the_context(length: int, answer: str, window: str | None):
    """It compacts by itself when the answer's room and 13000 tokens are left: in a small context that is always."""
    environment = launch(context(length=length)).environment
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(length)
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == answer
    assert environment.get("CLAUDE_CODE_AUTO_COMPACT_WINDOW") == window


TOOLS = [{"name": "Bash", "input_schema": {}}]
SUMMARISE = "CRITICAL: Respond with TEXT ONLY. Your task is to create a detailed summary of the conversation."
SESSION, AGENT = {"X-Claude-Code-Session-Id": "s"}, {"x-claude-code-agent-id": "a"}


def asked(*blocks: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in blocks]}]


@pytest.mark.parametrize(
    ("headers", "body", "hints"),
    [
        (SESSION, {"tools": TOOLS, "messages": asked("go")}, {"thread": "s"}),
        (SESSION | AGENT, {"tools": TOOLS, "messages": asked("go")}, {"thread": "a", "kind": "subagent"}),
        (SESSION, {"tools": TOOLS, "messages": asked("go", SUMMARISE)}, {"thread": "s", "kind": "compaction"}),
        (SESSION | AGENT, {"tools": TOOLS, "messages": asked(SUMMARISE)}, {"thread": "a", "kind": "compaction"}),
        (SESSION, {"tools": TOOLS, "messages": asked(SUMMARISE, "go")}, {"thread": "s"}),
        ({}, {"messages": [{"role": "user", "content": SUMMARISE}]}, {"kind": "compaction"}),
        (SESSION, {"tools": [], "messages": asked("a title, please")}, {"thread": "s", "kind": "auxiliary"}),
        ({}, {"tools": [{"type": "web_search_20250305"}], "messages": asked("q")}, {"kind": "auxiliary"}),
        ({}, {"max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}, {"kind": "auxiliary"}),
        ({}, {"tools": "none", "messages": ["odd"]}, {"kind": "auxiliary"}),
    ],
)
def test_it_says_what_a_request_is_for(headers: dict[str, str], body: dict[str, Any], hints: dict[str, str]):
    assert HARNESS.classify(headers, body) == hints
