"""What a request is to the calls before it: by id first, by text where there is none, and never by a loose match."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from polar_gym.chat import LONG
from polar_gym.schema import Message, ModelCall, ToolDefinition
from polar_gym.splicing.conversation import Continuation, Conversations, canonical, identities_of_long
from tests.support.calls import make_call

SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "List the files."}
TOOLS: list[ToolDefinition] = [{"type": "function", "function": {"name": "bash"}}]


def tool_call(minted: str, arguments: str = '{"command": "ls"}') -> dict[str, Any]:
    return {"id": minted, "type": "function", "function": {"name": "bash", "arguments": arguments}}


def result(minted: str, content: str = "README.md") -> Message:
    return {"role": "tool", "tool_call_id": minted, "content": content}


class Session:
    """One conversation as a harness keeps it, and what the gateway makes of its requests."""

    def __init__(self) -> None:
        self.known = Conversations()
        self.history: list[Message] = [SYSTEM, USER]
        self.count = 0

    def answered(self, content: str | None = None, minted: tuple[str, ...] = (), **said: Any) -> ModelCall:
        """The history was asked with, and answered."""
        response: Message = {"role": "assistant", "content": content, **said}
        if minted:
            response["tool_calls"] = [tool_call(f"engine-{each}") for each in minted]
        call = make_call(self.count, [self.count], [9], messages=self.history, tools=TOOLS, response=response)
        self.count += 1
        self.known.add(call, self.ask(self.history).history, minted)
        return call

    def ask(self, messages: list[Message], tools: list[ToolDefinition] | None = None, **origins: str) -> Continuation:
        by_index = {int(index.removeprefix("m")): call_id for index, call_id in origins.items()}
        return self.known.continuation(messages, TOOLS if tools is None else tools, by_index)


@pytest.fixture
def session() -> Session:
    return Session()


def test_a_tool_turn_is_known_by_its_ids_whatever_became_of_its_words(session: Session) -> None:
    call = session.answered("  I look. ", ("a", "b"))
    turn: Message = {"role": "assistant", "content": None, "tool_calls": [tool_call("b", "{}"), tool_call("a", "{}")]}
    found = session.ask([SYSTEM, USER, turn, result("b"), result("a")])
    assert found.parent is call
    assert found.new_messages == [result("b"), result("a")]


@pytest.mark.parametrize(
    ("changes", "edited"),
    [
        ({"content": "I look.\n", "tool_calls": [tool_call("b", '{"command":"ls"}'), tool_call("a")]}, []),
        ({"reasoning": None}, []),
        ({"content": None}, ["text"]),
        ({"content": "I see."}, ["text"]),
        ({"reasoning": "List."}, ["reasoning"]),
        ({"tool_calls": [tool_call("a"), tool_call("b", '{"command": "rm"}')]}, ["tool_calls"]),
        ({"tool_calls": [tool_call("a"), tool_call("b", "{")], "content": ""}, ["text", "tool_calls"]),
    ],
)
def test_a_turn_that_came_back_in_other_words_is_named(
    session: Session, changes: dict[str, Any], edited: list[str]
) -> None:
    """Guards against overriding a harness's words in silence, and against false alarms where only the form differs."""
    call = session.answered(" I look. ", ("a", "b"), reasoning="List them.")
    turn = {**(call.response or {}), "tool_calls": [tool_call("a"), tool_call("b")], **changes}
    asked = [SYSTEM, USER, turn, result("a"), result("b")]
    found = session.ask(asked)
    assert found.parent is call
    assert found.edited_answers == ({call.call_id: edited} if edited else {})
    session.history = asked
    session.answered("Done.")
    later = session.ask([*asked, {"role": "assistant", "content": "Done."}, USER])
    assert later.edited_answers == found.edited_answers, "as long as the turn is in the history"


def test_a_text_turn_is_known_by_its_text(session: Session) -> None:
    call = session.answered("Done.\n")
    more: Message = {"role": "user", "content": "Thanks."}
    assert session.ask([SYSTEM, USER, {"role": "assistant", "content": "Done."}, more]).parent is call


def test_the_same_text_twice_is_no_link(session: Session) -> None:
    session.answered("Done.")
    session.answered("Done.")
    found = session.ask([SYSTEM, USER, {"role": "assistant", "content": "Done."}, USER])
    assert (found.parent, found.cause) == (None, "ambiguous")


def test_the_same_text_later_breaks_no_conversation_that_is_known_already(session: Session) -> None:
    """Guards against a fork when a second sub-agent opens with the words that the first one went on from."""
    session.answered("I look.")
    question, said = session.history, {"role": "assistant", "content": "I look."}
    session.history = [*question, said, USER]
    deeper = session.answered(None, ("a",))
    turn: Message = {"role": "assistant", "tool_calls": [tool_call("a")]}
    known = [*session.history, turn, result("a")]
    assert session.ask(known).parent is deeper
    session.history = question
    session.answered("I look.")
    assert session.ask(known).parent is deeper


def test_words_that_no_call_said_are_named(session: Session) -> None:
    session.answered("Done.")
    found = session.ask(
        [SYSTEM, {"role": "user", "content": "Other."}, {"role": "assistant", "content": "Done."}, USER]
    )
    assert (found.parent, found.cause) == (None, "unknown_turn")


def test_a_carrier_names_a_turn_that_its_text_does_not(session: Session) -> None:
    session.answered("Done.")
    second = session.answered("Done.")
    found = session.ask([SYSTEM, USER, {"role": "assistant", "content": "Done."}, USER], m2=second.call_id)
    assert found.parent is second


def test_an_answer_that_did_not_arrive_is_forgotten(session: Session) -> None:
    lost, kept = session.answered("Done."), session.answered("Done.")
    session.known.forget(lost.call_id)
    assert session.ask([SYSTEM, USER, {"role": "assistant", "content": "Done."}, USER]).parent is kept


def test_the_deepest_call_is_the_parent(session: Session) -> None:
    session.answered(None, ("a",))
    session.history = [*session.history, {"role": "assistant", "tool_calls": [tool_call("a")]}, result("a")]
    second = session.answered(None, ("b",))
    asked = [*session.history, {"role": "assistant", "tool_calls": [tool_call("b")]}, result("b")]
    assert session.ask(asked).parent is second


TURN: Message = {"role": "assistant", "content": None, "tool_calls": [tool_call("a"), tool_call("b")]}


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        ([SYSTEM, {"role": "user", "content": "List the files!"}, TURN, result("a"), result("b")], "history"),
        ([{"role": "system", "content": "Be long."}, USER, TURN, result("a"), result("b")], "history"),
        ([USER, TURN, result("a"), result("b")], "history"),
        ([SYSTEM, USER, {**TURN, "tool_calls": [tool_call("a")]}, result("a")], "partial_turn"),
        ([SYSTEM, USER, TURN, result("a")], "partial_turn"),
        ([SYSTEM, USER, TURN, result("a"), result("b"), result("b")], "partial_turn"),
    ],
)
def test_whatever_else_differs_is_no_continuation_and_named(
    session: Session, messages: list[Message], cause: str
) -> None:
    """Guards against serving a stale context to a request that only looks like a continuation."""
    session.answered(None, ("a", "b"))
    found = session.ask(messages)
    assert (found.parent, found.cause, found.new_messages) == (None, cause, messages)


def test_white_space_in_a_known_tool_result_makes_another_history(session: Session) -> None:
    """Guards against trimming what the model saw: the ids of the trimmed text are others."""
    session.answered(None, ("a",))
    turn: Message = {"role": "assistant", "content": None, "tool_calls": [tool_call("a")]}
    session.history = [SYSTEM, USER, turn, result("a", "README.md\n")]
    call = session.answered("Done.")
    said: Message = {"role": "assistant", "content": "Done."}
    assert session.ask([*session.history, said, USER]).parent is call
    trimmed = session.ask([SYSTEM, USER, turn, result("a", "README.md"), said, USER])
    assert trimmed.parent is not call


def test_other_tools_are_no_continuation(session: Session) -> None:
    session.answered(None, ("a", "b"))
    assert session.ask([SYSTEM, USER, TURN, result("a"), result("b")], tools=[]).cause == "tools"


@pytest.mark.parametrize(
    "user",
    [
        {"role": "user", "content": [{"type": "text", "text": "List the files."}]},
        {"content": "List the files.", "role": "user"},
        {"role": "user", "content": [{"type": "text", "text": "List the files.", "cache_control": {"type": "x"}}]},
        {"role": "user", "content": "List the files.", "name": None},
    ],
)
def test_a_lossless_difference_is_none(session: Session, user: Message) -> None:
    call = session.answered(None, ("a", "b"))
    assert session.ask([SYSTEM, user, TURN, result("a"), result("b")]).parent is call


def test_words_that_spell_the_next_message_are_not_it(session: Session) -> None:
    """Guards against two histories with one digest: an answer would be spliced to the context of the other."""
    question = session.history
    spelled = f"Done.\0{canonical(USER)[:-1].decode()}"
    session.answered(spelled)
    session.history = [*question, {"role": "assistant", "content": spelled}, SYSTEM]
    session.answered("Sure.")
    session.history = question
    session.answered("Done.")
    turns = [{"role": "assistant", "content": said} for said in ("Done.", "Sure.")]
    found = session.ask([*question, turns[0], USER, SYSTEM, turns[1], USER])
    assert found.parent is not None
    assert found.parent.index == 2


def test_a_turn_that_the_harness_made_up_counts_by_its_words(session: Session) -> None:
    made_up: Message = {"role": "assistant", "content": "Got it. Thanks for the context!"}
    session.history = [SYSTEM, USER, made_up, USER]
    call = session.answered(None, ("a",))
    turn: Message = {"role": "assistant", "tool_calls": [tool_call("a")]}
    assert session.ask([*session.history, turn, result("a")]).parent is call
    changed = copy.deepcopy(session.history)
    changed[2]["content"] = "Got it."
    assert session.ask([*changed, turn, result("a")]).cause == "history"


async def test_long_messages_count_the_same_when_their_identities_are_known(session: Session) -> None:
    """Guards against a conversation that is not found again, or found for another one, because of a long message."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * LONG}}
    long: list[Message] = [{"role": "user", "content": "0123 " * LONG}, {"role": "user", "content": [image]}]
    session.history = [SYSTEM, USER, *long]
    call = session.answered("Done.")
    asked = [*session.history, {"role": "assistant", "content": "Done."}, USER]
    identities = await identities_of_long(asked)
    assert list(identities) == [2, 3]
    for known in (identities, {}):
        assert session.known.continuation(asked, TOOLS, {}, known).parent is call
    asked[3] = {"role": "user", "content": [{**image, "image_url": {"url": image["image_url"]["url"] + "B"}}]}
    assert session.known.continuation(asked, TOOLS, {}, await identities_of_long(asked)).parent is None
