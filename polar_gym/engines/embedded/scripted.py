"""A policy that reads from a script: deterministic and instant.

It keeps no state. The script, and the step in it, follow from the conversation alone, so that retries, forks and
parallel sessions need no bookkeeping. Its answers are sampled with probability 1, so every logprob is 0.0 and the
sampling parameters change nothing.
"""

from __future__ import annotations

import asyncio
import bisect
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar_gym.chat import ChatRequest
from polar_gym.chat.messages import assistant_message, canonical_json
from polar_gym.engines import EngineError, Replay
from polar_gym.engines.embedded.chatml import TOKENIZER_FILE, ChatML, text_content
from polar_gym.engines.embedded.options import CONTEXT_LENGTH, EmbeddedOptions, Script
from polar_gym.engines.embedded.policy import TOKENS_AT_ONCE, Generation, OnIds
from polar_gym.engines.embedded.shell_tools import example, find_shell, no_shell, shell_arguments
from polar_gym.schema import Message, Sampling, ToolDefinition

NO_SCRIPT = "No script matches this conversation: no `match` occurs in any of its user messages."


class ScriptedPolicy(ChatML):
    tokenizer = str(TOKENIZER_FILE)

    def __init__(self, options: EmbeddedOptions) -> None:
        super().__init__()
        self.max_model_len = options.max_model_len or CONTEXT_LENGTH
        self._scripts, self._delay_seconds = options.scripts or [], options.delay_seconds

    def load(self) -> None:
        """Do nothing: the tokenizer ships with the package."""

    def close(self) -> None:
        """Do nothing: a script holds no resources."""

    async def replay(self, ids: NDArray[np.int32], replay: Replay) -> NDArray[np.float32]:
        raise EngineError(400, "the scripted policy has no distribution to score tokens with; use one with a model")

    async def generate(self, request: ChatRequest, sampling: Sampling, on_ids: OnIds | None) -> Generation:
        assert request.max_tokens is not None
        await asyncio.sleep(self._delay_seconds)
        ids = self.answer_ids(self.next_message(request))
        cut = min(self._length_until_stop(ids, request.stop), request.max_tokens)
        finished = cut < request.max_tokens or cut == len(ids)
        if on_ids is not None:
            await _tell(ids[:cut], on_ids)
        return Generation(ids[:cut], [0.0] * cut, "stop" if finished else "length")

    def next_message(self, request: ChatRequest) -> Message:
        """Return the next message of the script. A forced tool is called. A JSON schema is answered with its smallest
        instance."""
        script = self._script(request.messages)
        step = sum(1 for message in request.messages if message.get("tool_calls"))
        commands = script.commands[step:] if script else []
        forced = _forced_tool(request)
        shell = find_shell([forced] if forced else request.tools)
        if request.tool_choice != "none" and shell and (commands or forced):
            return tool_call(shell.name, shell_arguments(shell, commands[0] if commands else "true"))
        if forced:
            function = forced["function"]
            return tool_call(function["name"], example(function.get("parameters") or {}))
        if request.response_format and request.response_format.get("type") != "text":
            schema = (request.response_format.get("json_schema") or {}).get("schema") or {"type": "object"}
            return assistant_message(canonical_json(example(schema)), None, [])
        if commands and request.tools and not shell:
            return assistant_message(no_shell(request.tools), None, [])
        return assistant_message(script.final_message if script else NO_SCRIPT, None, [])

    def _script(self, messages: list[Message]) -> Script | None:
        texts = [text_content(message, index) for index, message in enumerate(messages) if message["role"] == "user"]
        matching = [script for script in self._scripts if any(script.match in text for text in texts)]
        return max(matching, key=lambda script: len(script.match), default=None)

    def _length_until_stop(self, ids: list[int], stop: list[str]) -> int:
        """Return how many ids are sampled until a stop string is complete. Ids are never cut out, only not sampled."""

        def stopped(length: int) -> bool:
            text = "".join(piece.text for piece in self.pieces(ids[:length]))
            return any(word in text for word in stop)

        return min(bisect.bisect_left(range(len(ids) + 1), True, key=stopped), len(ids))


async def _tell(ids: list[int], on_ids: OnIds) -> None:
    for start in range(0, len(ids), TOKENS_AT_ONCE):
        said = ids[start : start + TOKENS_AT_ONCE]
        on_ids(said, [0.0] * len(said))
        await asyncio.sleep(0)  # lets the task that delivers the answer run, or cancel this one


def _forced_tool(request: ChatRequest) -> ToolDefinition | None:
    """Return the named tool, or the tool to call where one is `required`: the shell tool, else the first tool."""
    if request.tool_choice == "required":
        shell = find_shell(request.tools)
        return shell.definition if shell else request.tools[0]
    if isinstance(request.tool_choice, dict):
        name = request.tool_choice["function"]["name"]
        return next(tool for tool in request.tools if tool["function"]["name"] == name)
    return None


def tool_call(name: str, arguments: dict[str, Any]) -> Message:
    """Return a message that calls a tool."""
    function = {"name": name, "arguments": canonical_json(arguments)}
    return assistant_message(None, None, [{"type": "function", "function": function}])
