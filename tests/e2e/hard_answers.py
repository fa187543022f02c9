"""An engine whose answers are hard to hand back: blanks, odd JSON, odd numbers, escapes, a needless `cd`.

It is the embedded engine with a policy that says these things one after another, and with a parser that keeps an
answer's text and arguments as they were sampled, as those of several model families do. It remembers what it said and
what it was asked, so that what harnesses made of it can be told.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from polar_gym.chat import ChatRequest, Completion, OnDelta
from polar_gym.chat.messages import assistant_message
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.engines.embedded.policy import Generation, OnIds
from polar_gym.engines.embedded.scripted import ScriptedPolicy
from polar_gym.engines.embedded.shell_tools import ShellTool, find_shell, shell_arguments
from polar_gym.schema import Message, Sampling

FINAL = "All of it is done."


def _plainly(arguments: dict[str, Any], shell: ShellTool) -> str:
    return json.dumps(arguments)


def _oddly(arguments: dict[str, Any], shell: ShellTool) -> str:
    """Blanks where nobody puts them, characters spelled as escapes, and the command last."""
    described = {"description": "odd"} if "description" in shell.parameters["properties"] else {}
    return json.dumps({**described, **arguments}, separators=(" ,", ":  ")).replace("/", "\\/")


def _with_an_odd_number(arguments: dict[str, Any], shell: ShellTool) -> str:
    """In the first property that takes a number, if there is one."""
    properties = shell.parameters["properties"]
    name = next((name for name, schema in properties.items() if schema.get("type") in ("number", "integer")), None)
    whole = json.dumps(arguments)
    return whole if name is None else whole.removesuffix("}") + f', "{name}": 6.0e4}}'


@dataclass(frozen=True, kw_only=True)
class Hard:
    """One answer."""

    text: str | None = None
    reasoning: str | None = None
    commands: tuple[str, ...] = ("true",)
    spelled: Callable[[dict[str, Any], ShellTool], str] = _plainly


ANSWERS = {
    "blanks around the text": Hard(text="  I look around. \n", commands=("ls",)),
    "blank lines before a call": Hard(text="\n\n"),
    "blanks around the thinking": Hard(reasoning="\n\nIt is a folder.\n\n", text="So."),
    "blank thinking": Hard(reasoning="  "),
    "odd JSON": Hard(commands=("echo é / '😀'",), spelled=_oddly),
    "an odd number": Hard(spelled=_with_an_odd_number),
    "a needless cd": Hard(commands=("cd /workspace && ls",)),
    "trailing blanks in a command": Hard(commands=("echo 1  \n",)),
    "parallel calls": Hard(reasoning="Both.\n", text="Both. ", commands=("echo 1", "echo 2")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An answer with calls, as it left the engine."""

    name: str
    """Of `ANSWERS`."""
    message: Message


class HardPolicy(ScriptedPolicy):
    """Says what it is told to."""

    answer = ""

    async def generate(self, request: ChatRequest, sampling: Sampling, on_ids: OnIds | None) -> Generation:
        ids = self._with_added_tokens.encode(self.answer).ids
        return Generation(ids, [0.0] * len(ids), "stop")


class HardEngine(EmbeddedEngine):
    """Serves one session."""

    def __init__(self, ends_by: str = "") -> None:
        """`ends_by`: that of the harness (`Harness.ends_by`)."""
        super().__init__(EmbeddedOptions())
        self._end = Hard(commands=(f"{ends_by}; echo '{FINAL}'",)) if ends_by else None
        self._policy = HardPolicy(EmbeddedOptions())
        self.told: dict[str, Told] = {}
        """Id of an answer's first call -> the answer."""
        self.asked: list[list[Message]] = []

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        self.asked.append(request.messages)
        shell = find_shell(request.tools)
        turns = sum(1 for message in request.messages if message.get("tool_calls"))
        if shell and self._end and turns == len(ANSWERS):
            message = _message(self._end, shell)
        elif shell is None or turns >= len(ANSWERS):
            message = assistant_message(FINAL, None, [])
        else:
            name = list(ANSWERS)[turns]
            message = _message(ANSWERS[name], shell)
            self.told[message["tool_calls"][0]["id"]] = Told(name=name, message=message)
        assert isinstance(self._policy, HardPolicy)
        self._policy.answer = _sampled(message)
        return replace(await super().chat(request, sampling), message=message)


def _message(answer: Hard, shell: ShellTool) -> Message:
    calls = []
    for command in answer.commands:
        arguments = answer.spelled(shell_arguments(shell, command), shell)
        function = {"name": shell.name, "arguments": arguments}
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return assistant_message(answer.text, answer.reasoning, calls)


def _sampled(message: Message) -> str:
    thinking = f"<think>{message['reasoning']}</think>" if message.get("reasoning") else ""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [
        f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
        for function in functions
    ]
    return thinking + (message["content"] or "") + "\n".join(calls) + "<|im_end|>"


def rewrites(engine: HardEngine) -> dict[str, list[str]]:
    """Name of an answer -> what of it came back in another form, in any request; without those that never came."""
    found: dict[str, dict[str, None]] = {}
    for messages in engine.asked:
        for message in messages:
            calls = message.get("tool_calls") or [{"id": ""}]
            told = next((engine.told[call["id"]] for call in calls if call["id"] in engine.told), None)
            if told is not None:
                found.setdefault(told.name, {}).update(dict.fromkeys(_differences(told.message, message)))
    return {name: list(changes) for name, changes in found.items()}


def _differences(said: Message, back: Message) -> list[str]:
    changes = [
        _words("text", said["content"] or "", _text(back)),
        _words("thinking", said.get("reasoning") or "", back.get("reasoning") or ""),
    ]
    told = {call["id"]: call["function"] for call in said["tool_calls"]}
    returned = {call["id"]: call["function"] for call in back["tool_calls"]}
    if list(told) != list(returned):
        changes.append("calls dropped or in another order")
    changes += [_arguments(told[each], returned[each]) for each in told if each in returned]
    return [change for change in changes if change]


def _words(what: str, said: str, back: str) -> str:
    if said == back:
        return ""
    if not back:
        return f"{what} dropped"
    return f"{what} trimmed" if back == said.strip() else f"{what} is {back!r}"


def _arguments(said: dict[str, str], back: dict[str, str]) -> str:
    if said == back:
        return ""
    if said["name"] != back["name"]:
        return f"calls {back['name']!r}"
    before, after = json.loads(said["arguments"]), json.loads(back["arguments"])
    if before != after:
        changed = [f"{key}={after.get(key)!r}" for key in {**before, **after} if before.get(key) != after.get(key)]
        return f"arguments changed: {', '.join(changed)}"
    return "arguments written anew" + ("" if list(before) == list(after) else ", keys reordered")


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
