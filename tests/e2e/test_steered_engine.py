"""The engine whose random model works like an agent."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from polar_gym.chat import ChatRequest
from polar_gym.schema import Sampling
from tests.e2e.steered_engine import SteeredOptions, SteeredReplicas
from tests.e2e.vllm_server import VllmServer
from tests.support.tools import ASK, BASH


async def test_it_calls_the_shell_some_turns_long_and_then_ends(vllm_server: VllmServer) -> None:
    engine = SteeredReplicas(SteeredOptions(url=vllm_server.url, turns=2))
    await engine.start()
    request, commands = ChatRequest(model="policy", messages=ASK, tools=[BASH], max_tokens=200), []
    for _ in range(2):
        said = (await engine.chat(request, Sampling())).message
        (call,) = said["tool_calls"]
        assert call["function"]["name"] == "bash"
        commands.append(json.loads(call["function"]["arguments"])["command"])
        result: Any = {"role": "tool", "tool_call_id": call["id"], "content": "seen"}
        request = replace(request, messages=[*request.messages, said, result])
    assert all(command.startswith(("echo ", "seq ")) for command in commands)
    ended = (await engine.chat(request, Sampling())).message
    await engine.close()
    assert not ended.get("tool_calls")
    assert str(ended["content"]).isalpha()
