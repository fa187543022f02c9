"""Random sessions through the real tree, splicer, template and builders; the policy drifts as badly as it can.

Its answers are tokenised character by character and its JSON is spaced oddly, so that nothing re-templates to the same
ids. Harnesses append, retry, hang up, fork, rewrite, summarise, begin sub-agents, ask for titles and drop tool calls,
in any interleaving.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from numpy.typing import NDArray

from polar_gym.builders import build_trajectory
from polar_gym.builders.trace import verify_trace
from polar_gym.builders.tree import token_tree
from polar_gym.chat import ChatRequest, ids
from polar_gym.engines.embedded.answers import parse_answer
from polar_gym.engines.embedded.chatml import ChatML
from polar_gym.schema import BuilderSpec, Message, ModelCall, ToolDefinition, Trajectory
from polar_gym.splicing.plan import Plan, SessionMemory, Splicer
from polar_gym.splicing.terms import Terms

CHATML = ChatML()
END = CHATML.answer_ids({"role": "assistant", "content": "x"})[-1]
TAGS = {
    tag: CHATML._with_added_tokens.token_to_id(tag) for tag in ("<tool_call>", "</tool_call>", "<think>", "</think>")
}
TOOLS: list[ToolDefinition] = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


class Engine:
    takes_prefix_only = False

    async def template(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> NDArray[np.int32]:
        return np.asarray(CHATML.prompt_ids(list(messages), list(tools)), np.int32)

    async def decode(self, token_ids: Sequence[int]) -> str:
        return CHATML.decode(token_ids)


def drifting(text: str) -> list[int]:
    """The text's ids one character at a time: no tokenizer would cut it like this."""
    return [token for character in text for token in CHATML._plain.encode(character).ids]


def answer(kind: str, number: int) -> list[int]:
    said = drifting(f"Answer {number}, with  two spaces. ")
    call = [
        TAGS["<tool_call>"],
        *drifting(f'\n{{"name":"bash",  "arguments": {{"command":"echo {number}","n":1.0}}}}\n'),
        TAGS["</tool_call>"],
    ]
    return {
        "text": [*said, END],
        "call": [*call, END],
        "two_calls": [*said, *call, *call, END],
        "thinking": [TAGS["<think>"], *said, TAGS["</think>"], *said, *call, END],
        "cut_text": said,
        "cut_call": [*said, *call[:5]],
    }[kind]


KINDS = st.sampled_from(["text", "call", "call", "two_calls", "thinking", "cut_text", "cut_call"])


class Conversation:
    """A conversation as a harness keeps it."""

    def __init__(self, messages: list[Message], last: ModelCall | None = None, kind: str = "main") -> None:
        self.messages = messages
        self.kind = kind
        self.last = last
        """The call whose answer is the last turn."""

    def take(self, call: ModelCall) -> None:
        """Add an answer the way harnesses do: words trimmed, arguments re-serialised, ids unchanged; tools run."""
        assert call.response is not None
        turn: Message = {"role": "assistant", "content": (call.response.get("content") or "").strip()}
        results: list[Message] = []
        for index, each in enumerate(call.response.get("tool_calls") or []):
            minted = ids.tool_call(call.call_id, index)
            arguments = json.dumps(json.loads(each["function"]["arguments"]), separators=(",", ":"))
            function = {"name": each["function"]["name"], "arguments": arguments}
            turn.setdefault("tool_calls", []).append({"id": minted, "type": "function", "function": function})
            results.append({"role": "tool", "tool_call_id": minted, "content": f"ran {index}\n"})
        self.messages += [turn, *results]
        self.last = call


class Sessions(RuleBasedStateMachine):
    splice = True

    @initialize()
    def begin(self) -> None:
        self.memory = SessionMemory()
        self.splicer = Splicer(Engine(), enabled=self.splice)  # pyright: ignore[reportArgumentType]
        self.calls: list[ModelCall] = []
        self.conversations = [self.fresh("system")]

    def fresh(self, system: str, kind: str = "main") -> Conversation:
        return Conversation([{"role": "system", "content": system}, {"role": "user", "content": "Begin."}], kind=kind)

    def ask(
        self, messages: list[Message], kind: str, outcome: Any = "delivered", purpose: str = "main"
    ) -> tuple[ModelCall, Plan]:
        request = ChatRequest(model="policy", messages=list(messages), tools=TOOLS)
        asked = Terms(Engine()).of(self.memory.engine_ids, request)  # pyright: ignore[reportArgumentType]
        plan = asyncio.run(self.splicer.prepare(self.memory, request, asked))
        prompt = plan.request.prompt_ids
        if prompt is None:
            prompt = CHATML.prompt_ids(asked.messages, TOOLS)
        sampled = answer(kind, len(self.calls))
        sampled = sampled[: len(sampled) // 2] if outcome == "abandoned" else sampled
        call = ModelCall(
            call_id=f"c{len(self.calls)}",
            session_id="s",
            index=len(self.calls),
            provider="openai_chat",
            model="policy",
            messages=asked.messages,
            tools=TOOLS,
            response=parse_answer(CHATML.pieces(sampled), calls=True),
            prompt_ids=np.asarray(prompt, np.int32),
            response_ids=np.asarray(sampled, np.int32),
            logprobs=np.full(len(sampled), -0.5, np.float32),
            finish_reason="length" if kind.startswith("cut") else "stop",
            parent_id=plan.parent_id,
            continuation=plan.continuation,
            splice_cause=plan.cause,
            outcome=outcome,
            hints={"kind": purpose},
            started_at=float(len(self.calls)),
            duration=0.5,
        )
        self.calls.append(call)
        if outcome == "delivered":
            self.memory.remember(call, plan)
        return call, plan

    def pick(self, number: int) -> Conversation:
        return self.conversations[number % len(self.conversations)]

    @rule(number=st.integers(0, 9), kind=KINDS, says=st.booleans())
    def append(self, number: int, kind: str, says: bool) -> None:
        conversation = self.pick(number)
        if conversation.messages[-1]["role"] == "assistant" or says:
            conversation.messages.append({"role": "user", "content": f"Go on, {len(self.calls)}."})
        call, plan = self.ask(conversation.messages, kind, purpose=conversation.kind)
        if (last := conversation.last) is not None:
            assert plan.parent_id == last.call_id, "what is appended to a known conversation continues it"
            assert plan.continuation == ("spliced" if self.splice else "canonical"), plan
        conversation.take(call)

    @rule(number=st.integers(0, 9), kind=KINDS, kept=st.booleans())
    def retry(self, number: int, kind: str, kept: bool) -> None:
        """The same question twice; the conversation goes on from either answer."""
        conversation = self.pick(number)
        conversation.messages.append({"role": "user", "content": f"Again, {len(self.calls)}."})
        answers = [self.ask(conversation.messages, kind, purpose=conversation.kind)[0] for _ in range(2)]
        conversation.take(answers[kept])

    @rule(number=st.integers(0, 9), kind=KINDS)
    def hang_up(self, number: int, kind: str) -> None:
        conversation = self.pick(number)
        asked: list[Message] = [*conversation.messages, {"role": "user", "content": f"Lost, {len(self.calls)}."}]
        self.ask(asked, kind, "abandoned")

    @rule(number=st.integers(0, 9), kind=KINDS)
    def lose_a_whole_answer(self, number: int, kind: str) -> None:
        """Recorded as delivered, and found out not to have been; asked again, the conversation goes on."""
        conversation = self.pick(number)
        conversation.messages.append({"role": "user", "content": f"Lost in the end, {len(self.calls)}."})
        lost, _ = self.ask(conversation.messages, kind, purpose=conversation.kind)
        lost.outcome = "abandoned"
        self.memory.conversations.forget(lost.call_id)
        conversation.take(self.ask(conversation.messages, kind, purpose=conversation.kind)[0])

    @rule(number=st.integers(0, 9), kind=KINDS, purpose=st.sampled_from(["compaction", "auxiliary"]))
    def ask_aside(self, number: int, kind: str, purpose: str) -> None:
        """A summary or a title, asked for at the end of the very conversation, which then goes on without it."""
        aside: Message = {"role": "user", "content": f"Say it in short, {len(self.calls)}."}
        self.ask([*self.pick(number).messages, aside], kind, purpose=purpose)

    @rule()
    @precondition(lambda self: len(self.conversations) < 10)
    def begin_a_subagent(self) -> None:
        self.conversations.append(self.fresh("You are one of several.", "subagent"))

    @rule(number=st.integers(0, 9))
    def fork(self, number: int) -> None:
        conversation = self.pick(number)
        self.conversations.append(Conversation(list(conversation.messages), conversation.last, conversation.kind))

    @rule(number=st.integers(0, 9), place=st.integers(0, 9))
    def rewrite(self, number: int, place: int) -> None:
        conversation = self.pick(number)
        spoken = [index for index, message in enumerate(conversation.messages) if message["role"] != "assistant"]
        index = spoken[place % len(spoken)]
        conversation.messages[index] = {**conversation.messages[index], "content": f"rewritten {len(self.calls)}"}
        conversation.last = None

    @rule(number=st.integers(0, 9))
    @precondition(lambda self: len(self.calls) > 2)
    def compact(self, number: int) -> None:
        self.conversations.append(self.fresh(f"Summary {len(self.calls)}."))

    @rule(number=st.integers(0, 9), kind=KINDS)
    def come_back_with_half_a_turn(self, number: int, kind: str) -> None:
        """As a harness does after a stream broke: it goes on with the tool calls that it had."""
        conversation = self.pick(number)
        turn = next((m for m in reversed(conversation.messages) if m["role"] == "assistant"), {})
        if len(turn.get("tool_calls") or []) < 2:
            return
        dropped = turn["tool_calls"][-1]["id"]
        asked = [
            {**m, "tool_calls": m["tool_calls"][:-1]} if m is turn else m
            for m in conversation.messages
            if m.get("tool_call_id") != dropped
        ]
        _, plan = self.ask(asked, kind)
        assert plan.continuation != "spliced" or plan.parent_id != (conversation.last and conversation.last.call_id)

    def teardown(self) -> None:
        for builder in ("prefix_merging", "per_request"):
            self.check_laws(builder)

    def check_laws(self, builder: str) -> None:
        spec = BuilderSpec(name=builder)
        trajectory = build_trajectory(self.calls, spec)
        fidelity = trajectory.fidelity
        assert fidelity.sampled_tokens == sum(len(call.response_ids) for call in self.calls)
        assert fidelity.exact
        trained: Counter[str] = Counter()
        for trace in trajectory.traces:
            verify_trace(trace, self.calls)
            assert trace.trainable_tokens
            for call in self.calls:
                if call.call_id in trace.call_ids:
                    start = len(call.prompt_ids) - len(trace.prompt_ids)
                    is_trained = bool(trace.loss_mask[start : start + len(call.response_ids)].all())
                    assert not is_trained or trace.kind == call.hints["kind"]
                    trained[call.call_id] += is_trained
        delivered = {
            call.call_id
            for call in self.calls
            if call.outcome == "delivered" and call.hints["kind"] in spec.train_kinds
        }
        assert {call_id for call_id, times in trained.items() if times} == delivered
        assert all(times <= 1 for times in trained.values())
        in_tree = sum(call.parent_id is not None for call in self.calls)
        broken = sum(each.parent_id is not None for each in fidelity.breaks)
        assert fidelity.spliced + fidelity.canonical + broken == in_tree

        shuffled = random.Random(0).sample(self.calls, len(self.calls))
        assert build_trajectory(shuffled, spec).to_json() == trajectory.to_json(), (
            "the order of the list does not matter"
        )
        again = build_trajectory(self.in_another_order(), spec)
        assert _paths(again) == _paths(trajectory), "nor that in which requests of different conversations arrived"
        assert again.fidelity.excluded == fidelity.excluded

    def in_another_order(self) -> list[ModelCall]:
        """The same calls, had parallel conversations been faster and slower: each comes after what it goes on from."""
        chance = random.Random(len(self.calls))
        before = {node.call.call_id: node.parent and node.parent.call.call_id for node in token_tree(self.calls)}
        waiting, placed = list(self.calls), dict[str, ModelCall]()
        while waiting:
            ready = [call for call in waiting if {call.parent_id, before.get(call.call_id)} <= placed.keys() | {None}]
            chosen = chance.choice(ready)
            waiting = [call for call in waiting if call is not chosen]
            placed[chosen.call_id] = chosen.model_copy(update={"index": len(placed)})
        return list(placed.values())


def _paths(trajectory: Trajectory) -> set[tuple[str, ...]]:
    return {tuple(trace.call_ids) for trace in trajectory.traces}


class SessionsWithoutSplicing(Sessions):
    splice = False


TestSessions = Sessions.TestCase
TestSessionsWithoutSplicing = SessionsWithoutSplicing.TestCase
TestSessions.settings = TestSessionsWithoutSplicing.settings = settings(max_examples=30, stateful_step_count=20)
