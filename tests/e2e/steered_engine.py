"""vLLM whose random model works like an agent: it calls the shell tool of any harness some turns long, then ends.

vLLM's own grammar gives an answer its form. The model samples the tokens, so that the commands of two samples differ:
`engine.name=tests.e2e.steered_engine:SteeredReplicas`. Logprobs are those under the grammar.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from pydantic import Field

from polar_gym.chat import ChatRequest
from polar_gym.chat.messages import canonical_json
from polar_gym.conformance.acting import asks_for_summary
from polar_gym.engines.embedded.shell_tools import ShellTool, example, find_shell, shell_arguments
from polar_gym.engines.replicas import Replicas
from polar_gym.engines.vllm import VllmEngine, VllmOptions

COMMANDS = """
command ::= "echo " word " >> notes.txt; wc -c notes.txt" | "echo " word | "seq " [1-9] [0-9]
word ::= [a-z] [a-z] [a-z] [a-z]? [a-z]? [a-z]?
"""
"""Commands that do no harm, and run in any sandbox."""
WORDS = "root ::= [A-Z] [a-z] [a-z] [a-z]? [a-z]? [a-z]? [a-z]? [a-z]? [a-z]? [a-z]? [a-z]?"
PLACE = "COMMAND"


class SteeredOptions(VllmOptions):
    turns: int = Field(default=4, ge=0)
    """How many turns with a tool call a conversation takes before the model ends with a plain answer. A conversation
    that is compacted begins to count anew: give harnesses a context that is long enough, or their lean profile."""


class SteeredEngine(VllmEngine):
    Options = SteeredOptions

    def __init__(self, options: SteeredOptions) -> None:
        unthinking = {**options.chat_template_kwargs, "enable_thinking": False}  # a grammar waits for thinking's end
        super().__init__(options.model_copy(update={"chat_template_kwargs": unthinking}))
        self._turns = options.turns

    def _chat_body(self, request: ChatRequest, fields: dict[str, Any]) -> dict[str, Any]:
        grammar = _grammar(request, self._turns)
        body = super()._chat_body(replace(request, response_format=None), fields)
        return body | {"structured_outputs": {"grammar": grammar}}


class SteeredReplicas(Replicas):
    Options = SteeredOptions
    make = SteeredEngine


def _grammar(request: ChatRequest, turns: int) -> str:
    """Return the grammar of the answer: a call of the shell tool, an instance of the wanted schema, or a word."""
    shell = find_shell(request.tools)
    taken = sum(1 for message in request.messages if message.get("tool_calls"))
    if shell and taken < turns and request.tool_choice != "none" and not asks_for_summary(request):
        return _shell_call(shell)
    if request.response_format and request.response_format.get("type") != "text":
        schema = (request.response_format.get("json_schema") or {}).get("schema") or {"type": "object"}
        return f"root ::= {_quoted(canonical_json(example(schema)))}"
    return WORDS


def _shell_call(shell: ShellTool) -> str:
    call = {"name": shell.name, "arguments": shell_arguments(shell, PLACE)}
    before, _, after = f"<tool_call>\n{json.dumps(call)}\n</tool_call>".partition(PLACE)
    return f"root ::= {_quoted(before)} command {_quoted(after)}{COMMANDS}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
