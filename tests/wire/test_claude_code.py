"""The real Claude Code against the real provider: the tools run, the history comes back linked by id, and what it asks
for beside its turns is known for what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from polar_gym.chat import ChatRequest, Completion, ids
from polar_gym.harnesses import HARNESSES
from polar_gym.harnesses.claude_code import HARNESS
from polar_gym.providers.anthropic import PROVIDER
from polar_gym.providers.anthropic.input import TOOL_ERROR
from polar_gym.providers.openai_chat import PROVIDER as CHAT
from tests.wire.harness_probe import Run, run_harness
from tests.wire.stand_in import Answer, Refusal, StandIn, assistant, completion, serving, tool_call

INSTRUCTION = "- put 'é' into a file, @please"
TOO_LONG = (
    "This model's maximum context length is 65536 tokens. However, your prompt contains 70000 input tokens, which "
    "leaves no space for an answer. Shorten the prompt."
)


def bash(command: str) -> dict[str, Any]:
    return tool_call("Bash", json.dumps({"command": command}))


def hints(stand_in: StandIn) -> list[dict[str, str]]:
    return [HARNESS.classify(headers, body) for headers, body in zip(stand_in.headers, stand_in.bodies, strict=True)]


def text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def ended_well(run: Run) -> None:
    assert (run.exit_code, run.stdout.strip()) == (0, "all done"), run.stderr


def test_the_registry_finds_it():
    assert HARNESSES.get("claude_code") is HARNESS


@pytest.mark.parametrize("profile", ["default", "lean"])
async def test_a_tool_runs_and_the_history_comes_back(profile: Literal["default", "lean"], tmp_path: Path):
    # The third is not JSON: it must reach the harness as it is, and come back unchanged. The fourth is encoded twice.
    arguments = [
        *('{"command":  "sleep 1; echo \\u00e9 > made.txt"}', '{"command":"echo second"}', '{"command": broken'),
        json.dumps('{"command":"echo fourth"}'),
    ]
    said = assistant(" I shall.\n", "thinking\n\n", *(tool_call("Bash", each) for each in arguments))
    async with serving([CHAT, PROVIDER], [completion(said), completion(assistant("all done"))]) as stand_in:
        run = await run_harness(HARNESS, stand_in, tmp_path, INSTRUCTION, profile=profile)
    ended_well(run)
    assert (run.workdir / "made.txt").read_text() == "é\n"
    assert stand_in.unknown_paths == []
    first, second = stand_in.requests
    assert first.withheld_tools == []
    assert INSTRUCTION in [text(message)[-len(INSTRUCTION) :] for message in first.messages]
    assert "x-anthropic-billing-header" not in json.dumps(first.messages)
    assert second.messages[: len(first.messages)] == first.messages
    assert second.tools == first.tools
    came_back, *results = second.messages[len(first.messages) :]
    minted = [ids.tool_call(stand_in.call_ids[0], index) for index in range(4)]
    assert (came_back["content"], came_back["reasoning"]) == (said["content"], said["reasoning"])
    assert [call["id"] for call in came_back["tool_calls"]] == minted
    functions = [call["function"] for call in came_back["tool_calls"]]
    assert [json.loads(function["arguments"]) for function in functions[:2]] == [json.loads(a) for a in arguments[:2]]
    assert [function["arguments"] for function in functions[2:]] == arguments[2:]
    assert [result["tool_call_id"] for result in results] == minted
    answers = {result["tool_call_id"]: text(result) for result in results}
    assert answers[minted[1]] == "second"
    for each in minted[2:]:
        assert answers[each].startswith(f"{TOOL_ERROR}<tool_use_error>InputValidationError")
    assert ["kind" in hint for hint in hints(stand_in)] == [False, False]
    assert len({hint["thread"] for hint in hints(stand_in)}) == 1


@pytest.mark.parametrize("in_stream", [True, False])
async def test_it_asks_again_after_an_overload(in_stream: bool, tmp_path: Path):
    script = [Refusal(503, "overloaded", "busy", in_stream=in_stream), completion(assistant("all done"))]
    async with serving([PROVIDER], script) as stand_in:
        run = await run_harness(HARNESS, stand_in, tmp_path, "go", profile="lean")
    ended_well(run)
    assert stand_in.requests[0].messages == stand_in.requests[1].messages


async def test_a_bad_request_ends_it_with_an_exit_code(tmp_path: Path):
    async with serving([PROVIDER], [Refusal(400, "invalid_request", "no such thing")]) as stand_in:
        run = await run_harness(HARNESS, stand_in, tmp_path, "go", profile="lean")
    assert run.exit_code == 1
    assert "no such thing" in run.stdout


async def compacting(place: Path, script: list[Answer], context_length: int) -> StandIn:
    async with serving([PROVIDER], script) as stand_in:
        run = await run_harness(HARNESS, stand_in, place, "go", profile="lean", context_length=context_length)
    ended_well(run)
    before, after = json.dumps(stand_in.requests[-3].messages), json.dumps(stand_in.requests[-1].messages)
    assert ("[the summary]" in before, "[the summary]" in after) == (False, True)
    assert ("echo 0" in before, "echo 0" in after) == (True, False)
    return stand_in


SUMMARY = completion(assistant("<analysis>hm</analysis><summary>[the summary]</summary>"))


async def test_it_compacts_a_large_context_by_itself(tmp_path: Path):
    used = 65536 - 16384 - 13_000 + 1
    turns: list[Answer] = [completion(assistant(None, None, bash(f"echo {n}"))) for n in range(3)]
    full = completion(assistant(None, None, bash("echo full")), prompt=used)
    stand_in = await compacting(tmp_path, [*turns, full, SUMMARY, completion(assistant("all done"))], 65536)
    assert [hint.get("kind") for hint in hints(stand_in)] == [None] * 4 + ["compaction", None]


async def test_it_compacts_a_small_context_when_told_that_it_is_full(tmp_path: Path):
    """Usage near the limit alone starts nothing there: it would at every turn."""
    turns: list[Answer] = [completion(assistant(None, None, bash(f"echo {n}")), prompt=30_000) for n in range(4)]
    script = [*turns, Refusal(400, "context_length", TOO_LONG), SUMMARY, completion(assistant("all done"))]
    stand_in = await compacting(tmp_path, script, 32768)
    assert [hint.get("kind") for hint in hints(stand_in)] == [None] * 5 + ["compaction", None]


async def test_a_subagent_is_known_by_its_header(tmp_path: Path):
    task = "say hello"

    def answer(request: ChatRequest) -> Completion:
        if any(message["role"] == "user" and text(message).endswith(task) for message in request.messages):
            return completion(assistant("hello"))
        if request.messages[-1]["role"] == "tool":
            return completion(assistant("all done"))
        spawn = {"description": "greet", "prompt": task, "subagent_type": "general-purpose", "run_in_background": False}
        return completion(assistant(None, None, tool_call("Agent", json.dumps(spawn))))

    async with serving([PROVIDER], []) as stand_in:
        stand_in.afterwards = answer
        run = await run_harness(HARNESS, stand_in, tmp_path, "go")
    ended_well(run)
    assert [hint.get("kind") for hint in hints(stand_in)] == [None, "subagent", None]
    main, agent, again = (hint["thread"] for hint in hints(stand_in))
    assert main == again != agent
    assert "hello" in text(stand_in.requests[2].messages[-1])
