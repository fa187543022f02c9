"""Grading by a resources server: what it is asked, what its answers mean, and who is to blame for a missing one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from polar_gym.errors import ConfigError
from polar_gym.evaluators import EVALUATORS
from polar_gym.evaluators.blame import MaskedError, judge
from polar_gym.evaluators.nemo_gym import NemoGym, NemoGymOptions
from polar_gym.harnesses import HARNESSES
from polar_gym.schema import EvaluationResult, EvaluatorSpec, HarnessSpec, ModelCall
from tests.support.calls import make_call
from tests.support.evaluations import make_context
from tests.support.resources_server import Counting, counting, row


@pytest.fixture
async def server() -> AsyncIterator[Counting]:
    async with counting() as server:
        yield server


def tool_call(name: str, arguments: str, number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def calls_of(*turns: list[dict[str, Any]], **fields: Any) -> list[ModelCall]:
    """Return the calls of a session: one with each of these tool calls, whose results the next one states."""
    history: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    made = []
    for index, turn in enumerate([*turns, []]):
        answer = {"role": "assistant", "content": None if turn else "Done.", **({"tool_calls": turn} if turn else {})}
        made.append(make_call(index, [1], [2], messages=list(history), response=answer, **fields))
        results = [{"role": "tool", "tool_call_id": each["id"], "content": f"<{each['id']}>"} for each in turn]
        history += [answer, *results]
    return made


async def graded(
    server: Counting, calls: list[ModelCall], *, harness: str = "codex", seconds: float = 60, **options: Any
) -> EvaluationResult:
    """Grade a session whose tool calls are made now."""
    spec = EvaluatorSpec.model_validate({"name": "nemo_gym", "url": server.url, "row": row(6), **options})
    evaluator = EVALUATORS.make(spec)
    assert isinstance(evaluator, NemoGym)
    await evaluator.environment.open()
    try:
        prefix = HARNESSES.get(harness).mcp_prefix or ""
        for call in calls:
            for each in (call.response or {}).get("tool_calls") or []:
                name, arguments = (
                    each["function"]["name"].removeprefix(prefix),
                    json.loads(each["function"]["arguments"]),
                )
                if name in ("add", "total"):
                    await evaluator.environment.call(name, arguments)
        context = make_context(spec, calls)
        context.request.agent = HarnessSpec(name=harness)
        return await judge(evaluator, context, seconds)
    finally:
        await evaluator.environment.close()


ADDS = calls_of([tool_call("mcp__gym__add", '{"count": 3}', 0)], [tool_call("mcp__gym__total", "{}", 1)])


async def test_the_server_gets_the_row_and_the_conversation_in_its_own_words(server: Counting) -> None:
    result = await graded(server, ADDS, row=row(6, verifier_metadata={"answer": 6}))
    assert (result.reward, result.log) == (1.0, '{"exact": true}')
    (body,) = server.verified
    assert body["verifier_metadata"] == {"answer": 6}
    assert body["responses_create_params"] == row(6)["responses_create_params"]
    output = body["response"]["output"]
    assert [(item["type"], item.get("name")) for item in output[:4]] == [
        ("function_call", "add"),
        ("function_call_output", None),
        ("function_call", "total"),
        ("function_call_output", None),
    ]
    assert [json.loads(item["output"]) for item in output[1:4:2]] == [{"success": True}, {"total": 6}]
    assert output[4]["content"][0]["text"] == "Done."


TURNS = st.lists(
    st.lists(st.tuples(st.sampled_from(["mcp__gym__add", "shell"]), st.booleans()), min_size=1, max_size=3), max_size=5
)


@given(TURNS, st.data())
def test_every_call_that_ran_appears_with_its_output_in_order(
    turns: list[list[tuple[str, bool]]], data: st.DataObject
) -> None:
    """Each call of a turn is a tool, and whether the server got the call, if it is the server's."""
    numbers = iter(range(100))
    made = [[(next(numbers), *each) for each in turn] for turn in turns]
    calls = calls_of(*([tool_call(name, f'{{"count": {n}}}', n) for n, name, _ in turn] for turn in made))
    unseen = data.draw(st.sampled_from([None, *calls]))
    if unseen is not None:  # an answer that the harness never got
        calls.insert(unseen.index, unseen.model_copy(update={"call_id": "cut", "outcome": "abandoned"}))
    title = make_call(0, [1], [2], response={"role": "assistant", "content": "A title"}, hints={"kind": "auxiliary"})
    evaluator = NemoGym(NemoGymOptions(url="http://127.0.0.1:1", row=row(6)))
    ran = [(n, name) for turn in made for n, name, reached in turn if reached or name == "shell"]
    evaluator.environment._said = [("add", {"count": n}, f"said {n}") for n, name in ran if name != "shell"]
    context = make_context(EvaluatorSpec(name="nemo_gym"), [*reversed(calls), title])
    context.request.agent = HarnessSpec(name="codex")
    items = evaluator._conversation(context)
    functions = [item for item in items if item["type"] == "function_call"]
    assert [item["name"] for item in functions] == [name.removeprefix("mcp__gym__") for _, name in ran]
    assert [item["call_id"] for item in functions] == [f"c{n}" for n, _ in ran]
    outputs = {item["call_id"]: place for place, item in enumerate(items) if item["type"] == "function_call_output"}
    assert all(items.index(item) < outputs[item["call_id"]] for item in functions)
    words = [f"<c{n}>" if name == "shell" else f"said {n}" for n, name in ran]
    assert [items[place]["output"] for place in outputs.values()] == words
    assert [item["content"][0]["text"] for item in items if item["type"] == "message"] == ["Done."]


async def test_only_calls_that_reached_the_server_have_its_tools_names(server: Counting) -> None:
    """Guards against rewards for calls that a harness refused, or that its own tool of the same name took."""
    own, refused = tool_call("add", '{"count": 3}', 0), tool_call("mcp__gym__add", '{"count": 9}', 1)
    mended, last = tool_call("mcp__gym__add", '{"count": "4"}', 2), tool_call("mcp__gym__total", "{}", 3)
    evaluator = NemoGym(NemoGymOptions(url=server.url, row=row(6)))
    await evaluator.environment.open()
    try:
        await evaluator.environment.call("total", {})
        calls = calls_of([own, refused], [last])[:-1]  # its result came too late for another request
        context = make_context(EvaluatorSpec(name="nemo_gym"), calls)
        context.request.agent = HarnessSpec(name="codex")
        items = evaluator._conversation(context)
        assert [item.get("name", item.get("output")) for item in items] == ["total", '{"total": 3}']
        await evaluator.environment.call("add", {"count": 4})  # as some harnesses mend arguments
        context.calls[:] = calls_of([mended])
        assert evaluator._conversation(context)[0]["arguments"] == '{"count": "4"}'
    finally:
        await evaluator.environment.close()


@pytest.mark.parametrize(
    ("harness", "shown"), [("gemini_cli", "mcp_gym_add"), ("opencode", "gym_add"), ("command", "add")]
)
async def test_a_tool_has_the_servers_name_whatever_the_harness_calls_it(
    server: Counting, harness: str, shown: str
) -> None:
    result = await graded(server, calls_of([tool_call(shown, '{"count": 3}', 0)]), harness=harness)
    assert result.reward == 1.0
    assert server.verified[0]["response"]["output"][0]["name"] == "add"


async def test_what_a_tool_said_is_found_where_the_harness_writes_the_arguments_otherwise(server: Counting) -> None:
    """JavaScript writes 3.0 as 3."""
    environment = NemoGym(NemoGymOptions(url=server.url, row=row(6))).environment
    await environment.open()
    try:
        for count in (3, 4):
            await environment.call("add", {"count": count})
        await environment.call("total", {})
        assert not (await environment.call("add", {"count": "x"})).text.startswith('{"s')
        asked = [("total", "{}"), ("add", '{ "count": 4.0 }'), ("total", '{"a": 1}'), ("add", "no JSON")]
        assert environment.said(asked) == ['{"total": 10}', '{"success": true}', None, '{"success": true}']
    finally:
        await environment.close()


async def test_an_agent_cannot_mask_its_session_by_nonsense(server: Counting) -> None:
    """The server's verifier trips over the arguments: another episode, in which nothing is done, is graded."""
    result = await graded(server, calls_of([tool_call("mcp__gym__add", "{}", 0)]))
    assert (result.reward, result.resolved) == (0.0, False)
    assert "/verify answered 500" in result.detail
    assert len(server.verified) == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, {"detail": "Not Found"}), "/verify answered 404"),
        ((500, "boom"), "/verify answered 500"),
        ((200, {"score": 1}), "reward: is required"),
        ((200, b'{"reward": NaN}'), "reward"),
        ((200, b"<html>"), "Invalid JSON"),
        ((200, {"reward": 0.0, "mask_sample": True, "failure_reason": "no judge"}), "masks the episode: no judge"),
        ((200, {"reward": 0.0, "_ng_failure_class": "judge_failed"}), "masks the episode: judge_failed"),
    ],
    ids=str,
)
async def test_a_server_that_grades_nothing_masks_the_session(
    server: Counting, answer: tuple[int, Any], said: str
) -> None:
    server.broken["/verify"] = answer
    with pytest.raises(MaskedError, match=said) as raised:
        await graded(server, ADDS)
    assert "\n" not in str(raised.value)


async def test_a_verdict_that_does_not_come_masks_the_session(server: Counting) -> None:
    server.slow = "/verify"
    with pytest.raises(MaskedError, match=r"not done within 0\.5 seconds"):
        await graded(server, ADDS, seconds=0.5)


async def test_a_server_that_went_away_masks_the_session(server: Counting) -> None:
    evaluator = NemoGym(NemoGymOptions(url=server.url, row=row(6)))
    await evaluator.environment.open()
    evaluator.environment._url = "http://127.0.0.1:9"
    try:
        with pytest.raises(MaskedError, match=r"cannot be reached .*; is the resources server running there"):
            await judge(evaluator, make_context(EvaluatorSpec(name="nemo_gym"), []), 60)
        told = await evaluator.environment.call("add", {"count": 3})
        assert told.failed
        evaluator.environment._url = server.url
        with pytest.raises(MaskedError, match="the agent called a tool then"):
            await judge(evaluator, make_context(EvaluatorSpec(name="nemo_gym"), []), 60)
    finally:
        await evaluator.environment.close()


async def test_a_broken_connection_masks_nothing(server: Counting) -> None:
    """Guards against masks that an agent buys: words of its may make the server drop the connection."""
    evaluator = NemoGym(NemoGymOptions(url=server.url, row=row(6)))
    await evaluator.environment.open()
    try:
        server.dropped = "/add"
        assert (await evaluator.environment.call("add", {"count": 3})).failed
        assert not (await evaluator.environment.call("add", {"count": 3})).failed
        graded = await judge(evaluator, make_context(EvaluatorSpec(name="nemo_gym"), []), 60)
        assert graded.reward == 1.0
        server.dropped = "/verify"
        graded = await judge(evaluator, make_context(EvaluatorSpec(name="nemo_gym"), []), 60)
        assert (graded.reward, "hung up without an answer" in graded.detail) == (0.0, True)
    finally:
        await evaluator.environment.close()


async def test_a_tools_failure_is_told_to_the_agent(server: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = NemoGym(NemoGymOptions(url=server.url, row=row(6))).environment
    await environment.open()
    try:
        refused = await environment.call("add", {"count": "many"})
        assert (refused.failed, "an integer is needed" in refused.text) == (True, True)
        monkeypatch.setattr("polar_gym.evaluators.resources_server.MAX_TOOL_BYTES", 10)
        assert "answered with more than 10 bytes" in (await environment.call("total", {})).text
        assert "the arguments have more than 10 bytes" in (await environment.call("add", {"count": 3})).text
        server.slow, environment._tool_seconds = "/total", 0.2
        assert "no answer within 0.2 seconds" in (await environment.call("total", {})).text
        assert not environment.away
    finally:
        await environment.close()


async def test_arguments_count_to_what_is_kept_of_tools(server: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short answers to long arguments filled the gateway's memory."""
    monkeypatch.setattr("polar_gym.evaluators.resources_server.KEPT_BYTES", 2000)
    environment = NemoGym(NemoGymOptions(url=server.url, row=row(6))).environment
    await environment.open()
    try:
        told = [await environment.call("add", {"count": 1, "note": "x" * 900}) for _ in range(5)]
        assert [answer.failed for answer in told] == [False] * 3 + [True] * 2
        assert "have had 2000 bytes" in told[-1].text
        assert len(environment._said) == 3
    finally:
        await environment.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "ftp://host"}, "expected an http or https URL"),
        ({"url": "http://a:b@host"}, "without a password"),
        ({"row": {"input": "x"}}, "responses_create_params is missing"),
        ({"row": {"responses_create_params": {"tools": [{"type": "function", "name": "verify"}]}}}, "its route"),
        ({"row": {"responses_create_params": {"tools": [{"type": "function", "name": "a/b"}]}}}, "its route"),
        ({"row": {"responses_create_params": {"tools": [{"type": "web_search"}]}}}, "its route"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        NemoGymOptions.model_validate({"url": "http://127.0.0.1:1", **options})


def test_a_row_is_needed_and_a_composite_has_one_environment() -> None:
    own = {"name": "nemo_gym", "url": "http://127.0.0.1:1"}
    with pytest.raises(ConfigError, match="nemo_gym grades rows in NeMo Gym's form"):
        EVALUATORS.make(EvaluatorSpec.model_validate(own))
    parts = {"a": {**own, "row": row(6)}, "done": {"name": "session_completion"}}
    composite = EVALUATORS.make(EvaluatorSpec.model_validate({"name": "composite", "components": parts}))
    assert composite.environment.tools[0]["name"] == "add"  # type: ignore[attr-defined]
    twice = {**parts, "b": parts["a"]}
    with pytest.raises(ConfigError, match="2 of them bring an environment"):
        EVALUATORS.make(EvaluatorSpec.model_validate({"name": "composite", "components": twice}))
