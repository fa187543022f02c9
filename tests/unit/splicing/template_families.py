"""Chat templates of the families that models come in, over the embedded tokenizer with the family's special tokens.

A family is its conventions: the template (`templates/*.jinja`, rendered as vLLM renders templates) and how its policy
spells an answer. Answers are tokenised one character at a time, as no template would: what is re-tokenised shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from tokenizers import Tokenizer

from polar_gym.chat import has_media
from polar_gym.chat.messages import canonical_json
from polar_gym.engines import EngineError
from polar_gym.engines.embedded.chatml import TEMPLATE_FILE, TOKENIZER_FILE
from polar_gym.schema import Message, ToolDefinition

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True, kw_only=True)
class Said:
    """An answer, before a family spells it."""

    text: str = ""
    reasoning: str = ""
    commands: tuple[str, ...] = ()
    """One call of the shell tool for each."""
    end: str = "turn"
    """`turn`, `stop string`, `length`, `another` (a token that ends answers, but is not the template's), `in a call`
    (for want of room)."""


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    special: tuple[str, ...]
    spell: Callable[[Said, Sequence[str]], str]
    """An answer and the ids of its calls -> the text up to the end of the turn."""
    end: str
    end_of_calls: str | None = None
    """Where it is another."""
    before_end: str = ""
    """What the template has between words and the end of their turn."""
    another_end: str | None = None
    call_id: Callable[[int], str] = "call_{}".format
    parallel: bool = True

    def sampled(self, said: Said, call_ids: Sequence[str]) -> str:
        text = self.spell(said, call_ids)
        if said.end == "in a call":
            return text[: text.index("README") + 3]
        ends = {
            "turn": (said.commands and self.end_of_calls) or self.end,
            "another": self.another_end or "",
        }
        return text + ends.get(said.end, "")


class FamilyEngine:
    """What splicing needs of an engine that serves a model of the family."""

    takes_prefix_only = False

    def __init__(self, family: Family) -> None:
        self._tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
        self._tokenizer.add_special_tokens(list(family.special))
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        self._added = re.compile("(" + "|".join(map(re.escape, added)) + ")")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = canonical_json
        environment.globals["raise_exception"] = _raise
        file = TEMPLATES / f"{family.name}.jinja"
        source = (file if file.exists() else TEMPLATE_FILE).read_text(encoding="utf-8")
        self._template = environment.from_string(source)

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        if any(map(has_media, messages)):
            raise EngineError(400, "it is not a multimodal model")
        prepared = [_with_parsed_arguments(message) for message in messages]
        try:
            text = self._template.render(messages=prepared, tools=list(tools) or None, add_generation_prompt=True)
        except TemplateError as error:
            raise EngineError(400, str(error)) from error
        return np.asarray(self.whole(text), np.int32)

    async def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def whole(self, text: str) -> list[int]:
        """The text's ids, as a template's are made."""
        return self._tokenizer.encode(text).ids

    def drifting(self, text: str) -> NDArray[np.int32]:
        """The text's ids, special tokens whole, the rest one character at a time."""
        parts = [[part] if self._added.fullmatch(part) else list(part) for part in self._added.split(text)]
        ids = [token for part in parts for piece in part for token in self._tokenizer.encode(piece).ids]
        return np.asarray(ids, np.int32)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _with_parsed_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        function = {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _chatml(said: Said, call_ids: Sequence[str]) -> str:
    thinking = f"<think>{said.reasoning}</think>" if said.reasoning else ""
    calls = [
        f'<tool_call>\n{{"name":"bash",  "arguments": {{"command":{json.dumps(each)}}}}}\n</tool_call>'
        for each in said.commands
    ]
    return thinking + said.text + "\n".join(calls)


def _qwen(said: Said, call_ids: Sequence[str]) -> str:
    """Inside the thinking that the prompt has opened."""
    calls = [
        f"\n\n<tool_call>\n<function=bash>\n<parameter=command>\n{each}\n</parameter>\n</function>\n</tool_call>"
        for each in said.commands
    ]
    return f"{said.reasoning}\n</think>\n\n{said.text}{''.join(calls)}"


def _glm(said: Said, call_ids: Sequence[str]) -> str:
    thinking = f"<think>{said.reasoning}</think>\n" if said.reasoning else ""
    calls = [
        f"\n<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>{each}</arg_value>\n</tool_call>"
        for each in said.commands
    ]
    return thinking + said.text + "".join(calls)


def _kimi(said: Said, call_ids: Sequence[str]) -> str:
    thinking = f"<think>{said.reasoning}</think>" if said.reasoning else ""
    calls = [
        f'<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{{"command":{json.dumps(each)}}}<|tool_call_end|>'
        for call_id, each in zip(call_ids, said.commands, strict=True)
    ]
    section = f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>" if calls else ""
    return thinking + said.text + section


def _mistral(said: Said, call_ids: Sequence[str]) -> str:
    thinking = f"[THINK]{said.reasoning}[/THINK]" if said.reasoning else ""
    calls = [
        f'{{"name":"bash","arguments":{{"command":{json.dumps(each)}}},"id":"{call_id}"}}'
        for call_id, each in zip(call_ids, said.commands, strict=True)
    ]
    return thinking + said.text + (f"[TOOL_CALLS][{','.join(calls)}]" if calls else "")


def _harmony(said: Said, call_ids: Sequence[str]) -> str:
    """After the role that the prompt ends with; every part but the last is a turn of its own."""
    parts = [f"<|channel|>analysis<|message|>{said.reasoning}"] if said.reasoning else []
    parts += [f"<|channel|>final<|message|>{said.text}"] if said.text else []
    parts += [
        f' to=functions.bash<|channel|>commentary json<|message|>{{"command":{json.dumps(each)}}}'
        for each in said.commands
    ]
    return "<|end|><|start|>assistant".join(parts)


def _minimax(said: Said, call_ids: Sequence[str]) -> str:
    thinking = f"<think>\n{said.reasoning}\n</think>\n\n" if said.reasoning else ""
    calls = [
        f'\n<invoke name="bash">\n<parameter name="command">{each}</parameter>\n</invoke>' for each in said.commands
    ]
    section = f"\n<minimax:tool_call>{''.join(calls)}\n</minimax:tool_call>" if calls else ""
    return thinking + said.text + section


def _nemotron(said: Said, call_ids: Sequence[str]) -> str:
    """Behind the thinking that the prompt has opened."""
    calls = [f'{{"name":"bash",  "arguments": {{"command":{json.dumps(each)}}}}}' for each in said.commands]
    section = f"<TOOLCALL>[{', '.join(calls)}]</TOOLCALL>" if calls else ""
    return f"{said.reasoning}</think>{said.text}{section}"


def _command(said: Said, call_ids: Sequence[str]) -> str:
    calls = [
        f'{{"tool_call_id": "{call_id}", "tool_name": "bash", "parameters": {{"command":{json.dumps(each)}}}}}'
        for call_id, each in zip(call_ids, said.commands, strict=True)
    ]
    thinking = f"<|START_THINKING|>{said.reasoning}<|END_THINKING|>" if said.reasoning else ""
    text = f"<|START_RESPONSE|>{said.text}<|END_RESPONSE|>" if said.text else ""
    return thinking + text + (f"<|START_ACTION|>[{', '.join(calls)}]<|END_ACTION|>" if calls else "")


FAMILIES = [
    Family(
        name="chatml",
        special=(),
        spell=_chatml,
        end="<|im_end|>",
        another_end="<|endoftext|>",
    ),
    Family(
        name="qwen",
        special=("<tool_response>", "</tool_response>"),
        spell=_qwen,
        end="<|im_end|>",
        another_end="<|endoftext|>",
    ),
    Family(
        name="glm",
        special=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        spell=_glm,
        end="<|user|>",
        end_of_calls="<|observation|>",
        another_end="<|endoftext|>",
    ),
    Family(
        name="kimi",
        special=(
            *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[EOS]"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        spell=_kimi,
        end="<|im_end|>",
        another_end="[EOS]",
        call_id="functions.bash:{}".format,
    ),
    Family(
        name="mistral",
        special=(
            *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[THINK]", "[/THINK]"),
        ),
        spell=_mistral,
        end="</s>",
        call_id="call{:05d}".format,
    ),
    Family(
        name="minimax",
        special=("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"),
        spell=_minimax,
        end="[e~[",
    ),
    Family(
        name="harmony",
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
        spell=_harmony,
        end="<|return|>",
        end_of_calls="<|call|>",
        another_end="<|end|>",
        parallel=False,
    ),
    Family(
        name="nemotron",
        special=("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<TOOLCALL>", "</TOOLCALL>"),
        spell=_nemotron,
        end="<SPECIAL_12>",
        before_end="\n",
        another_end="<|endoftext|>",
    ),
    Family(
        name="command",
        special=(
            *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
            *("<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>"),
            *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>"),
            *("<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>", "<|START_THINKING|>", "<|END_THINKING|>"),
        ),
        spell=_command,
        end="<|END_OF_TURN_TOKEN|>",
        before_end="<|END_RESPONSE|>",
    ),
]
