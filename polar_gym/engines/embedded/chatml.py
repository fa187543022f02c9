"""The tokenizer and the chat template of the scripted policy: ChatML with tools.

Only the template makes special tokens. The text that it prints from a request (exactly the text that Jinja's `finalize`
sees) is set between marks. The text between two marks is tokenised separately, with a tokenizer that knows no added
tokens. So user text that spells `<|im_end|>` stays plain bytes. An answer has the same ids when it is sampled and when
it comes back in the history, because it is cut into the same pieces both times.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from polar_gym.chat.messages import canonical_json
from polar_gym.engines import EngineError
from polar_gym.engines.embedded.answers import TAGS, Piece
from polar_gym.schema import Message, ToolDefinition

END_OF_TURN = "<|im_end|>"
TURN_TOKENS = ("<|im_start|>", END_OF_TURN, "<|endoftext|>")
TOKENIZER_FILE = Path(__file__).with_name("tokenizer.json")
TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")


class ChatML:
    """Turns messages into ids, and ids into the pieces of an answer."""

    def __init__(self) -> None:
        description = json.loads(TOKENIZER_FILE.read_text(encoding="utf-8"))
        self._with_added_tokens = Tokenizer.from_str(json.dumps(description))
        self._added = {token["id"]: token["content"] for token in description["added_tokens"]}
        self._plain = Tokenizer.from_str(json.dumps(description | {"added_tokens": []}))
        self._end_of_turn = next(token for token, text in self._added.items() if text == END_OF_TURN)
        self._mark = secrets.token_hex(16)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, finalize=lambda value: f"{self._mark}{value}{self._mark}"
        )
        environment.filters["tojson"] = canonical_json
        self._template = environment.from_string(TEMPLATE_FILE.read_text(encoding="utf-8"))

    def prompt_ids(self, messages: list[Message], tools: list[ToolDefinition]) -> list[int]:
        """Return the ids of the conversation and of the start of the next answer."""
        return self._render(messages, tools, add_generation_prompt=True)

    def answer_ids(self, message: Message) -> list[int]:
        """Return the ids that say `message`, from after the prompt up to its end-of-turn token."""
        whole = self._render([message], [], add_generation_prompt=False)
        start = len(self._render([], [], add_generation_prompt=True))
        end = len(whole) - whole[::-1].index(self._end_of_turn)
        return whole[start:end]

    def pieces(self, ids: list[int]) -> list[Piece]:
        """Return the text of sampled ids, tags apart from words. Turn tokens are dropped."""
        pieces: list[Piece] = []
        words: list[int] = []
        for token in [*ids, None]:
            if token is not None and token not in self._added:
                words.append(token)
                continue
            if words:
                pieces.append(Piece(self._plain.decode(words), is_tag=False))
                words = []
            if token is not None and self._added[token] in TAGS:
                pieces.append(Piece(self._added[token], is_tag=True))
        return pieces

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self._with_added_tokens.decode(list(ids), skip_special_tokens=False)

    def _render(
        self, messages: list[Message], tools: list[ToolDefinition], *, add_generation_prompt: bool
    ) -> list[int]:
        text = self._template.render(
            messages=[for_template(message, index) for index, message in enumerate(messages)],
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )
        ids: list[int] = []
        for index, part in enumerate(text.split(self._mark)):
            tokenizer = self._plain if index % 2 else self._with_added_tokens
            ids += tokenizer.encode(_encodable(part)).ids
        return ids


def _encodable(text: str) -> str:
    """Replace each lone surrogate (half of an emoji, cut by a harness) by a question mark: it has no UTF-8 form."""
    return text.encode("utf-8", "replace").decode("utf-8")


def for_template(message: Message, index: int) -> dict[str, Any]:
    """Return the message as vLLM gives it to a model's template."""
    prepared = {**message, "content": text_content(message, index)}
    if message.get("reasoning"):
        prepared["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        prepared["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _parsed(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return prepared


def _parsed(arguments: str) -> Any:
    """Return arguments as an object. Text that is not JSON stays a string."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def text_content(message: Message, index: int) -> str:
    """Return a message's text, its parts joined by newlines as in vLLM. Raises `EngineError` for a part of another
    type than text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    for number, part in enumerate(content):
        if part.get("type") != "text":
            raise EngineError(
                400,
                f"messages[{index}].content[{number}]: the embedded engine reads text only, got {part.get('type')!r}; "
                "use an engine with a multimodal model",
                kind="invalid_request",
            )
    return "\n".join(part["text"] for part in content)
