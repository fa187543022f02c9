"""What a session's calls truly are, as the agent that made them knows: held against what the gateway made of them.

It compares whole histories, message by message, where the gateway compares digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from polar_gym.builders.fidelity import first_difference
from polar_gym.engines.vllm import VllmEngine
from polar_gym.schema import Message, ModelCall
from tests.e2e.agent import TAGS, Asked, Item

FORKS = ("history", "partial_turn", "tools", "ambiguous", "unknown_turn")
"""Why a request that has answers in it continues no known call."""


def requests_by_call(asked: Sequence[Asked], calls: Sequence[ModelCall]) -> dict[str, Asked]:
    """Call id -> the request as the agent made it. One that was hung up on is known by its last words."""
    by_id = {each.call_id: each for each in asked if each.call_id is not None}
    by_words = {_last_words([item.message for item in each.items]): each for each in asked if each.call_id is None}
    return {call.call_id: by_id.get(call.call_id) or by_words[_last_words(call.messages)] for call in calls}


def _last_words(messages: Sequence[Message]) -> frozenset[str]:
    """The words of the last message, or of all tool results at the end: the gateway puts these in call order."""
    results = [*takewhile(lambda message: message["role"] == "tool", reversed(messages))]
    return frozenset(str(message["content"]) for message in results or messages[-1:])


async def call_problems(
    splice: bool, engine: VllmEngine, call: ModelCall, calls: Sequence[ModelCall], asked: dict[str, Asked]
) -> list[str]:
    """Whether the call was understood as what it truly is."""
    if not len(call.prompt_ids):
        return []  # hung up on before the engine had begun
    request = asked[call.call_id]
    earlier = [other for other in calls if other.index < call.index and other.outcome == "delivered"]
    parent = _true_parent(request, earlier, asked)
    problems = []
    if call.parent_id != (parent.call_id if parent else None):
        problems.append(f"parent {call.parent_id}, truly {parent and parent.call_id} ({call.splice_cause})")
    if parent is None:
        goes_on = any(item.message["role"] == "assistant" for item in request.items)
        if call.continuation != "root" or (call.splice_cause in FORKS) != goes_on:
            problems.append(f"begins a conversation, but is {call.continuation}, cause {call.splice_cause}")
        return problems
    causes = await _true_causes(splice, engine, parent)
    if call.splice_cause not in causes or call.continuation != ("canonical" if call.splice_cause else "spliced"):
        said = await engine.decode(parent.response_ids.tolist())
        problems.append(f"is {call.continuation}, cause {call.splice_cause}; truly {causes} after {said!r}")
    return problems


def _true_parent(request: Asked, earlier: Sequence[ModelCall], asked: dict[str, Asked]) -> ModelCall | None:
    """The deepest call whose question and answer the request begins with."""
    for place in range(len(request.items) - 1, -1, -1):
        item = request.items[place]
        if item.message["role"] != "assistant":
            continue
        same_question = [
            call
            for call in earlier
            if asked[call.call_id].tools is request.tools and _same(asked[call.call_id].items, request.items[:place])
        ]
        if item.message.get("tool_calls"):
            known = [call for call in same_question if call.call_id == item.call_id]
        else:
            known = [call for call in same_question if _says_only(call, item)]
        if len(known) == 1:
            return known[0]
    return None


def _same(one: Sequence[Item], other: Sequence[Item]) -> bool:
    """Whether these are the same items; turns that hold the same words alone cannot be told apart."""
    return len(one) == len(other) and all(
        a is b or (_plain_words(a) is not None and _plain_words(a) == _plain_words(b))
        for a, b in zip(one, other, strict=True)
    )


def _says_only(call: ModelCall, item: Item) -> bool:
    answer = call.response or {}
    return not answer.get("tool_calls") and (answer.get("content") or "").strip() == _plain_words(item)


def _plain_words(item: Item) -> str | None:
    """The text of a turn without tool calls."""
    if item.message["role"] != "assistant" or item.message.get("tool_calls"):
        return None
    content = item.message["content"]
    return (content if isinstance(content, str) else content[0]["text"]).strip()


async def _true_causes(splice: bool, engine: VllmEngine, parent: ModelCall) -> set[str | None]:
    """Why a continuation of `parent` must not be spliced; None: it must. Any of these is a good answer."""
    if not splice:
        return {"off"}
    said = await engine.decode(parent.response_ids.tolist())
    if not said.endswith("<|im_end|>"):
        answer = parent.response or {}
        told = (answer.get("content") or "").rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
        if told and not answer.get("tool_calls") and said.rstrip("\N{REPLACEMENT CHARACTER}").rstrip().endswith(told):
            return {None}  # a call that the parser left in the words, too
        if _is_cut_inside(said, calls_tools=bool(answer.get("tool_calls"))):
            return {"cut"}
        if answer.get("tool_calls") or not (answer.get("content") or "").strip():
            return {"cut", None}  # cut right after a call, or before the first word: good places or none
    return {None}


def _is_cut_inside(said: str, *, calls_tools: bool) -> bool:
    """Whether an answer that did not end by itself ends in its thinking (with which the served parser takes every
    answer to begin), or somewhere among tool calls, broken ones too; right after one is no such place."""
    _, thought, words = said.partition("</think>")
    if calls_tools:
        return not said.endswith("</tool_call>")
    return not thought or any(tag in words for tag in TAGS)


def branches(calls: Sequence[ModelCall]) -> int:
    """How many delivered answers no delivered answer goes on from, token for token."""
    delivered = [call for call in calls if is_trainable(call)]
    return sum(all(first_difference(call, other) is not None for other in delivered) for call in delivered)


def tips(calls: Sequence[ModelCall]) -> int:
    """How many delivered answers no delivered answer goes on from by its messages: the branches of the true tree."""
    delivered = [call for call in calls if is_trainable(call)]
    return len({call.call_id for call in delivered} - {call.parent_id for call in delivered})


def is_trainable(call: ModelCall) -> bool:
    return call.outcome == "delivered" and len(call.response_ids) > 0
