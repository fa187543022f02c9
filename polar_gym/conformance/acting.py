"""Embedded engines whose scripted policy calls in a sub-agent, calls tools of an environment, or fills its context
until the harness compacts.

An answer follows from the request alone, so that the engines keep no state. Configs name them by import path
(`engine.name`), and the node gives them each task's reference solution to play.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from polar_gym.chat import ChatRequest
from polar_gym.chat.messages import assistant_message, text_of
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.engines.embedded.scripted import ScriptedPolicy, tool_call
from polar_gym.engines.embedded.shell_tools import find_shell, shell_arguments
from polar_gym.evaluators import EvaluationContext, ToolAnswer
from polar_gym.schema import EvaluationResult, Message, ModelCall

ORDER = "Solve this on my behalf:"
"""How the task of a sub-agent begins."""

SUMMARY_REQUEST = re.compile(
    r"detailed summary|CONTEXT CHECKPOINT COMPACTION|summar\w+ (of )?(our|the|this) conversation"
)
"""Words by which harnesses ask for a summary at the end of a conversation, with its tools."""

NOISE = "seq 100000 102999"
"""A command that fills a context: some ten thousand tokens."""

SUMMARY = "So far there was nothing but noise."


class DelegatingPolicy(ScriptedPolicy):
    """The main thread leaves the whole script to a sub-agent, and looks at what became of it; the rest is the script's.

    The tools by which harnesses offer sub-agents are known by name.
    """

    def next_message(self, request: ChatRequest) -> Message:
        names = {tool["function"]["name"] for tool in request.tools}
        if not names or _is_ordered(request.messages):
            return super().next_message(request)
        called = [call["function"]["name"] for message in request.messages for call in message.get("tool_calls") or []]
        script = self._script(request.messages)
        assert script is not None, "the node gives each task's script"
        spawned = spawn(names, f"{ORDER} {script.match}")
        if not called and spawned:
            return tool_call(*spawned)
        if called == ["multi_agent_v1__spawn_agent"]:
            agent = json.loads(text_of(next(message for message in request.messages if message["role"] == "tool")))
            return tool_call("multi_agent_v1__wait_agent", {"targets": [agent["agent_id"]], "timeout_ms": 60_000})
        shell = find_shell(request.tools)
        assert shell is not None
        if shell.name not in called:
            return tool_call(shell.name, shell_arguments(shell, "git status --short"))
        return assistant_message("The sub-agent has solved it.", None, [])


class CompactingPolicy(ScriptedPolicy):
    """Fills the context with noise until the harness asks for a summary, and plays the script after that."""

    def next_message(self, request: ChatRequest) -> Message:
        shell = find_shell(request.tools)
        if shell is None or asks_for_summary(request):
            script = self._script(request.messages)
            return assistant_message(f"{SUMMARY} {script.match if script else ''}", None, [])
        if SUMMARY not in str([text_of(message, "\n") for message in request.messages]):
            return tool_call(shell.name, shell_arguments(shell, NOISE))
        quiet = [message for message in request.messages if NOISE not in json.dumps(message.get("tool_calls"))]
        return super().next_message(replace(request, messages=quiet))

    def _script(self, messages: list[Message]) -> Script | None:
        """Some harnesses hand the summary back as the assistant's own words."""
        return super()._script([{**message, "role": "user"} for message in messages])


class ToolCallingPolicy(ScriptedPolicy):
    """Calls tools of an environment: a command is a tool's own name and its arguments."""

    def next_message(self, request: ChatRequest) -> Message:
        script = self._script(request.messages)
        step = sum(1 for message in request.messages if message.get("tool_calls"))
        if script is None or not request.tools or step >= len(script.commands):
            return super().next_message(request)
        name, _, arguments = script.commands[step].partition(" ")
        offered = [tool["function"]["name"] for tool in request.tools]
        own = next((each for each in offered if each.endswith(name)), f"{name} is not among {', '.join(offered)}")
        return assistant_message(None, None, [{"type": "function", "function": {"name": own, "arguments": arguments}}])


class Delegating(EmbeddedEngine):
    def __init__(self, options: EmbeddedOptions) -> None:
        super().__init__(options)
        self._policy = DelegatingPolicy(options)


class Compacting(EmbeddedEngine):
    def __init__(self, options: EmbeddedOptions) -> None:
        super().__init__(options)
        self._policy = CompactingPolicy(options)


class ToolCalling(EmbeddedEngine):
    def __init__(self, options: EmbeddedOptions) -> None:
        super().__init__(options)
        self._policy = ToolCallingPolicy(options)


class Vault:
    """An environment whose one tool gives out a secret, and the evaluator that brings it."""

    tools = (
        {
            "name": "open_vault",
            "description": "Says what is in a box of the vault.",
            "inputSchema": {"type": "object", "properties": {"box": {"type": "integer"}}, "required": ["box"]},
        },
    )

    def __init__(self) -> None:
        self.environment = self
        self.secret = secrets.token_hex(8)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        """The calls that reached it: name and arguments."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        self.asked.append((name, arguments))
        return ToolAnswer(self.secret, failed=False)

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        return EvaluationResult(evaluator="vault", reward=float(bool(self.asked)))


def asks_for_summary(request: ChatRequest | ModelCall) -> bool:
    """Return whether a request asks for a summary of the conversation so far, and does not hand `SUMMARY` back."""
    last = text_of(request.messages[-1], "\n")
    return not request.tools or (SUMMARY_REQUEST.search(last) is not None and SUMMARY not in last)


def spawn(names: set[str], order: str) -> tuple[str, dict[str, object]] | None:
    """Return the call that gives an order to a sub-agent; None where none of the tools has sub-agents."""
    if "Agent" in names:
        fields = {"description": "solve it", "prompt": order, "subagent_type": "general-purpose"}
        return "Agent", {**fields, "run_in_background": False}
    if "agent" in names:
        return "agent", {"description": "solve it", "prompt": order, "subagent_type": "general-purpose"}
    if "invoke_agent" in names:
        return "invoke_agent", {"agent_name": "generalist", "prompt": order}
    if "task" in names:
        return "task", {"description": "solve it", "prompt": order, "subagent_type": "general"}
    name = "multi_agent_v1__spawn_agent"
    return (name, {"message": order}) if name in names else None


def _is_ordered(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "user" and ORDER in text_of(message, "\n") for message in messages)
