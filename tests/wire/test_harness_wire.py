"""Real CLIs against the real providers: the tools run, and the history comes back linked by id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from polar_gym.chat import ChatRequest, Completion, ids
from polar_gym.harnesses import HARNESSES, Harness
from polar_gym.harnesses.codex import HARNESS as CODEX
from polar_gym.harnesses.mistral_vibe import HARNESS as VIBE
from polar_gym.harnesses.pi import HARNESS as PI
from polar_gym.providers import Provider
from polar_gym.providers.openai_chat import PROVIDER as CHAT
from polar_gym.providers.openai_responses import PROVIDER as RESPONSES
from tests.wire.harness_probe import run_harness
from tests.wire.stand_in import Refusal, assistant, completion, serving, tool_call

INSTRUCTION = "- put 'é' into a file, @please"
CASES = {
    "pi": (PI, CHAT, "bash", "command"),
    "codex": (CODEX, RESPONSES, "exec_command", "cmd"),
    "mistral_vibe": (VIBE, CHAT, "bash", "command"),
}


def test_the_registry_finds_both():
    assert (HARNESSES.get("pi"), HARNESSES.get("codex")) == (PI, CODEX)


@pytest.mark.parametrize("profile", ["default", "lean"])
@pytest.mark.parametrize("name", CASES)
async def test_a_tool_runs_and_the_history_comes_back(name: str, profile: Literal["default", "lean"], tmp_path: Path):
    harness, provider, tool, field = CASES[name]
    # Odd but valid JSON: spacing and escapes that a re-serialisation would lose.
    arguments = [f'{{"{field}":  "echo \\u00e9 > made.txt"}}', f'{{"{field}":"echo second"}}']
    said = assistant(" I shall.\n", "thinking\n\n", *(tool_call(tool, text) for text in arguments))
    script = [completion(said), completion(assistant("all done"))]
    async with serving([CHAT, RESPONSES], script, keep_alive=harness.keep_alive) as stand_in:
        run = await run_harness(harness, stand_in, tmp_path, INSTRUCTION, profile=profile)
    assert (run.exit_code, run.stdout.strip()) == (0, "all done"), run.stderr
    assert (run.workdir / "made.txt").read_text() == "é\n"
    assert stand_in.unknown_paths == []
    first, second = stand_in.requests
    assert [message["role"] for message in first.messages].count("system") == 1
    assert _text(first.messages[-1]) == INSTRUCTION
    assert second.messages[: len(first.messages)] == first.messages
    assert second.tools == first.tools
    came_back, *results = second.messages[len(first.messages) :]
    minted = [ids.tool_call(stand_in.call_ids[0], index) for index in (0, 1)]
    assert (came_back["content"], came_back["reasoning"]) == (said["content"], said["reasoning"])
    assert [call["id"] for call in came_back["tool_calls"]] == minted
    functions = [call["function"] for call in came_back["tool_calls"]]
    assert [function["name"] for function in functions] == [tool, tool]
    if provider is RESPONSES:
        assert [function["arguments"] for function in functions] == arguments
    else:
        assert [json.loads(function["arguments"]) for function in functions] == [json.loads(a) for a in arguments]
    assert [(result["role"], result["tool_call_id"]) for result in results] == [("tool", id_) for id_ in minted]
    assert "second" in _text(results[1])


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


async def test_codex_compacts_and_says_so(tmp_path: Path):
    """Its own limit is 90% of the context; ours leaves room for an answer, and `classify` names the request."""
    used = 65536 - 16384 + 1
    script = [
        completion(assistant(None, None, tool_call("exec_command", '{"cmd": "true"}')), prompt=used),
        completion(assistant("what happened so far")),
        completion(assistant("all done")),
    ]
    async with serving([RESPONSES], script) as stand_in:
        run = await run_harness(CODEX, stand_in, tmp_path, "go")
    assert run.exit_code == 0, run.stderr
    hints = [CODEX.classify(headers, body) for headers, body in zip(stand_in.headers, stand_in.bodies, strict=True)]
    assert [hint.get("kind") for hint in hints] == [None, "compaction", None]
    assert len({hint["thread"] for hint in hints}) == 1
    assert stand_in.requests[1].tools == []


async def test_a_codex_subagent_is_known_by_its_headers(tmp_path: Path):
    """The namespace tool is called by its flat name, and Codex understands what the provider makes of it. The news of
    the sub-agent's end may come at any time, so the number of calls is not fixed."""
    task = "say hello"

    def answer(request: ChatRequest) -> Completion:
        last = request.messages[-1]
        if _text(last) == task:
            return completion(assistant("hello"))
        if last["role"] == "tool" and "agent_id" in (spawned := json.loads(_text(last))):
            wait = tool_call("multi_agent_v1__wait_agent", json.dumps({"targets": [spawned["agent_id"]]}))
            return completion(assistant(None, None, wait))
        if request.messages[-2]["role"] == "user":
            spawn = tool_call("multi_agent_v1__spawn_agent", json.dumps({"message": task}))
            return completion(assistant(None, None, spawn))
        return completion(assistant("all done"))

    async with serving([RESPONSES], []) as stand_in:
        stand_in.afterwards = answer
        run = await run_harness(CODEX, stand_in, tmp_path, "go")
    assert (run.exit_code, run.stdout.strip()) == (0, "all done"), run.stderr
    hints = [CODEX.classify(headers, body) for headers, body in zip(stand_in.headers, stand_in.bodies, strict=True)]
    asked = [_text(request.messages[-1]) for request in stand_in.requests]
    assert task in asked
    assert [hint.get("kind") == "subagent" for hint in hints] == [text == task for text in asked]
    assert len({hint["thread"] for hint in hints}) == 2


@pytest.mark.parametrize("in_stream", [True, False])
async def test_codex_asks_again_after_a_server_error(in_stream: bool, tmp_path: Path):
    script = [Refusal(503, "overloaded", "busy", in_stream=in_stream), completion(assistant("all done"))]
    async with serving([RESPONSES], script) as stand_in:
        run = await run_harness(CODEX, stand_in, tmp_path, "go", profile="lean")
    assert (run.exit_code, run.stdout.strip()) == (0, "all done"), run.stderr
    assert stand_in.requests[0].messages == stand_in.requests[1].messages


@pytest.mark.parametrize(("harness", "provider"), [(PI, CHAT), (CODEX, RESPONSES)])
async def test_a_refused_request_is_a_failed_run(harness: Harness, provider: Provider, tmp_path: Path):
    async with serving([provider], [Refusal(400, "invalid_request", "this cannot be")]) as stand_in:
        run = await run_harness(harness, stand_in, tmp_path, "go", profile="lean")
    assert run.exit_code == 1
    assert "this cannot be" in run.stderr


async def test_pi_in_a_small_context_makes_no_call_after_its_last(tmp_path: Path):
    """With Pi's own reserve of 16384 tokens, a context of that size is full at once and the end of a run asks for a
    summary that nobody reads."""
    script = [completion(assistant("all done"), prompt=3000)]
    async with serving([CHAT], script) as stand_in:
        run = await run_harness(PI, stand_in, tmp_path, "go", context_length=16384)
    assert (run.exit_code, len(stand_in.requests)) == (0, 1), run.stderr
    assert stand_in.requests[0].max_tokens == 8192
