"""Token-in/token-out: the prompt of a continuation is the ids already seen plus the ids of the new messages.

    prompt = parent.prompt_ids + parent.response_ids + the missing end of the turn + ids of the new messages

Only the engine's template makes the new ids. A dummy turn followed by the new messages is templated twice, with two
different dummy answers. The common end of the two renderings is what the template puts after an answer. It begins with
the terminator of the turn, with the opening of the next turn where that ends an answer, or with words before either
(Nemotron's newline). All up to the token with which the policy ended its turn is left out. Where a new message may hold
that token, too, a third rendering with other words in the new messages tells the template's token from theirs.
Templates that rewrite earlier turns (dropped thinking) do not matter: the dummy turn has nothing to drop.

After tool calls the dummy turn makes the same calls with other arguments, because some templates look in it for the
function that a result belongs to, and some end such a turn differently.

The second rendering only locates the end of the dummy turn. That position is constant, so `Learned` caches the ids
before it and skips the second rendering when they match.

Some templates read the conversation before: a switch in the system message that turns thinking off (Nemotron, SmolLM3),
or a number of each tool call (Command R). Ever fewer continuations of a conversation, the first ones among them, are
therefore compared with the rendering of the whole request. From the first difference on, the dummy turns of this
engine follow all that the conversation has before. A system message that moves to the last user (Mistral) is none: the
model has seen it.

The result is used only if its text is the text of the new messages. Else the engine templates the request as usual.
`Learned` keeps the text of each id, so that the engine is asked for texts that were not seen before.
Text that spells special tokens becomes these tokens, as it does where the engine templates the whole conversation.
"""

from __future__ import annotations

import asyncio
import json
import logging
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from polar_gym.chat import has_media
from polar_gym.chat.messages import canonical_json
from polar_gym.engines import EngineError
from polar_gym.record import common_prefix
from polar_gym.schema import Message, ModelCall, ToolDefinition

log = logging.getLogger(__name__)

SpliceProblem = Literal["cut", "multimodal", "template", "suffix", "engine"]
"""Why the engine templates a continuation after all. `cut`: the parent's answer was cut inside reasoning or a tool
call. `multimodal`: the conversation has an image. `template`: the template's end of turn cannot be found. `suffix`: the
text of the new ids is not the text of the new messages. `engine`: the engine failed to template."""

DUMMY_START: tuple[Message, ...] = ({"role": "user", "content": "Hello."},)
DUMMY_ANSWERS = ("Apple 1", "Bread 2")
"""The two end in different tokens, so that their renderings agree only after them."""
OTHER_WORDS = "Carrot 3"
"""Takes the place of the words of new messages, to tell the ids of the template from those of the words."""

PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""The text of an id whose bytes are no whole character."""


class Templater(Protocol):
    """The part of an engine that splicing needs."""

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        """Return the engine's ids for a conversation and the opening of the next answer. Raises `EngineError`."""
        ...

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        ...


class NoSplice(Exception):  # noqa: N818 - it is an answer, not an error
    """The continuation must be templated by the engine."""

    def __init__(self, cause: SpliceProblem) -> None:
        super().__init__(cause)
        self.cause: SpliceProblem = cause


MOST_LEARNED = 4096


@dataclass(slots=True)
class Learned:
    """Facts about the template of one engine that earlier splices have shown, so that later ones ask it less."""

    openings: dict[tuple[str, ...], NDArray[np.int32] | None] = field(default_factory=dict)
    """The functions that a dummy turn calls -> the ids of its first rendering up to the place from which the second one
    agrees. None: another rendering began with other ids (some templates print the ids of calls), so a cache is useless.
    """
    reads_all: bool = False
    """True since the ids after some answer depended on the messages before that answer."""
    texts: dict[int, str] = field(default_factory=dict)
    """The text of ids, each decoded alone."""
    texts_add_up: bool = True
    """Whether the texts of ids, put together, were the text of these ids so far."""

    def learn(self, turn: tuple[str, ...], opening: NDArray[np.int32] | None) -> None:
        if len(self.openings) < MOST_LEARNED:  # the sets of parallel calls are endless
            self.openings[turn] = opening


async def spliced_prompt(
    engine: Templater,
    parent: ModelCall,
    messages: Sequence[Message],
    new_messages: Sequence[Message],
    learned: Learned | None = None,
) -> NDArray[np.int32]:
    """Return the prompt ids of a request that adds `new_messages` to `parent`. Raises `NoSplice`.

    `messages` is the whole request: it ends with the parent's answer and `new_messages`. `learned` is the engine's.
    """
    if _was_cut_inside(parent):
        raise NoSplice("cut")
    if any(has_media(message) for message in messages):
        raise NoSplice("multimodal")
    learned = learned or Learned()
    before = messages[: len(messages) - len(new_messages) - 1]
    after = None
    if not learned.reads_all:
        after = await _ids_after_answer(engine, parent, DUMMY_START, new_messages, learned)
        if _is_compared(before) and not await _ends_with(engine, messages, after):
            whole = await _ids_after_answer(engine, parent, before, new_messages, learned)
            if not await _repeats_the_system(engine, before, whole):
                log.info("the chat template reads whole conversations: continuations are templated with all before")
                learned.reads_all = True
    if after is None or learned.reads_all:  # another session may have found that meanwhile
        after = await _ids_after_answer(engine, parent, before, new_messages, learned)
    if not await _ids_say(engine, after, _texts(new_messages), learned):
        raise NoSplice("suffix")
    ended = parent.response_ids[-1] == after[0]
    if not ended and await _is_cut_in_a_tool_call(engine, parent):
        raise NoSplice("cut")
    return np.concatenate([parent.prompt_ids, parent.response_ids, after[1:] if ended else after])


def _was_cut_inside(call: ModelCall) -> bool:
    """Return whether the message shows that the answer was cut off, at its limit, inside reasoning or a tool call:
    nothing may follow such a cut."""
    message = call.response or {}
    if call.finish_reason != "length":
        return not len(call.response_ids)
    return bool(message.get("tool_calls")) or not message.get("content")


def _is_at_its_limit(call: ModelCall) -> bool:
    """Return whether the limit may have ended an answer: vLLM says `tool_calls` also there, where a call is whole."""
    return call.finish_reason == "length" or len(call.response_ids) == call.sampling.get("max_tokens")


async def _is_cut_in_a_tool_call(engine: Templater, call: ModelCall) -> bool:
    """Return whether an answer without an end of turn was cut inside a tool call. Its message does not tell: vLLM says
    `tool_calls` as soon as a call's JSON is whole, also where the limit came before the closing tag. It holds back a
    call that has only begun, so that the message ends before the sampled text does."""
    if not _is_at_its_limit(call):
        return False
    message = call.response or {}
    said = (await engine.decode(call.response_ids.tolist())).rstrip(PART_OF_A_CHARACTER).rstrip()
    told = (message.get("content") or "").rstrip(PART_OF_A_CHARACTER).rstrip()
    return bool(message.get("tool_calls")) or not told or not said.endswith(told)


def _is_compared(before: Sequence[Message]) -> bool:
    """Return whether the answer to these messages is the first, second, fourth and so on of a conversation, or one to
    its first, second, fourth user's message. Some harnesses put a user's message behind all results."""
    roles = [message["role"] for message in before]
    return _is_power_of_two(1 + roles.count("assistant")) or (
        roles[-1] != "tool" and _is_power_of_two(roles.count("user"))
    )


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


async def _ends_with(engine: Templater, messages: Sequence[Message], after: NDArray[np.int32]) -> bool:
    """Return whether the rendering of a whole request ends with these ids, of which the first may be one with the end
    of the answer there. True where the template refuses the request."""
    whole, wanted = await _ids_of(engine, messages), after[1:]
    return whole is None or np.array_equal(whole[len(whole) - len(wanted) :], wanted)


async def _repeats_the_system(engine: Templater, before: Sequence[Message], after: NDArray[np.int32]) -> bool:
    """Return whether the system message stands in these ids, before which the model has seen it."""
    texts = _texts([message for message in before if message["role"] == "system"])
    decoded = await engine.decode(after.tolist())
    return any(text.strip() and _says(decoded, [text]) for text in texts)


async def _ids_after_answer(
    engine: Templater, parent: ModelCall, before: Sequence[Message], new_messages: Sequence[Message], learned: Learned
) -> NDArray[np.int32]:
    """Return the ids from the one that ends an answer up to the opening of the next answer. The first is the token with
    which the policy ended its turn, where the template has that token there."""
    calls = (parent.response or {}).get("tool_calls")
    ended = parent.stop_sequence is None and not _is_at_its_limit(parent)
    if calls and ended:
        turns = [
            {"role": "assistant", "content": "", "tool_calls": _with_arguments(calls, said)} for said in DUMMY_ANSWERS
        ]
        after = await _common_ending(engine, before, turns, new_messages, learned)
        if after is not None:
            after = await _from_own_end(engine, parent, before, turns, new_messages, after, learned)
        if after is not None:
            return after
    turns = [{"role": "assistant", "content": answer} for answer in DUMMY_ANSWERS]
    after = await _common_ending(engine, before, turns, new_messages, learned)
    if after is None or not len(after):
        raise NoSplice("template")
    if ended and after[0] != parent.response_ids[-1]:
        own = await _from_own_end(engine, parent, before, turns, new_messages, after, learned)
        return after if own is None else own
    return after


async def _from_own_end(
    engine: Templater,
    parent: ModelCall,
    before: Sequence[Message],
    turns: Sequence[Message],
    new_messages: Sequence[Message],
    after: NDArray[np.int32],
    learned: Learned,
) -> NDArray[np.int32] | None:
    """Return the part of `after`, which follows either of two dummy turns, from the id on with which the policy ended
    its turn. None where the template has no such id before the new messages, or where the policy's last id is a word of
    its answer: some engines leave the end out."""
    last = int(parent.response_ids[-1])
    if last not in after:
        return None
    of_template, end = after, await _text_of(engine, last, learned)
    said = ((parent.response or {}).get("content") or "").rstrip()
    if not end.strip() or said.endswith(end.strip()):
        return None
    if after[0] != last or any(end in text or not text.strip() for text in _texts(new_messages)):
        reworded = [{**message, "content": OTHER_WORDS} for message in new_messages]
        other = await _common_ending(engine, before, turns, reworded, learned)
        of_template = after[:0] if other is None else _common_suffix(after[::-1], other[::-1])[::-1]
    places = np.flatnonzero(of_template == last)
    return after[places[0] :] if len(places) else None


async def _ids_say(engine: Templater, ids: NDArray[np.int32], texts: Sequence[str], learned: Learned) -> bool:
    """Return whether the text of `ids` holds the texts in their order. The engine is asked for the text of ids that are
    not known yet, and for the whole text where the known texts, put together, do not hold the texts: ids that are parts
    of a character have no text of their own."""
    known = await _put_together(engine, ids.tolist(), learned) if learned.texts_add_up else None
    if known is not None and _says(known, texts):
        return True
    says = _says(await engine.decode(ids.tolist()), texts)
    if says and known is not None and PART_OF_A_CHARACTER not in known:
        learned.texts_add_up = False
    return says


async def _put_together(engine: Templater, ids: list[int], learned: Learned) -> str | None:
    """Return the texts of ids, each decoded alone, put together. None where they cannot be told apart."""
    mark = await _text_of(engine, ids[0], learned)
    unknown = [token for token in dict.fromkeys(ids) if token not in learned.texts]
    if unknown and mark:
        marked = await engine.decode([each for token in unknown for each in (ids[0], token)])
        texts = marked.split(mark)[1:]
        if len(texts) != len(unknown):
            learned.texts_add_up = False
            return None
        learned.texts |= zip(unknown, texts, strict=True)
    known = [learned.texts.get(token) for token in ids]
    return None if None in known else "".join(filter(None, known))


async def _text_of(engine: Templater, token: int, learned: Learned) -> str:
    if token not in learned.texts:
        learned.texts[token] = await engine.decode([token])
    return learned.texts[token]


def _with_arguments(calls: Sequence[dict[str, Any]], said: str) -> list[dict[str, Any]]:
    arguments = json.dumps({"text": said})
    return [{**call, "function": {"name": call["function"]["name"], "arguments": arguments}} for call in calls]


async def _common_ending(
    engine: Templater,
    before: Sequence[Message],
    turns: Sequence[Message],
    new_messages: Sequence[Message],
    learned: Learned,
) -> NDArray[np.int32] | None:
    """Return the ids that the engine's template puts after either of two dummy turns. None where the template refuses
    the conversation, which it may because real conversations have no such order."""
    conversations = [[*before, turn, *new_messages] for turn in turns]
    called = tuple(call["function"]["name"] for call in turns[0].get("tool_calls") or [])
    cached = before is DUMMY_START
    opening = learned.openings.get(called) if cached else None
    if opening is not None:
        first = await _ids_of(engine, conversations[0])
        if first is None or np.array_equal(first[: len(opening)], opening):
            return None if first is None else first[len(opening) :]
        learned.learn(called, None)
    first, second = await asyncio.gather(*(_ids_of(engine, messages) for messages in conversations))
    if first is None or second is None:
        return None
    ending = _common_suffix(first, second)
    if cached and len(ending) and called not in learned.openings:
        learned.learn(called, first[: len(first) - len(ending)])
    return ending


async def _ids_of(engine: Templater, messages: Sequence[Message]) -> NDArray[np.int32] | None:
    """Return the ids of a dummy conversation; None where the template refuses it. An engine that fails is asked once
    more: its failure says nothing of the template. Raises `NoSplice`."""
    for _ in range(2):
        try:
            return await engine.template(messages, [])
        except EngineError as error:
            if error.status in (400, 422):
                return None
    raise NoSplice("engine")


def _common_suffix(first: NDArray[np.int32], second: NDArray[np.int32]) -> NDArray[np.int32]:
    return first[len(first) - common_prefix(first[::-1], second[::-1]) :]


def _says(decoded: str, texts: Sequence[str]) -> bool:
    """Return whether `decoded` holds the texts in their order. Templates may trim them, or print them as JSON strings,
    and tokenizers (Qwen's) compose accents."""
    decoded, position = unicodedata.normalize("NFC", decoded), 0
    for text in (unicodedata.normalize("NFC", each) for each in texts):
        forms = (text.strip(), canonical_json(text.strip())[1:-1])
        ends = [place + len(form) for form in forms if (place := decoded.find(form, position)) >= 0]
        if not ends:
            return False
        position = min(ends)
    return True


def _texts(messages: Sequence[Message]) -> list[str]:
    contents = [message.get("content") or "" for message in messages]
    parts = [[{"text": content}] if isinstance(content, str) else content for content in contents]
    return [part.get("text", "") for each in parts for part in each]
