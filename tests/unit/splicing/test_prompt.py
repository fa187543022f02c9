"""The spliced prompt is the ids already seen plus what the template makes of the new messages, or there is none."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from polar_gym.engines import EngineError
from polar_gym.engines.embedded.chatml import ChatML
from polar_gym.schema import Message, ModelCall, ToolDefinition
from polar_gym.splicing.prompt import Learned, NoSplice, spliced_prompt
from tests.support.calls import make_call

CHATML = ChatML()
ASKED: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "List the files."}]
MORE: list[Message] = [{"role": "user", "content": "And now?"}]


class Template:
    """A templater made of a function from messages to text; special tokens are the text's own `<|...|>`."""

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        self._render = render

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        return encode(self._render(list(messages)))

    async def decode(self, ids: Sequence[int]) -> str:
        return CHATML.decode(ids)


def encode(text: str) -> NDArray[np.int32]:
    return np.asarray(CHATML._with_added_tokens.encode(text).ids, np.int32)


def chatml(messages: list[Message]) -> str:
    turns = "".join(f"<|im_start|>{m['role']}\n{m.get('content') or ''}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n"


def opener_is_terminator(messages: list[Message]) -> str:
    """GLM-like: nothing closes a turn but the opening of the next one."""
    return "".join(f"<|im_start|>{m['role']}\n{m.get('content') or ''}" for m in messages) + "<|im_start|>assistant\n"


def drops_old_thinking(messages: list[Message]) -> str:
    """Qwen-like: thinking of turns before the last user message is gone from the rendering."""
    last_user = max(index for index, message in enumerate(messages) if message["role"] == "user")
    kept = [
        {**m, "content": f"<think>\n{m['reasoning']}\n</think>\n\n{m['content']}"}
        if m.get("reasoning") and index > last_user
        else m
        for index, m in enumerate(messages)
    ]
    return chatml(kept) + "<think>\n"


def one_system_message(messages: list[Message]) -> str:
    if any(message["role"] == "system" for message in messages[1:]):
        raise EngineError(400, "System message must be at the beginning.")
    return chatml(messages)


def answered(asked: str, said: str, **fields: Any) -> ModelCall:
    response = {"role": "assistant", "content": said.removesuffix("<|im_end|>")}
    return make_call(
        0, encode(asked).tolist(), encode(said).tolist(), **{"finish_reason": "stop", "response": response, **fields}
    )


async def text_of(template: Template, parent: ModelCall, new: list[Message] = MORE) -> str:
    ids = await spliced_prompt(template, parent, [*ASKED, parent.response or {}, *new], new)
    seen = np.concatenate([parent.prompt_ids, parent.response_ids])
    np.testing.assert_array_equal(ids[: len(seen)], seen)
    return CHATML.decode(ids[len(seen) :].tolist())


NEXT = "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"


async def test_a_finished_turn_is_not_finished_twice() -> None:
    parent = answered(chatml(ASKED), "Here.<|im_end|>")
    assert await text_of(Template(chatml), parent) == NEXT


@pytest.mark.parametrize(
    ("said", "finish"),
    [
        ("Here", "length"),
        ("Here.", "stop"),
        ("Here.<|endoftext|>", "stop"),
        ("Here.\n", "stop"),  # of an engine that leaves the end out
        ("I am the user", "stop"),
        ('<tool_call>\n{"na', "length"),  # left in the words by the parser, so that a template would show the same
    ],
)
async def test_an_unfinished_turn_is_finished(said: str, finish: str) -> None:
    """Cut off, ended by a stop string, or by another end token than the template's."""
    parent = answered(chatml(ASKED), said, finish_reason=finish)
    assert await text_of(Template(chatml), parent) == f"<|im_end|>{NEXT}"


@pytest.mark.parametrize(("said", "adds"), [("Here.<|im_start|>", ""), ("Here.", "<|im_start|>")])
async def test_where_the_next_opening_ends_a_turn_it_is_not_doubled(said: str, adds: str) -> None:
    parent = answered(opener_is_terminator(ASKED), said)
    text = await text_of(Template(opener_is_terminator), parent)
    assert text == f"{adds}user\nAnd now?<|im_start|>assistant\n"


async def test_a_template_that_drops_old_thinking_does_not_make_us_drop_it() -> None:
    parent = answered(drops_old_thinking(ASKED), "Files?\n</think>\n\nHere.<|im_end|>")
    assert await text_of(Template(drops_old_thinking), parent) == f"{NEXT}<think>\n"


class Real(Template):
    """The embedded engine's template."""

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        return np.asarray(CHATML.prompt_ids(list(messages), list(tools)), np.int32)


async def test_the_real_template_with_tool_results() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    said: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
    parent = make_call(
        0, CHATML.prompt_ids(ASKED, []), CHATML.answer_ids(said), finish_reason="tool_calls", response=said
    )
    results: list[Message] = [
        {"role": "tool", "tool_call_id": "x", "content": "README.md\n"},
        {"role": "system", "content": "Hurry."},
    ]
    spliced = await spliced_prompt(Real(chatml), parent, [*ASKED, said, *results], results)
    assert spliced.tolist() == CHATML.prompt_ids([*ASKED, said, *results], [])


async def test_a_token_before_which_a_stop_string_ended_a_call_is_not_its_end() -> None:
    """Guards against a turn that is left open because the template has the answer's last token behind its end."""
    call = {"id": "x", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    said: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
    sampled = [*CHATML.answer_ids(said)[:-1], *encode("\n").tolist()]
    parent = make_call(0, CHATML.prompt_ids(ASKED, []), sampled, response=said, finish_reason="tool_calls")
    result: Message = {"role": "tool", "tool_call_id": "x", "content": "README.md"}
    ended = parent.model_copy(update={"stop_sequence": "\n"})
    ids = await spliced_prompt(Real(chatml), ended, [*ASKED, said, result], [result])
    added = CHATML.decode(ids[len(parent.prompt_ids) + len(sampled) :].tolist())
    assert added.startswith("<|im_end|>\n<|im_start|>"), added


async def test_text_that_the_tokenizer_composes_is_the_same_text() -> None:
    """Guards against a fork at every decomposed accent (names of files from macOS) with Qwen's tokenizers."""
    composing = Template(lambda messages: unicodedata.normalize("NFC", chatml(messages)))
    parent = answered(chatml(ASKED), "Here.<|im_end|>")
    new: list[Message] = [{"role": "user", "content": "cafe\u0301 \u212b"}]
    assert "caf\u00e9 \u00c5<|im_end|>" in await text_of(composing, parent, new)


class Counting(Template):
    """A template that dates its system prompt."""

    def __init__(self) -> None:
        super().__init__(lambda messages: f"{self.today}: {chatml(messages)}")
        self.today = "Monday"
        self.renderings = 0

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        self.renderings += 1
        return await super().template(messages, tools)


async def test_a_template_is_asked_once_for_each_splice_as_long_as_its_openings_stay_the_same() -> None:
    """Guards against the cost of a second rendering, and against a place that was learned from another opening."""
    template, learned = Counting(), Learned()
    parent = answered(chatml(ASKED), "Here.<|im_end|>")
    said: Message = {"role": "assistant", "content": "Here."}
    asked = [*ASKED, said, *MORE, said, *MORE, said]
    renderings = []
    for today, text in (("Monday", "And?"), ("Monday", "Why?"), ("Tuesday", "So?"), ("Tuesday", "Oh?")):
        template.today, template.renderings = today, 0
        new: list[Message] = [{"role": "user", "content": text}]
        ids = await spliced_prompt(template, parent, [*asked, *new], new, learned)
        assert CHATML.decode(ids.tolist()).endswith(f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        renderings.append(template.renderings)
    assert renderings == [2, 1, 3, 2]


async def test_ever_fewer_continuations_are_compared_with_the_whole_request() -> None:
    """Guards against the cost of a whole rendering for each call, also where a user speaks behind all results."""
    template, learned = Counting(), Learned()
    parent = answered(chatml(ASKED), "Here.<|im_end|>")
    said: Message = {"role": "assistant", "content": "Here."}
    conversation, renderings = [*ASKED], []
    for _ in range(16):
        template.renderings = 0
        conversation += [said, *MORE]
        await spliced_prompt(template, parent, conversation, MORE, learned)
        renderings.append(template.renderings)
    assert [number for number, count in enumerate(renderings, start=1) if count > 1] == [1, 2, 4, 8, 16]
    assert not learned.reads_all


def with_a_switch(messages: list[Message]) -> str:
    """Nemotron-like: words of the system turn the thinking of all answers off."""
    return chatml(messages) + ("</think>" if "/no_think" in messages[0]["content"] else "<think>")


async def test_what_another_session_finds_meanwhile_holds() -> None:
    """Guards against a session that has templated its new messages behind the dummy, and then compares nothing."""
    learned = Learned()

    class Meanwhile(Template):
        async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
            learned.reads_all = True
            return await super().template(messages, tools)

    said: Message = {"role": "assistant", "content": "Here."}
    asked: list[Message] = [{"role": "system", "content": "/no_think"}, *MORE, said, *MORE]
    parent = answered(with_a_switch(asked[:2]), "Here.<|im_end|>")
    ids = await spliced_prompt(Meanwhile(with_a_switch), parent, asked, MORE, learned)
    assert CHATML.decode(ids.tolist()).endswith("<|im_start|>assistant\n</think>")


class Decoding(Template):
    """A template whose server leaves out blanks after special tokens, if it does."""

    def __init__(self, left_out: str) -> None:
        super().__init__(chatml)
        self._left_out = left_out
        self.decoded = 0

    async def decode(self, ids: Sequence[int]) -> str:
        self.decoded += 1
        return CHATML.decode(ids).replace(f"<|im_end|>{self._left_out}", "<|im_end|>")


FOX = "\N{FOX FACE}\N{COMBINING ACUTE ACCENT}"


@pytest.mark.parametrize(
    ("left_out", "said", "asked"),
    [
        ("", ["And now?", "And now?", "now? And"], [2, 0, 1]),
        ("", [FOX, FOX], [3, 1]),
        (" ", ["And now?", "And now?"], [3, 1]),
    ],
    ids=["known ids", "parts of characters", "texts that do not add up"],
)
async def test_the_text_of_known_ids_is_not_asked_for_again(left_out: str, said: list[str], asked: list[int]) -> None:
    """Guards against a request for each splice; and against texts that do not add up being taken for the whole text."""
    template, learned = Decoding(left_out), Learned()
    parent, decoded = answered(chatml(ASKED), "Here.<|im_end|>"), []
    for text in said:
        new: list[Message] = [{"role": "user", "content": text}]
        before = template.decoded
        ids = await spliced_prompt(template, parent, [*ASKED, parent.response or {}, *new], new, learned)
        assert CHATML.decode(ids.tolist()).endswith(f"user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        decoded.append(template.decoded - before)
    assert decoded == asked


@pytest.mark.parametrize(
    ("template", "parent", "new", "cause"),
    [
        (chatml, {"said": "", "finish_reason": "stop"}, MORE, "cut"),
        *(  # vLLM's streams hold back a call that has only begun
            (
                chatml,
                {
                    "said": f"{words}<tool_call>",
                    "finish_reason": "length",
                    "response": {"role": "assistant", "content": words},
                },
                MORE,
                "cut",
            )
            for words in ("Look.", "\n\n")
        ),
        (  # vLLM says `tool_calls` as soon as the JSON is whole, also where the room ends before the closing tag
            chatml,
            {
                "said": '<tool_call>{"name": "ls"}',
                "finish_reason": "tool_calls",
                "response": {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]},
                "sampling": {"max_tokens": len(encode('<tool_call>{"name": "ls"}'))},
            },
            MORE,
            "cut",
        ),
        (
            chatml,
            {
                "said": "Let me thi",
                "finish_reason": "length",
                "response": {"role": "assistant", "content": None, "reasoning": "Let me thi"},
            },
            MORE,
            "cut",
        ),
        (
            chatml,
            {},
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
            "multimodal",
        ),
        (one_system_message, {}, [{"role": "system", "content": "Hurry."}], "template"),
        (lambda messages: "always the same", {}, MORE, "suffix"),
        (lambda messages: chatml([messages[0]]), {}, MORE, "suffix"),
    ],
)
async def test_where_it_must_not_be_there_is_none(
    template: Callable[[list[Message]], str], parent: dict[str, Any], new: list[Message], cause: str
) -> None:
    call = answered(chatml(ASKED), **{"said": "Here.<|im_end|>", **parent})
    with pytest.raises(NoSplice) as refused:
        await spliced_prompt(Template(template), call, [*ASKED, call.response or {}, *new], new)
    assert refused.value.cause == cause
