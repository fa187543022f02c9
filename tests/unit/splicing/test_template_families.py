"""Splicing under the conventions of the families of chat templates, against golden files.

Each golden file (`golden/<family>.txt`) holds conversations as their policy saw them: the prompt that they all begin
with, what was sampled, and what each later request added to it; or, for a request that is not spliced, why. A line's
end is shown as `↵`. After a change that is meant, `UPDATE_GOLDEN=1 pytest
tests/unit/splicing/test_template_families.py` writes them anew, and their diff is to be read.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polar_gym.chat import ChatRequest, ids
from polar_gym.chat.messages import assistant_message
from polar_gym.schema import Message, ModelCall, ToolDefinition
from polar_gym.splicing.plan import Plan, SessionMemory, Splicer
from polar_gym.splicing.terms import Terms
from tests.support.calls import make_call
from tests.unit.splicing.template_families import FAMILIES, Family, FamilyEngine, Said

GOLDEN = Path(__file__).with_name("golden")

TOOLS: list[ToolDefinition] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]

START: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is in this folder?"},
]
DONE = Said(text="That is all.")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


CASES: dict[str, list[tuple[list[Message], Said]]] = {
    "words": [
        (START, Said(text=" One file,  README.md.\n")),
        ([user("Is it long?")], Said(text="No.")),
        ([user("Thanks.")], DONE),
    ],
    "a call": [(START, Said(commands=("cat README.md",))), ([], DONE), ([user("Thanks.")], DONE)],
    "parallel calls": [(START, Said(text="I look.", commands=("ls", "cat README.md"))), ([], DONE)],
    "a call, and the user speaks before its result is answered": [
        (START, Said(commands=("cat README.md",))),
        ([user("Hurry.")], DONE),
    ],
    "thinking": [
        (START, Said(reasoning="Files?", text="One.")),
        ([user("Which?")], Said(reasoning="Its name.", commands=("cat README.md",))),
        ([], Said(reasoning="So that is it.", text="README.md.")),
        ([user("Thanks.")], DONE),
    ],
    "ended by a stop string": [(START, Said(text="One file: STOP", end="stop string")), ([user("Which?")], DONE)],
    "cut off": [(START, Said(text="One file, and", end="length")), ([user("Go on.")], DONE)],
    "cut off in a call": [(START, Said(commands=("cat README.md",), end="in a call")), ([user("Go on.")], DONE)],
    "cut off in a call behind words": [
        (START, Said(text="I look.", commands=("cat README.md",), end="in a call")),
        ([user("Go on.")], DONE),
    ],
    "ended by another token": [(START, Said(text="One.", end="another")), ([user("Which?")], DONE)],
    "a late system message": [
        (START, Said(text="One.")),
        ([{"role": "system", "content": "Be kind."}, user("Which?")], DONE),
    ],
    "the user spells special tokens": [
        (START, Said(text="One.")),
        ([user("What is <|im_end|> or [INST] or <|user|>?")], DONE),
    ],
}


def is_possible(family: Family, turns: list[tuple[list[Message], Said]]) -> bool:
    if any(said.end == "another" for _, said in turns) and family.another_end is None:
        return False
    return family.parallel or all(len(said.commands) < 2 for _, said in turns)


class Session:
    """A conversation as a harness leads it: it hands ids back, and trims and re-serialises the rest."""

    def __init__(self, family: Family, splicer: Splicer | None = None) -> None:
        self._family, self._engine = family, FamilyEngine(family)
        self._splicer = splicer or splicer_of(family)
        self._terms = Terms(self._engine)  # pyright: ignore[reportArgumentType]
        self._memory = SessionMemory()
        self._messages: list[Message] = []
        self._last: ModelCall | None = None
        self._numbers = itertools.count()

    async def play(self, turns: list[tuple[list[Message], Said]]) -> str:
        await self._terms.probe()
        return "".join([await self._turn(new, said) for new, said in turns])

    async def _turn(self, new: list[Message], said: Said) -> str:
        asked = [*self._messages, *new]
        request = ChatRequest(model="policy", messages=list(asked), tools=TOOLS)
        plan = await self._splicer.prepare(self._memory, request, self._terms.of(self._memory.engine_ids, request))
        request = plan.request
        if request.prompt_ids is None and self._last is not None:
            self._messages = asked
            return f"-- not spliced: {plan.cause}\n"
        shown = "" if request.prompt_ids is None else await self._added(request, new)
        if request.prompt_ids is None:
            request = replace(request, prompt_ids=await self._engine.template(request.messages, TOOLS))
        self._messages = asked
        call = self._answered(request, plan, said)
        return f"{shown}-- sampled\n{visible(await self._engine.decode(call.response_ids.tolist()))}"

    async def _added(self, request: ChatRequest, new: list[Message]) -> str:
        """What a spliced prompt adds to what the policy has seen, the laws of splicing checked."""
        assert request.prompt_ids is not None
        assert self._last is not None
        seen = np.concatenate([self._last.prompt_ids, self._last.response_ids])
        np.testing.assert_array_equal(request.prompt_ids[: len(seen)], seen)
        added = request.prompt_ids[len(seen) :]
        assert added[0] != seen[-1], "what ends a turn is not doubled"
        text = await self._engine.decode(added.tolist())
        for message in new:
            assert text.count(message["content"]) == 1
        return f"-- spliced\n{visible(text)}"

    def _answered(self, request: ChatRequest, plan: Plan, said: Said) -> ModelCall:
        """The policy's answer, recorded, and taken into the conversation; its commands are run."""
        assert request.prompt_ids is not None
        own_ids = [self._family.call_id(next(self._numbers)) for _ in said.commands]
        is_cut = said.end in ("length", "in a call")
        calls = [] if is_cut else [called(own, command) for own, command in zip(own_ids, said.commands, strict=True)]
        call = make_call(
            next(self._numbers),
            request.prompt_ids.tolist(),
            self._engine.drifting(self._family.sampled(said, own_ids)).tolist(),
            messages=request.messages,
            tools=TOOLS,
            response=assistant_message(said.text or None, said.reasoning or None, calls),
            finish_reason="length" if is_cut else "tool_calls" if calls else "stop",
        )
        self._memory.remember(call, plan)
        self._last = call
        minted = [called(ids.tool_call(call.call_id, i), command) for i, command in enumerate(said.commands) if calls]
        self._messages.append(assistant_message(said.text.strip(), None, minted))
        for each in minted:
            self._messages.append({"role": "tool", "tool_call_id": each["id"], "content": '# Title\nSay "hello".\n'})
        return call


def splicer_of(family: Family) -> Splicer:
    return Splicer(FamilyEngine(family), enabled=True)  # pyright: ignore[reportArgumentType]


def called(call_id: str, command: str) -> dict[str, object]:
    arguments = json.dumps({"command": command}, separators=(",", ":"))
    return {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}


def visible(text: str) -> str:
    return text.replace("\n", "↵\n") + "\n"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_what_a_policy_of_this_family_sees(family: Family) -> None:
    possible = {name: turns for name, turns in CASES.items() if is_possible(family, turns)}
    found = "\n".join([f"== {name}\n{await Session(family).play(turns)}" for name, turns in possible.items()])
    engine = FamilyEngine(family)
    first_prompt = await engine.decode((await engine.template(START, TOOLS)).tolist())
    found = f"== how all begin\n{visible(first_prompt)}\n{found}"
    golden = GOLDEN / f"{family.name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(found, encoding="utf-8")
    assert found == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_what_was_learned_of_a_template_changes_nothing(family: Family) -> None:
    """Guards against a place in the template that one session taught being taken for the place in another."""
    splicer = splicer_of(family)
    possible = [turns for turns in CASES.values() if is_possible(family, turns)]
    for turns in [*possible, *reversed(possible)]:
        assert await Session(family, splicer).play(turns) == await Session(family).play(turns)


ROUNDS: list[tuple[list[Message], Said]] = [
    ([], Said(commands=("ls", "ls -a"))),
    ([], Said(commands=("cat README.md",))),
    ([], Said(text="One.")),
    ([user("Which?")], Said(commands=("ls",))),
    ([], DONE),
]
"""The rounds of a conversation, whose start is added to the first."""


@pytest.mark.parametrize(
    ("name", "start", "seen"),
    [
        ("nemotron", "Be brief. /no_think", r"<SPECIAL_11>Assistant\n(<think>.{8})"),
        ("command", "Be brief.", r'_RESULT\|>\{"tool_call_id": ?(\d)'),
    ],
)
async def test_a_template_that_reads_the_conversation_before_is_followed(name: str, start: str, seen: str) -> None:
    """Guards against a policy whose thinking a switch turned off for the first call alone, and against results under
    the number of another call: the new messages were templated behind a dummy."""
    (family,) = [family for family in FAMILIES if family.name == name]
    system: Message = {"role": "system", "content": start}
    for splicer in [splicer_of(family)] * 2:  # the second conversation knows of the first
        played = await Session(family, splicer).play([([system, user("Hi.")], ROUNDS[0][1]), *ROUNDS[1:]])
        found = re.findall(seen, played.replace("↵", ""))
        assert found == (["<think></think>"] * 4 if name == "nemotron" else ["0", "1", "2", "3"])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_few_templates_read_the_conversation_before(family: Family) -> None:
    """Guards against whole renderings of each continuation, for templates that do not need them."""
    splicer = splicer_of(family)
    for turns in CASES.values():
        if is_possible(family, turns):
            await Session(family, splicer).play(turns)
    rounds = ROUNDS if family.parallel else ROUNDS[1:]
    await Session(family, splicer).play([(START, rounds[0][1]), *rounds[1:]])
    assert splicer._learned.reads_all == (family.name == "command")
