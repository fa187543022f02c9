"""The real Gemini CLI against the real provider: its tools run, and the history comes back linked by id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest

from polar_gym.chat import ChatRequest, Completion, ids
from polar_gym.harnesses.gemini_cli import HARNESS
from polar_gym.providers.google import PROVIDER
from tests.wire.harness_probe import run_harness
from tests.wire.stand_in import Refusal, StandIn, assistant, completion, serving, tool_call

INSTRUCTION = "- put 'é' into a file, @please"
SHELL = "run_shell_command"


def hints(stand_in: StandIn) -> list[str | None]:
    pairs = zip(stand_in.headers, stand_in.bodies, strict=True)
    return [HARNESS.classify(headers, body).get("kind") for headers, body in pairs]


@pytest.mark.parametrize("profile", ["default", "lean"])
async def test_a_tool_runs_and_the_history_comes_back(profile: Literal["default", "lean"], tmp_path: Path):
    arguments = ['{"command": "echo é > made.txt"}', '{"command": "echo second"}']
    said = assistant(" I shall.\n", "thinking\n\n", *(tool_call(SHELL, text) for text in arguments))
    script = [completion(said), completion(assistant("all done"))]
    async with serving([PROVIDER], script) as stand_in:
        run = await run_harness(HARNESS, stand_in, tmp_path, INSTRUCTION, profile=profile)
    assert run.exit_code == 0, run.stderr
    assert run.stdout.strip().endswith("all done")
    assert (run.workdir / "made.txt").read_text() == "é\n"
    assert stand_in.unknown_paths == []
    first, second = stand_in.requests
    assert (first.model, first.max_tokens) == ("policy", 16384)
    assert first.messages[0]["role"] == "system"
    assert first.messages[-1]["content"][-1]["text"].strip() == INSTRUCTION
    assert second.messages[: len(first.messages)] == first.messages
    assert second.tools == first.tools
    minted = [ids.tool_call(stand_in.call_ids[0], index) for index in (0, 1)]
    calls = [{**call, "id": id_} for call, id_ in zip(said["tool_calls"], minted, strict=True)]
    came_back, *results = second.messages[len(first.messages) :]
    assert came_back == {**said, "tool_calls": calls}
    assert [(result["role"], result["tool_call_id"]) for result in results] == [("tool", id_) for id_ in minted]
    assert "second" in results[1]["content"]
    assert hints(stand_in) == [None, None]


@pytest.mark.parametrize("in_stream", [True, False])
async def test_it_gives_up_on_a_prompt_that_is_too_long(in_stream: bool, tmp_path: Path):
    """Guards against an error that the CLI ignores, and then ends as if the model had said nothing."""
    refusal = Refusal(400, "context_length", "This model's maximum context length is 1 tokens", in_stream=in_stream)
    async with serving([PROVIDER], [refusal]) as stand_in:
        run = await run_harness(HARNESS, stand_in, tmp_path, INSTRUCTION, profile="lean")
    assert run.exit_code == 1
    assert "exceeds the maximum number of tokens allowed" in run.stderr


BROKEN = {
    "an error after the status line": Refusal(503, "overloaded", "busy", in_stream=True),
    "arguments that are no JSON": completion(assistant(None, "hm", tool_call(SHELL, '{"command": "ls'))),
}


@pytest.mark.parametrize("broken", BROKEN)
async def test_it_asks_again(broken: str, tmp_path: Path):
    async with serving([PROVIDER], [BROKEN[broken], completion(assistant("all done"))]) as stand_in:
        run = await run_harness(HARNESS, stand_in, tmp_path, INSTRUCTION, profile="lean")
    assert (run.exit_code, run.stdout.strip()) == (0, "all done"), run.stderr
    first, second = stand_in.requests
    assert second.messages == first.messages


async def test_a_subagent_is_known_by_its_tool(tmp_path: Path):
    """Its history comes back linked by id too, and its result is the answer to the main thread's call."""

    def answer(request: ChatRequest) -> Completion:
        last = request.messages[-1]
        if "complete_task" in {tool["function"]["name"] for tool in request.tools}:
            if last["role"] == "user":
                return completion(assistant("I look.", "hm", tool_call(SHELL, '{"command": "echo one"}')))
            report = json.dumps({"result": {"response": "fine"}})
            return completion(assistant(None, None, tool_call("complete_task", report)))
        if last["role"] == "user":
            task = json.dumps({"agent_name": "generalist", "prompt": "say hello"})
            return completion(assistant(None, None, tool_call("invoke_agent", task)))
        return completion(assistant("all done"))

    async with serving([PROVIDER], []) as stand_in:
        stand_in.afterwards = answer
        run = await run_harness(HARNESS, stand_in, tmp_path, "go")
    assert (run.exit_code, run.stdout.strip().endswith("all done")) == (0, True), run.stderr
    assert hints(stand_in) == [None, "subagent", "subagent", None]
    _, _, reported, last = stand_in.requests
    made, result = reported.messages[-2:]
    assert (made["content"], made["reasoning"]) == ("I look.", "hm")
    assert result["tool_call_id"] == made["tool_calls"][0]["id"] == ids.tool_call(stand_in.call_ids[1], 0)
    assert last.messages[-1]["tool_call_id"] == ids.tool_call(stand_in.call_ids[0], 0)
    assert "fine" in str(last.messages[-1]["content"])
