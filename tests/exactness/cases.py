"""Named cases: one defect each that an audit found, played by raw clients against a stage.

A case returns the facts that it found wrong. The runner then holds the whole stage against the laws.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.vllm_work import slow_engine
from tests.exactness.books import Books, Call
from tests.exactness.clients import WIRES, Answered, Ask, ask, play_turns
from tests.exactness.counters import COUNTED, check_counters
from tests.exactness.laws import LAWS
from tests.exactness.recorder import Fault
from tests.exactness.stage import GatewayDiedError, Stage, staged
from tests.exactness.stand_in import StandIn

Play = Callable[[Stage], Awaitable[Iterable[str]]]
PATIENCE_SECONDS = 60.0
LEFT_AT = 160
"""How many tokens were sampled when a call is left: more than network buffers explain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A named case and the settings that it needs."""

    name: str
    title: str
    play: Play
    gateway: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    """Of the stand-in; a case with settings of its own is not for another engine."""
    orders: bool = False
    """Whether the case orders answers that only the stand-in gives."""
    slow: bool = False
    """Slow a real engine down: a small model would have sampled all tokens before its call is left."""


CASES: list[Case] = []


def _case(name: str, title: str, **settings: Any) -> Callable[[Play], Play]:
    def add(play: Play) -> Play:
        CASES.append(Case(name=name, title=title, play=play, **settings))
        return play

    return add


async def run_case(case: Case, directory: Path, engine: str | None = None) -> list[str]:
    """Return what is wrong after a case. `engine`: a URL; default: a stand-in of the case's own."""
    if engine is not None:
        with slow_engine(engine) if case.slow else contextlib.nullcontext():
            return await _on_stage(case, directory, engine)
    stand_in = StandIn(**case.engine)
    await stand_in.start()
    try:
        return await _on_stage(case, directory, stand_in.url)
    finally:
        await stand_in.stop()


async def _on_stage(case: Case, directory: Path, engine: str) -> list[str]:
    try:
        async with staged(engine, directory, **case.gateway) as stage:
            probes = sum(len(answer.given.ids) for answer in stage.answers())
            before = await stage.sampled() - probes
            wrong = list(await case.play(stage))
            await stage.close()
            breaches, _ = stage.check()
            wrong += [f"{law}: {breach}" for law in LAWS for breach in breaches[law]]
            sampled = await _settled(stage) - before
            wrong += [f"{COUNTED}: {breach}" for breach in check_counters(sampled, stage.answers(), stage.books())]
            return wrong
    except GatewayDiedError as error:
        return [] if case.name == "D7" and "logits" in str(error) else [f"the gateway died: {error}"]


async def _settled(stage: Stage) -> int:
    """Return the engine's counter when no request is under way any more."""
    last = -1
    while (now := await stage.sampled()) != last:
        last = now
        await asyncio.sleep(0.1)
    return now


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not true():  # noqa: ASYNC110 - the text grows in another task
            await asyncio.sleep(0.01)


async def _sampling(stage: Stage, tokens: int) -> Awaitable[None]:
    """Return what waits until the engine has sampled so many more tokens than now."""
    goal = await stage.sampled() + tokens

    async def reached() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await stage.sampled() < goal:  # noqa: ASYNC110 - a counter of another process tells no events
                await asyncio.sleep(0.02)

    return reached()


def _long(stage: Stage, tokens: int) -> str:
    """Return the words for an answer that has so many tokens and then goes on for ever: on a real engine by a field
    that the recorder adds, on the stand-in by an order."""
    name = f"long-{time.monotonic_ns()}"
    stage.recorder.faults[name] = Fault(ask=lambda body: body | {"ignore_eos": True, "max_tokens": 4000})
    return f"tokens-4000 stall-{tokens} fault-{name} "


def _calls(books: Sequence[Books]) -> list[Call]:
    calls = [call for each in books for call in each.calls]
    return sorted(calls, key=lambda call: call.line["started_at"])


@_case("D1", "at most one tool call is asked for, and no grammar is applied")
async def _one_tool_call(stage: Stage) -> Iterable[str]:
    session = await stage.open()
    await ask(stage, session, Ask(tools=True, more={"parallel_tool_calls": False}))
    choice = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    await ask(stage, session, Ask(wire="messages", tools=True, more=choice))
    await ask(stage, session, Ask(wire="responses", tools=True, more={"parallel_tool_calls": False}))
    return []


@_case("D2", "a grammar of the server's own keeps calls with tools out of training", engine={"own_grammar": True})
async def _own_grammar(stage: Stage) -> Iterable[str]:
    session = await stage.open()
    await ask(stage, session, Ask(tools=True))
    await stage.close(session)
    (books,) = stage.books()
    trained = sum(sum(trace.mask) for trace in books.traces)
    return [f"{trained} tokens are trained"] if trained else []


async def _hang_up(stage: Stage) -> Iterable[str]:
    for wire in WIRES:
        for stream in (True, False):
            session = await stage.open()
            what = Ask(wire=wire, words=_long(stage, LEFT_AT), stream=stream, max_tokens=4000)
            await ask(stage, session, what, leave=await _sampling(stage, LEFT_AT))
    session = await stage.open()
    what, reached = Ask(words=_long(stage, LEFT_AT), stream=False, max_tokens=4000), await _sampling(stage, LEFT_AT)
    under_way = asyncio.create_task(ask(stage, session, what))
    await reached
    await stage.close(session)  # as at the end of its time
    await under_way
    await stage.close()
    calls = [call for call in _calls(stage.books()) if call.outcome != "abandoned"]
    return [f"call {call.call_id} is {call.outcome}, not abandoned" for call in calls]


@_case("D3", "a call is left in mid-answer: default streaming", gateway={"streaming": "synthetic"}, slow=True)
async def _hang_up_synthetic(stage: Stage) -> Iterable[str]:
    return await _hang_up(stage)


@_case("D3r", "a call is left in mid-answer: real streaming", slow=True)
async def _hang_up_real(stage: Stage) -> Iterable[str]:
    return await _hang_up(stage)


@_case("D3e", "a call is left, and its session ends before the engine has aborted the call", orders=True)
async def _end_after_hang_up(stage: Stage) -> Iterable[str]:
    session = await stage.open()
    held, until = asyncio.Event(), asyncio.Event()
    stage.recorder.faults["*"] = Fault(path="/abort_requests", held=held, until=until)
    what = Ask(words=_long(stage, LEFT_AT), max_tokens=4000)
    await ask(stage, session, what, leave=await _sampling(stage, LEFT_AT))
    with contextlib.suppress(TimeoutError):  # a gateway that does not abort closes its connection
        await asyncio.wait_for(held.wait(), 5)
    ending = asyncio.create_task(stage.close(session))
    await asyncio.wait([ending], timeout=0.5)  # a gateway that waits for the engine does not end it yet
    until.set()
    await ending
    booked = sum(len(call.ids) for call in _calls(stage.books()))
    return [] if booked == LEFT_AT else [f"{booked} of {LEFT_AT} tokens are in the books"]


@_case("D4", "the policy writes half a surrogate pair into a tool call", gateway={"streaming": "synthetic"})
async def _surrogate(stage: Stage) -> Iterable[str]:
    session = await stage.open()
    stage.recorder.faults["lone"] = stage.recorder.faults["lone-again"] = Fault(ask=_says_half_a_pair)
    for name, stream in (("lone", True), ("lone-again", False)):
        await ask(stage, session, Ask(words=f"tokens-10 surrogate fault-{name} ", tools=True, stream=stream))
    return []


def _says_half_a_pair(body: dict[str, Any]) -> dict[str, Any]:
    said = '<tool_call>\n{"name": "bash", "arguments": {"command": "fox \\ud83e"}}\n</tool_call>'
    plain = {"chat_template_kwargs": {"enable_thinking": False}}  # else the grammar waits for the thinking to end
    return body | plain | {"structured_outputs": {"choice": [said]}}


@_case("D5", "the ids of an answer are known, and its text cannot be had", gateway={"path": "generate"}, orders=True)
async def _no_text(stage: Stage) -> Iterable[str]:
    session = await stage.open()
    for status in (400, 500):
        stage.recorder.faults["*"] = Fault(kind="refuse", path="/derender", status=status)
        await ask(stage, session, Ask(words="tokens-30"))
    held = asyncio.Event()
    stage.recorder.faults["*"] = Fault(kind="hang", path="/derender", held=held)
    await ask(stage, session, Ask(words="tokens-30"), leave=held.wait())
    return []


@_case("D6", "an answer is cut in transit", gateway={"streaming": "synthetic"})
async def _cut(stage: Stage) -> Iterable[str]:
    for number, wire in enumerate(WIRES):
        for kind in ("cut", "reset"):
            for stream in (True, False):
                session = await stage.open()
                name = f"{kind}-{number}-{stream:d}"
                stage.recorder.faults[name] = Fault(kind=kind, size=2500, ask=lambda body: body | {"ignore_eos": True})
                what = Ask(wire=wire, words=f"tokens-80 fault-{name} ", stream=stream, max_tokens=80)
                await ask(stage, session, what)
    return []


@_case("D7", "an engine that sends logits is refused", engine={"logits": True})
async def _logits(stage: Stage) -> Iterable[str]:
    return ["the gateway takes logits for logprobs"]


@_case("D8", "the operator's version of the weights counts", gateway={"path": "generate"}, orders=True)
async def _versions(stage: Stage) -> Iterable[str]:
    session = await stage.open()
    for version in ("A", "B"):
        await stage.gateway.order(version=version)
        await ask(stage, session, Ask(words="tokens-20"))
    told = [[span["version"] for span in call.line["weight_versions"]] for call in _calls(stage.books())]
    return [] if told == [["A"], ["B"]] else [f"versions {told}, not A and then B"]


@_case("D9", "the gateway is killed in mid-stream", slow=True)
async def _kill(stage: Stage) -> Iterable[str]:
    session = await stage.open()
    what, answered = Ask(words=_long(stage, LEFT_AT), max_tokens=4000), Answered()
    under_way = asyncio.create_task(ask(stage, session, what, into=answered))
    await _until(lambda: len(answered.content) >= 40)
    content = answered.content
    await stage.kill()
    await under_way
    seen = sum(answer.sent.tokens_of(content) for answer in stage.answers() if answer.own is None)
    held = sum(len(call.ids) for call in _calls(stage.books()))
    return [] if held >= seen > 0 else [f"{held} tokens are in the books; the harness had seen {seen}"]


@_case("D10", "of two sub-agents with one prompt, both count", gateway={"streaming": "synthetic"})
async def _two_threads(stage: Stage) -> Iterable[str]:
    session = await stage.open("claude_code")
    asks = [
        Ask(wire="messages", words="tokens-30 pace-10", marked=False, headers={"x-claude-code-agent-id": agent})
        for agent in ("one", "two")
    ]
    await asyncio.gather(*(ask(stage, session, what) for what in asks))
    await stage.close(session)
    (books,) = stage.books()
    lost = books.fidelity["excluded"].get("superseded", 0)
    return [f"{lost} tokens are excluded as superseded"] if lost else []


@_case("D11", "an event cannot be understood")
async def _odd_event(stage: Stage) -> Iterable[str]:
    session = await stage.open()
    spoilt: list[bytes] = []

    def spoil(piece: bytes) -> bytes:
        if spoilt or not re.search(rb'"content": ?"[^"]', piece):
            return piece
        spoilt.append(piece)
        return re.sub(rb'"content": ?"([^"])', rb'"content": 5, "spoilt": "\1', piece, count=1)

    stage.recorder.faults["odd"] = Fault(rewrite=spoil, ask=lambda body: body | {"ignore_eos": True})
    await ask(stage, session, Ask(words="tokens-40 pace-2 fault-odd ", max_tokens=40))
    return [] if spoilt else ["no event was there to be spoilt"]


@_case("D12", "text that looks special, and is not, breaks no continuation", orders=True)
async def _special_text(stage: Stage) -> Iterable[str]:
    session = await stage.open()
    await play_turns(stage, session, "print('<think>')")
    forks = [call.line["splice_cause"] for call in _calls(stage.books()) if call.line["continuation"] == "canonical"]
    return [f"a continuation is not spliced: {cause}" for cause in forks]


@_case("D13", "a compaction of pi is one")
async def _compaction(stage: Stage) -> Iterable[str]:
    session = await stage.open("pi")
    system = {"role": "system", "content": "You are a context summarization assistant. Summarize."}
    await ask(stage, session, Ask(history=[system]))
    kinds = [call.line["hints"].get("kind") for call in _calls(stage.books())]
    return [] if kinds == ["compaction"] else [f"its kind is {kinds}"]


@_case("D14", "both streaming modes give one record", orders=True)
async def _two_modes(stage: Stage) -> Iterable[str]:
    records = []
    for mode in ("real", "synthetic"):
        with tempfile.TemporaryDirectory() as name:
            engine = StandIn()
            await engine.start()
            async with staged(engine.url, Path(name), streaming=mode) as other:
                records.append(await _told(other))
            await engine.stop()
    pairs = enumerate(zip(*records, strict=True))
    return [f"call {place} is {one} with real, {two} with synthetic" for place, (one, two) in pairs if one != two]


async def _told(stage: Stage) -> list[dict[str, Any]]:
    for words in ("tokens-20", "tokens-20 tool", "tokens-20 surrogate", "tokens-300"):
        for stream in (True, False):
            session = await stage.open()
            await ask(stage, session, Ask(words=words, stream=stream, tools=True, marked=False))
    session = await stage.open()
    what = Ask(words="tokens-300 stall-20", tools=True, marked=False)
    await ask(stage, session, what, leave=await _sampling(stage, 20))
    await stage.close()
    fields = ("outcome", "finish_reason", "response", "response_ids")
    told = [{name: call.line[name] for name in fields} for call in _calls(stage.books())]
    for each in told:
        each["response"] = re.sub(r"call-[0-9a-f]+", "call", str(each["response"]))
    return told


@_case("D15", "a harness that edits the assistant's words is counted", orders=True)
async def _edited(stage: Stage) -> Iterable[str]:
    session = await stage.open()
    await play_turns(stage, session, "ok", edit=True)
    await stage.close(session)
    (books,) = stage.books()
    told = str({name: value for name, value in books.fidelity.items() if value})
    return [] if re.search("edit|rewrit|overrid", told) else [f"the fidelity tells nothing of it: {told}"]


@_case("D16", "no tool call is hidden from the harness")
async def _hidden_calls(stage: Stage) -> Iterable[str]:
    session = await stage.open()
    await ask(stage, session, Ask(words="tokens-20 tool", tools=True, more={"parallel_tool_calls": False}))
    await stage.close(session)
    (books,) = stage.books()
    told = books.fidelity.get("single_tool_call")
    sent = [answer.number for answer in stage.answers() if answer.body.get("parallel_tool_calls") is False]
    return [f"request {number} makes vLLM hide calls" for number in sent] + (
        [] if told == 1 else [f"the fidelity counts {told} such calls, not 1"]
    )


@_case("D17", "the trace tells the sampling")
async def _told_sampling(stage: Stage) -> Iterable[str]:
    session = await stage.open()
    await ask(stage, session, Ask(words="tokens-20"))
    await stage.close(session)
    traces = [trace for books in stage.books() for trace in books.traces]
    return [] if all("temperature" in str(trace.line) for trace in traces) else ["no trace names the temperature"]
