"""The real Qwen Code and OpenCode: the tools run, the history comes back by id, side calls are known for what they are.

Both re-serialise the arguments of tool calls, and Qwen Code trims reasoning: the ids are what links a history.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import pytest

from polar_gym.chat import ChatRequest, Completion, ids
from polar_gym.harnesses import Harness
from polar_gym.harnesses.opencode import HARNESS as OPENCODE
from polar_gym.harnesses.qwen_code import HARNESS as QWEN_CODE
from polar_gym.providers.openai_chat import PROVIDER as CHAT
from tests.wire.harness_probe import run_harness
from tests.wire.silent_dns import look_ups
from tests.wire.stand_in import Refusal, StandIn, assistant, completion, serving, tool_call

INSTRUCTION = "- put 'é' into a file, please"
SHELL = {"qwen_code": "run_shell_command", "opencode": "bash"}
HARNESSES = {"qwen_code": QWEN_CODE, "opencode": OPENCODE}


def _hints(harness: Harness, stand_in: StandIn) -> list[dict[str, str]]:
    return [harness.classify(headers, body) for headers, body in zip(stand_in.headers, stand_in.bodies, strict=True)]


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _shell(name: str, command: str) -> dict[str, Any]:
    """A call of the harness's shell. Odd but valid JSON: a re-serialisation loses the blanks and the escape."""
    spelled = json.dumps(command).replace("é", "\\u00e9")
    return tool_call(SHELL[name], f'{{"command":  {spelled}, "description": "d", "is_background": false}}')


@pytest.mark.parametrize("name", HARNESSES)
@pytest.mark.parametrize("profile", ["default", "lean"])
async def test_an_answer_without_a_tool_call_ends_it(name: str, profile: Literal["default", "lean"], tmp_path: Path):
    """Guards against an agent of Qwen Code's own that looks for things to remember after such an answer: it was trained
    as the policy, and its answer was graded as the policy's."""
    async with serving([CHAT], []) as stand_in:
        stand_in.afterwards = completion(assistant("42"))
        run = await run_harness(HARNESSES[name], stand_in, tmp_path, INSTRUCTION, profile=profile)
    assert (run.exit_code, run.stdout.strip()) == (0, "42")
    kinds = [hints.get("kind", "main") for hints in _hints(HARNESSES[name], stand_in)]
    assert sorted(kinds) == ["auxiliary"] * (len(kinds) - 1) + ["main"]


@pytest.mark.parametrize("name", HARNESSES)
async def test_a_tool_runs_and_the_history_comes_back(name: str, tmp_path: Path):
    harness = HARNESSES[name]
    calls = (_shell(name, "echo é > made.txt"), _shell(name, "echo second"))
    said = assistant(" I shall.\n", "thinking\n\n", *calls)

    def answer(request: ChatRequest) -> Completion:
        if not request.tools:
            return completion(assistant("A title"))
        return completion(assistant("all done") if request.messages[-1]["role"] == "tool" else said)

    async with serving([CHAT], []) as stand_in:
        stand_in.afterwards = answer
        run = await run_harness(harness, stand_in, tmp_path, INSTRUCTION)
    assert run.exit_code == 0, run.stderr
    assert run.stdout.strip().endswith("all done")
    assert (run.workdir / "made.txt").read_text() == "é\n"
    assert stand_in.unknown_paths == []

    kinds = [hint.get("kind") for hint in _hints(harness, stand_in)]
    assert sorted(map(str, kinds)) == ["None", "None"] + (["auxiliary"] if name == "opencode" else [])
    main = [index for index, kind in enumerate(kinds) if kind is None]
    first, second = (stand_in.requests[index] for index in main)
    assert _text(first.messages[-1]).rstrip("\n") == INSTRUCTION
    assert second.messages[: len(first.messages)] == first.messages
    assert second.tools == first.tools
    came_back, *results = second.messages[len(first.messages) :]
    minted = [ids.tool_call(stand_in.call_ids[main[0]], index) for index in (0, 1)]
    assert came_back["content"] == said["content"]
    assert came_back["reasoning"].strip() == "thinking"
    assert [call["id"] for call in came_back["tool_calls"]] == minted
    functions = [call["function"] for call in came_back["tool_calls"]]
    assert [json.loads(f["arguments"]) for f in functions] == [json.loads(c["function"]["arguments"]) for c in calls]
    assert [(result["role"], result["tool_call_id"]) for result in results] == [("tool", id_) for id_ in minted]
    assert "second" in _text(results[1])


@pytest.mark.parametrize("name", HARNESSES)
async def test_nothing_is_looked_up(name: str, tmp_path: Path):
    """Guards against the start of a run that asks the network for updates, plug-ins or statistics: in a sandbox without
    a resolver each such question costs a time-out."""
    found = await asyncio.to_thread(look_ups, name, tmp_path)
    assert found == {"exit_code": 0, "stdout": "all done", "names": []}


@pytest.mark.parametrize("name", HARNESSES)
async def test_a_refused_request_is_a_failed_run(name: str, tmp_path: Path):
    async with serving([CHAT], [Refusal(400, "invalid_request", "this cannot be")]) as stand_in:
        run = await run_harness(HARNESSES[name], stand_in, tmp_path, "go", profile="lean")
    assert run.exit_code == 1
    assert "this cannot be" in run.stderr


@pytest.mark.parametrize("name", HARNESSES)
async def test_a_compaction_is_known(name: str, tmp_path: Path):
    """In the lean profile, which has four tools, no title, and a quarter of the context for an answer. Qwen Code throws
    a summary away that, by the reported lengths, saves nothing."""
    script = [
        completion(assistant(None, None, _shell(name, "true"))),
        completion(assistant(None, None, _shell(name, "true")), prompt=65536 * 3 // 4 + 1),
        completion(assistant("what happened so far"), prompt=3000, answer=100),
        completion(assistant("all done")),
    ]
    async with serving([CHAT], script) as stand_in:
        run = await run_harness(HARNESSES[name], stand_in, tmp_path, "go", profile="lean")
    assert run.exit_code == 0, run.stderr
    assert run.stdout.strip().endswith("all done")
    hints = _hints(HARNESSES[name], stand_in)
    assert [hint.get("kind") for hint in hints] == [None, None, "compaction", None]
    assert [request.max_tokens for request in stand_in.requests] == [16384] * 4
    tools = sorted(tool["function"]["name"] for tool in stand_in.requests[0].tools)
    assert len(tools) == 4
    assert SHELL[name] in tools
    assert "what happened so far" in str(stand_in.requests[3].messages)


async def test_an_opencode_subagent_is_known_by_its_parent(tmp_path: Path):
    task = "say hello"

    def answer(request: ChatRequest) -> Completion:
        last = request.messages[-1]
        if not request.tools:
            return completion(assistant("A title"))
        if last["role"] == "tool":
            return completion(assistant("all done"))
        if _text(last) == task:
            return completion(assistant("hello"))
        arguments = {"description": "greet", "prompt": task, "subagent_type": "general"}
        return completion(assistant(None, None, tool_call("task", json.dumps(arguments))))

    async with serving([CHAT], []) as stand_in:
        stand_in.afterwards = answer
        run = await run_harness(OPENCODE, stand_in, tmp_path, "go")
    assert run.exit_code == 0, run.stderr
    hints = _hints(OPENCODE, stand_in)
    (child,) = [hint for hint in hints if hint.get("kind") == "subagent"]
    assert [hint.get("kind") for hint in hints].count(None) == 2
    assert _text(stand_in.requests[hints.index(child)].messages[-1]) == task
    assert {hint["thread"] for hint in hints if hint.get("kind") is None}.isdisjoint({child["thread"]})
    assert "hello" in _text(stand_in.requests[-1].messages[-1])
