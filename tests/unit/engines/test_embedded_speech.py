"""The embedded engine's deltas: put together they are the answer, whatever the answer is and wherever it is cut."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polar_gym.chat import ChatRequest, Delta
from polar_gym.chat.received import Received
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.engines.embedded.answers import TAGS, Piece, cut_at_stop, first_stop, parse_answer, split_tags
from polar_gym.engines.embedded.policy import TOKENS_AT_ONCE
from polar_gym.engines.embedded.scripted import ScriptedPolicy
from polar_gym.engines.embedded.speech import Speech
from polar_gym.schema import Sampling

REQUEST = ChatRequest(model="policy", messages=[{"role": "user", "content": "go"}])
CALL = '<tool_call>{"name": "a", "arguments": {"b": "é"}}</tool_call>'
TEXTS = st.lists(
    st.sampled_from([*TAGS, CALL, " ", "\n", "<", "</th", "word", "é🦊", "STOP", "ST"]) | st.text(max_size=5)
)


def decoded(ids: list[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(ids).decode("utf-8", "replace")


STOPS = st.lists(st.sampled_from(["STOP", "\n\n", "<", "think>", "é", "\ufffd"]), max_size=2)


@given(
    words=TEXTS,
    stop=STOPS,
    calls=st.booleans(),
    thinking=st.booleans(),
    live=st.booleans(),
    at_once=st.integers(1, 5),
)
@example(words=[" ", "<think>"], stop=[], calls=False, thinking=True, live=True, at_once=1)
@example(words=["<", "STOP"], stop=["STOP"], calls=False, thinking=False, live=True, at_once=1)
def test_the_deltas_are_the_answer(
    words: list[str], stop: list[str], calls: bool, thinking: bool, live: bool, at_once: int
) -> None:
    text = "".join(words).encode("utf-8", "replace")
    ids: list[int] = []
    received = Received()
    prompt_ids = np.asarray([1, 2], np.int32)
    speech = Speech(
        received.add,
        prompt_ids,
        lambda ids: split_tags(decoded(ids)),
        stop=stop,
        calls=calls,
        thinking=thinking,
        live=live,
    )
    while len(ids) < len(text) and not first_stop(split_tags(decoded(ids)), stop):
        new = list(text[len(ids) : len(ids) + at_once])
        speech.add(new, [-float(number) for number in range(len(ids), len(ids) + len(new))])
        ids += new
    message = parse_answer(cut_at_stop(split_tags(decoded(ids)), stop), calls=calls, thinking=thinking)
    speech.finish(message)
    assert received.message() == message
    assert received.response_ids == ids
    assert received.logprobs == [-float(number) for number in range(len(ids))]
    assert received.prompt_ids is prompt_ids


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Hello <tool_c", ["Hello "]),
        ("Hello <tool_call>{", ["Hello "]),
        ("\n\n", []),
        ("<think>hm</thi", ["hm"]),
        ("Hello ST", ["Hello "]),
        ("Hello é"[:-1] + "\ufffd", ["Hello "]),
    ],
)
def test_what_may_become_something_else_is_held_back(text: str, told: list[str]) -> None:
    deltas: list[Delta] = []
    prompt_ids = np.asarray([1], np.int32)
    for live in (True, False):
        deltas.clear()
        speech = Speech(
            deltas.append,
            prompt_ids,
            lambda ids: split_tags(text),
            stop=["STOP"],
            calls=True,
            thinking=False,
            live=live,
        )
        speech.add([5], [0.0])
        speech.cut_off()
        assert [delta.reasoning + delta.content for delta in deltas if delta.reasoning + delta.content] == told


LONG = "Some words, and more of them. " * 40


async def scripted(monkeypatch: pytest.MonkeyPatch) -> tuple[EmbeddedEngine, list[int]]:
    """Return an engine that answers with `LONG`, and a list that gets the length of each answer that is decoded."""
    lengths: list[int] = []
    pieces = ScriptedPolicy.pieces

    def counted(self: ScriptedPolicy, ids: list[int]) -> list[Piece]:
        lengths.append(len(ids))
        return pieces(self, ids)

    monkeypatch.setattr(ScriptedPolicy, "pieces", counted)
    engine = EmbeddedEngine(EmbeddedOptions(scripts=[Script(final_message=LONG)]))
    await engine.start()
    return engine, lengths


async def test_an_answer_that_nobody_reads_along_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an event loop that stands still for seconds: each four tokens of a whole answer had all of it
    decoded again. Its ids are told all the same, as they come: the journal keeps them."""
    engine, lengths = await scripted(monkeypatch)
    deltas: list[Delta] = []
    completion = await engine.chat(REQUEST, Sampling(), deltas.append)
    whole = len(completion.response_ids)
    *ids_alone, last = deltas
    assert [len(delta.response_ids) for delta in ids_alone[:-1]] == [TOKENS_AT_ONCE] * ((whole - 1) // TOKENS_AT_ONCE)
    assert [token for delta in ids_alone for token in delta.response_ids] == completion.response_ids.tolist()
    assert {delta.content for delta in ids_alone} == {""}
    assert last.content == completion.message["content"] == LONG
    assert len(lengths) < whole.bit_length() + 5, "a script looks for its stop string by bisection"


async def test_an_answer_that_is_cut_off_has_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a record of a call with sampled tokens and without their text."""
    engine, lengths = await scripted(monkeypatch)
    received = Received()

    def take(delta: Delta) -> None:
        received.add(delta)
        if len(received.response_ids) == 40:
            asking.cancel()

    asking = asyncio.create_task(engine.chat(REQUEST, Sampling(), take))
    await asyncio.wait([asking])
    assert asking.cancelled()
    assert len(received.response_ids) == 40
    assert lengths.count(40) <= 2
    text = received.message()["content"]
    assert LONG.startswith(text)
    assert text == await engine.decode(received.response_ids)


async def test_the_scripted_policy_speaks_in_pieces() -> None:
    final = "Two words, é 🦊, and some more of them."
    engine = EmbeddedEngine(EmbeddedOptions(scripts=[Script(final_message=final)]))
    await engine.start()
    deltas: list[Delta] = []
    request = replace(REQUEST, stream=True)
    completion = await engine.chat(request, Sampling(), deltas.append)
    again: list[Delta] = []
    await engine.chat(request, Sampling(), again.append)
    assert "".join(delta.content for delta in deltas) == completion.message["content"] == final
    assert sum(bool(delta.content) for delta in deltas) > 3
    assert [token for delta in deltas for token in delta.response_ids] == completion.response_ids.tolist()
    assert [(delta.content, delta.response_ids) for delta in deltas] == [
        (delta.content, delta.response_ids) for delta in again
    ], "the same pieces every time"
