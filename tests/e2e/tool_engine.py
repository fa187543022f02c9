"""An embedded engine whose scripts call tools of an environment: a command is a tool's own name and its arguments."""

from __future__ import annotations

from polar_gym.chat import ChatRequest
from polar_gym.chat.messages import assistant_message
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.engines.embedded.scripted import ScriptedPolicy
from polar_gym.schema import Message


class ToolCallingPolicy(ScriptedPolicy):
    def next_message(self, request: ChatRequest) -> Message:
        script = self._script(request.messages)
        step = sum(1 for message in request.messages if message.get("tool_calls"))
        if script is None or not request.tools or step >= len(script.commands):
            return super().next_message(request)
        name, _, arguments = script.commands[step].partition(" ")
        offered = [tool["function"]["name"] for tool in request.tools]
        own = next((each for each in offered if each.endswith(name)), f"{name} is not among {', '.join(offered)}")
        return assistant_message(None, None, [{"type": "function", "function": {"name": own, "arguments": arguments}}])


class ToolCalling(EmbeddedEngine):
    def __init__(self, options: EmbeddedOptions) -> None:
        super().__init__(options)
        self._policy = ToolCallingPolicy(options.scripts or [], options.max_model_len or 131_072, 0.0)
