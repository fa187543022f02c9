"""Sessions that start from a record, with the test as the harness."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from polar_gym.builders import build_trajectory
from polar_gym.chat import Completion
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.proxy.capture import SessionCapture
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.gateway.session.branching import branch_of
from polar_gym.gateway.session.starting import JOURNAL, RecordError, check_vocabulary, read_recording
from polar_gym.harnesses import HARNESSES
from polar_gym.providers import routes
from polar_gym.schema import BuilderSpec, HarnessSpec, ModelCall, RuntimeSpec, StartFrom, TaskRequest, Workspace
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import INFO, REQUEST, asking, listing_engine, node, played, task
from tests.support.tools import ASK, BASH


async def ask(node: Node, capture: SessionCapture, messages: list[Any], stream: bool = False) -> dict[str, Any]:
    """Return the assistant message of one call."""
    headers = {"Authorization": f"Bearer {capture.key}"}
    body = {"model": "policy", "messages": messages, "tools": [BASH], "stream": stream}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{node.url}/v1/chat/completions", json=body, headers=headers) as said,
    ):
        text = await said.text()
        assert said.status == 200, text
    if not stream:
        return json.loads(text)["choices"][0]["message"]
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(d.get("content") or "" for d in deltas) or None}
    if calls:
        joined = "".join(call["function"].get("arguments") or "" for call in calls)
        function = {"name": calls[0]["function"]["name"], "arguments": joined}
        message["tool_calls"] = [{"id": calls[0]["id"], "type": "function", "function": function}]
    return message


async def work(node: Node, capture: SessionCapture, turns: int, took: str, stream: bool = False) -> list[str]:
    """Play the harness for some turns; return the ids of the tool calls that it got."""
    messages, ids = list(ASK), []
    for _ in range(turns):
        message = await ask(node, capture, messages, stream)
        messages.append(message)
        for call in message.get("tool_calls") or []:
            ids.append(call["id"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"Ran 3 tests in {took}s"})
    return ids


async def session(
    tmp_path: Path, request: TaskRequest, turns: int, took: str, **options: Any
) -> tuple[list[ModelCall], list[str], Path]:
    """Run a session, and return its calls, the ids that its harness got, and its directory."""
    stream = options.pop("stream", False)
    return await played(tmp_path, request, lambda node, own: work(node, own, turns, took, stream), **options)


def starting(directory: Path, **fields: Any) -> TaskRequest:
    return REQUEST.model_copy(update={"start_from": StartFrom(record=str(directory), **fields)})


@pytest.mark.parametrize("streaming", ["synthetic", "real"])
@pytest.mark.parametrize("stream", [False, True])
async def test_recorded_calls_are_answered_with_the_same_ids(tmp_path: Path, stream: bool, streaming: Any) -> None:
    first, ids, directory = await session(tmp_path, REQUEST, 2, "0.006")
    calls, again, _ = await session(
        tmp_path, starting(directory, owned=True), 3, "0.021", stream=stream, streaming=streaming
    )
    assert again[:2] == ids
    assert [call.call_id for call in calls[:2]] == [call.call_id for call in first]
    for call, recorded in zip(calls[:2], first, strict=True):
        assert np.array_equal(call.prompt_ids, recorded.prompt_ids)
        assert np.array_equal(call.response_ids, recorded.response_ids)
        assert np.array_equal(call.logprobs, recorded.logprobs)
        assert call.weight_versions == recorded.weight_versions
    (difference,) = calls[1].replayed.differences  # type: ignore[union-attr]
    assert difference.only_volatile
    live = calls[2]
    assert live.replayed is None
    assert live.continuation == "spliced"
    seen = np.concatenate([first[1].prompt_ids, first[1].response_ids])
    assert np.array_equal(live.prompt_ids[: len(seen)], seen), "the policy goes on from the ids that were recorded"
    fidelity = build_trajectory(calls, BuilderSpec(name="prefix_merging")).fidelity
    assert fidelity.trainable_tokens == fidelity.sampled_tokens, "a resumed session trains its own tokens"


OLD, NEW = "01a20fa4-0000-7000-8000-000000000001", "01a20fa5-0000-7000-8000-000000000002"
"""Codex's names of a sub-agent, in the recorded run and in the new one."""


async def delegating(
    tmp_path: Path, request: TaskRequest, agent: str, told_in: int, turns: int, **streaming: Any
) -> tuple[list[ModelCall], str, list[str], Path]:
    """Run a session that calls in a sub-agent, and hears of its end in request `told_in`. Return its calls, the last
    prompt, what the harness was told to run, and the session's directory."""
    script = Script(commands=["spawn", f"wait {OLD}", f"ask {OLD}", f"close {OLD}"], final_message=f"{OLD} is done.")
    ended = f'{{"agent_path":"{agent}","status":{{"completed":"Done."}}}}'
    told = f"<subagent_notification>\n{ended}\n</subagent_notification>"
    messages, commands = list(ASK), []
    node = Node(
        EmbeddedEngine(EmbeddedOptions(scripts=[script])), cache=tmp_path, state=tmp_path / "state", **streaming
    )
    async with node, node.session(request) as life:
        await node.note(life)
        recording = await asyncio.to_thread(read_recording, request, HARNESSES.get("codex"), INFO)
        if recording is not None:
            life.capture.start_from(recording)
        life.capture.running = True
        for turn in range(turns):
            message = await ask(node, life.capture, messages, stream=True)
            (call,) = message["tool_calls"]
            commands.append(json.loads(call["function"]["arguments"])["command"])
            result = f'{{"agent_id":"{agent}","nickname":"Ohm"}}' if turn == 0 else f"{agent} runs"
            messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]
            if turn + 1 == told_in:
                messages.append({"role": "user", "content": told})
        await life.capture.end()
        calls, directory = life.capture.calls, life.capture.journal.path.parent
        return calls, await node.engine.decode(calls[-1].prompt_ids.tolist()), commands, directory


@pytest.mark.parametrize("streaming", ["synthetic", "real"])
@pytest.mark.parametrize(("recorded", "told_in"), [(3, 3), (3, 2), (3, 1), (2, 1), (2, 2)])
async def test_a_sub_agent_has_another_name_and_ends_at_another_time(
    tmp_path: Path, recorded: int, told_in: int, streaming: Any
) -> None:
    """Guards against a policy that waits for the sub-agent of another run, and against a session that diverges because
    Codex tells of the end of a sub-agent in another request than it did in the record."""
    codex = REQUEST.model_copy(update={"agent": HarnessSpec(name="codex")})
    first, _, _, directory = await delegating(tmp_path, codex, OLD, 2, 3)
    start = {"start_from": StartFrom(record=str(directory), calls=recorded)}
    branch = codex.model_copy(update=start)
    calls, prompt, commands, _ = await delegating(tmp_path, branch, NEW, told_in, 4, streaming=streaming)
    assert commands == ["spawn", f"wait {NEW}", f"ask {NEW}", f"close {NEW}"], "the harness knows its own names"
    assert [call.replayed is not None for call in calls] == [True] * recorded + [False] * (4 - recorded)
    seen = np.concatenate([first[recorded - 1].prompt_ids, first[recorded - 1].response_ids])
    assert np.array_equal(calls[recorded].prompt_ids[: len(seen)], seen)
    assert NEW not in prompt, "the policy knows the recorded ones"
    assert prompt.count("<subagent_notification>") == 1
    counted = sum((Counter(call.replayed.volatile) for call in calls if call.replayed), Counter())
    assert counted["agent"] == 1
    assert counted["notice"] == sum((turn >= 2) != (told_in <= turn) for turn in range(recorded))


async def test_a_recorded_answer_ends_with_the_same_stop_sequence(tmp_path: Path) -> None:
    """Guards against a harness that takes an answer which its stop sequence ended for one that ended by itself."""
    request = REQUEST.model_copy(update={"agent": HarnessSpec(name="claude_code")})

    async def ends(node: Node, capture: SessionCapture) -> tuple[str, str | None]:
        body = {"model": "m", "max_tokens": 99, "messages": ASK, "stop_sequences": ["END"]}
        headers = {"x-api-key": capture.key}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{node.url}/v1/messages", json=body, headers=headers) as said,
        ):
            answer = await said.json()
        return answer["stop_reason"], answer["stop_sequence"]

    def engine() -> EmbeddedEngine:
        return EmbeddedEngine(EmbeddedOptions(scripts=[Script(final_message="One END two")]))

    _, first, directory = await played(tmp_path, request, ends, engine())
    started = request.model_copy(update={"start_from": StartFrom(record=str(directory), owned=True)})
    (call,), again, _ = await played(tmp_path, started, ends, engine())
    assert call.replayed is not None
    assert first == again == ("stop_sequence", "END")


async def test_a_branch_masks_the_shared_prefix(tmp_path: Path) -> None:
    first, _, directory = await session(tmp_path, REQUEST, 3, "0.006")
    calls, _, _ = await session(tmp_path, starting(directory, calls=2), 3, "0.021")
    (trace,) = build_trajectory(calls, BuilderSpec(name="prefix_merging")).traces
    assert trace.branched_from == first[0].session_id
    assert trace.shared_prefix == len(first[1].prompt_ids) + len(first[1].response_ids)
    assert trace.trainable_tokens == len(calls[2].response_ids)
    assert not trace.loss_mask[: trace.shared_prefix - len(trace.prompt_ids)].any()


class CachingEngine(EmbeddedEngine):
    """Tells of cached tokens, as vLLM does."""

    async def chat(self, *asked: Any, **fields: Any) -> Completion:
        return replace(await super().chat(*asked, **fields), cached_tokens=16)


async def test_what_was_cached_for_an_answer_is_told_by_the_session_that_sampled_it(tmp_path: Path) -> None:
    """Guards against tokens of a prefix cache that count once for an episode, and again for each of its branches."""

    def engine() -> CachingEngine:
        return CachingEngine(EmbeddedOptions(scripts=[Script(commands=["ls", "pwd"])]))

    _, _, directory = await session(tmp_path, REQUEST, 2, "0.006", engine=engine())
    for owned, cached in ((False, None), (True, 16)):
        calls, _, _ = await session(tmp_path, starting(directory, owned=owned), 3, "0.006", engine=engine())
        assert [call.cached_tokens for call in calls] == [cached, cached, 16]


async def test_a_task_with_packages_can_be_branched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a session that notes the variables of its virtual environment as a part of its request."""
    need_bubblewrap()
    program = tmp_path / "venv" / "bin" / "of-the-venv"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setattr("polar_gym.gateway.session.preparation.ensure_venv", lambda *_: tmp_path / "venv")
    runtime = RuntimeSpec(name="bubblewrap", workspace=Workspace(python_requirements=["six==1.17.0"]))
    async with node(tmp_path) as local:
        first = await local.rollout(task(agent=asking("ask(); os.system('of-the-venv')"), runtime=runtime))
        branch = await local.rollout(branch_of(first, 1))
    for episode in (first, branch):
        assert (episode.session.failure, episode.artifacts.stdout) == (None, "found\n")
    assert first.request.runtime == runtime


async def test_a_record_that_the_harness_leaves_early_stays_in_the_books(tmp_path: Path) -> None:
    first, _, directory = await session(tmp_path, REQUEST, 3, "0.006")
    calls, _, _ = await session(tmp_path, starting(directory, owned=True), 1, "0.006")
    fidelity = build_trajectory(calls, BuilderSpec(name="prefix_merging")).fidelity
    assert fidelity.sampled_tokens == sum(len(call.response_ids) for call in first)
    assert fidelity.excluded == {"abandoned": sum(len(call.response_ids) for call in first[1:])}


async def test_a_recorded_answer_that_never_left_is_abandoned(tmp_path: Path) -> None:
    """Guards against training on an answer that the harness never had: the sending failed before its first event."""
    _, _, directory = await session(tmp_path, REQUEST, 1, "0.006")

    def fail(*_: Any) -> Any:
        raise RecursionError

    async def unsent(local: Node, capture: SessionCapture) -> None:
        local.proxy._routes = routes([replace(each, stream=fail) for each in local.proxy.providers])
        with pytest.raises(AssertionError, match="the gateway failed"):
            await ask(local, capture, list(ASK), stream=True)

    calls, _, cut = await played(tmp_path, starting(directory, owned=True), unsent)
    assert [call.outcome for call in calls] == ["abandoned"]
    assert [call.outcome for call in read_journal(cut / JOURNAL)] == ["abandoned"]


async def test_a_replay_that_is_cut_off_keeps_its_record_for_the_next_attempt(tmp_path: Path) -> None:
    first, _, directory = await session(tmp_path, REQUEST, 3, "0.006")
    _, _, cut = await session(tmp_path, starting(directory, owned=True), 1, "0.006")
    calls, _, _ = await session(tmp_path, starting(cut, owned=True), 3, "0.006")
    assert [call.call_id for call in calls] == [call.call_id for call in first]
    assert all(call.replayed is not None and call.outcome == "delivered" for call in calls)


async def test_a_branch_counts_the_calls_that_the_episode_of_its_record_names(tmp_path: Path) -> None:
    """Guards against branches of a resumed session that stand at another state than `turn_values` takes them for: they
    also had the recorded calls that the session had not asked for again."""

    async def titled(local: Node, own: SessionCapture) -> None:
        await ask(local, own, [{"role": "user", "content": "Write a title."}])
        await work(local, own, 2, "0.006")

    _, _, directory = await played(tmp_path, REQUEST, titled)
    own, _, resumed = await session(tmp_path, starting(directory, owned=True), 3, "0.006")
    delivered = build_trajectory(own, BuilderSpec(name="prefix_merging")).delivered
    assert delivered == [call.call_id for call in own if call.index > 0], "the title was not asked for again"
    for calls in (1, 2, 3, None):
        recording = read_recording(starting(resumed, calls=calls), HARNESSES.get("pi"), INFO)
        assert recording is not None
        assert list(recording.waiting) == delivered[:calls]
    branch, _, _ = await played(tmp_path, starting(resumed, calls=2), titled)
    assert [call.call_id for call in branch if call.replayed] == delivered[:2]
    assert len(branch) == 3, "the title is sampled anew"


async def test_the_agents_time_is_its_own_and_not_that_of_the_replay(tmp_path: Path) -> None:
    need_bubblewrap()
    slow = task(agent=asking("import time; ask(); time.sleep(1); ask(); time.sleep(3600)"), timeout_seconds=4)
    async with node(tmp_path) as local:
        first = await local.rollout(slow)
        assert first.artifacts.journal is not None
        directory = Path(first.artifacts.journal).parent
        requests = [
            slow.model_copy(update={"start_from": StartFrom(record=str(directory), owned=owned)})
            for owned in (True, False)
        ]
        recording = read_recording(requests[0], HARNESSES.get("command"), INFO)
        assert recording is not None
        assert recording.seconds > 0
        resumed, branch = await asyncio.gather(*map(local.rollout, requests))
    for episode, used in ((resumed, recording.seconds), (branch, 0.0)):
        timing = episode.session.timing
        assert episode.session.truncated_by == "time"
        assert timing.running is not None
        assert timing.replay is not None
        assert timing.running >= timing.replay + 4 - used


async def test_a_pause_takes_nothing_of_a_resumed_agents_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the span of the record as the time that the agent used: an update of the weights used it up."""
    need_bubblewrap()
    loop, ahead = asyncio.get_running_loop(), [0.0]
    loop_time, unix_time = loop.time, time.time
    monkeypatch.setattr(loop, "time", lambda: loop_time() + ahead[0])
    monkeypatch.setattr(time, "time", lambda: unix_time() + ahead[0])
    request = task(agent=asking("ask(); ask(n=1)"), timeout_seconds=3600)
    async with node(tmp_path) as local:
        gate = local.proxy.generation
        gate.pause()
        async with local.session(request) as life:
            await local.note(life)
            conducting = asyncio.create_task(local.conduct(life))
            while not life.capture.admitted:  # noqa: ASYNC110 - the request comes in its own time
                await asyncio.sleep(0.01)
            ahead[0] = 2 * 3600.0
            gate.resume()
            first = await conducting
        journal = Path(str(first.artifacts.journal))
        lines = journal.read_bytes().splitlines(keepends=True)
        second = next(at for at, line in enumerate(lines) if b'"index":1' in line)
        journal.write_bytes(b"".join(lines[:second]))  # as if its node had died after the first call
        resumed = await local.rollout(_goes_on(request, journal))
        assert resumed.session.truncated_by is None
    used = [_seconds(request, each) for each in (journal, Path(str(resumed.artifacts.journal)))]
    assert 0 < used[0] < used[1] < 3600


def _goes_on(request: TaskRequest, journal: Path) -> TaskRequest:
    return request.model_copy(update={"start_from": StartFrom(record=str(journal.parent), owned=True)})


def _seconds(request: TaskRequest, journal: Path) -> float:
    recording = read_recording(_goes_on(request, journal), HARNESSES.get("command"), INFO)
    assert recording is not None
    return recording.seconds


async def test_a_resumed_session_is_as_old_as_its_first_token(tmp_path: Path) -> None:
    """Guards against tokens of old weights that count as fresh, because a resumed session trains them."""
    need_bubblewrap()
    request = task()
    async with node(tmp_path) as local:
        local.set_weight_version("1")
        first = await local.rollout(request)
        assert first.artifacts.journal is not None
        local.set_weight_version("7")
        record = str(Path(first.artifacts.journal).parent)
        starts = [StartFrom(record=record, owned=owned) for owned in (True, False)]
        again = [await local.rollout(request.model_copy(update={"start_from": start})) for start in starts]
    assert [episode.session.weight_version for episode in (first, *again)] == ["1", "1", "7"]


async def test_a_request_that_differs_ends_the_session(tmp_path: Path) -> None:
    _, _, directory = await session(tmp_path, REQUEST, 2, "0.006")
    node = Node(listing_engine(), cache=tmp_path / "cache", state=tmp_path / "state")
    request = starting(directory, owned=True)
    async with node, node.session(request) as life:
        recording = await asyncio.to_thread(read_recording, request, HARNESSES.get("pi"), INFO)
        assert recording is not None
        life.capture.start_from(recording)
        life.capture.running = True
        with pytest.raises(AssertionError, match="the text of message"):
            await ask(node, life.capture, [{"role": "user", "content": "another task"}])
        with pytest.raises(Exception, match="the text of message"):
            life.capture.exhausted.result()


REFUSED = [
    (lambda d: (d / "calls.jsonl").write_text("{}\n" * 2), "calls.jsonl:1"),
    (lambda d: (d / "manifest.json").unlink(), "manifest.json"),
    (lambda d: _edit(d, lambda m: m.update(harness_version="0.0.1")), r"(pi|command) 0\.0\.1"),
    (lambda d: _edit(d, lambda m: m["request"].update(instruction="other")), "another instruction"),
]
"""What may have become of a record: a damaged journal, a lost file, a harness update, a task that changed."""


@pytest.mark.parametrize(("damage", "named"), REFUSED)
async def test_a_session_with_a_record_that_does_not_fit_ends_before_its_harness_starts(
    tmp_path: Path, damage: Any, named: str
) -> None:
    need_bubblewrap()
    async with node(tmp_path) as local:
        first = await local.rollout(task())
        directory = Path(first.artifacts.journal or "").parent
        damage(directory)
        ended = await local.rollout(
            task().model_copy(update={"start_from": StartFrom(record=str(directory), owned=True)})
        )
    assert ended.session.failure is not None
    assert ended.session.failure.kind == "diverged"
    assert re.search(named, ended.session.failure.message)
    assert (ended.session.timing.running, ended.trajectory.fidelity.calls) == (None, 0)


@pytest.mark.parametrize(("damage", "named"), REFUSED)
async def test_a_record_that_does_not_fit_is_refused_by_name(tmp_path: Path, damage: Any, named: str) -> None:
    _, _, directory = await session(tmp_path, REQUEST, 1, "0.006")
    damage(directory)
    with pytest.raises(RecordError, match=named):
        read_recording(starting(directory), HARNESSES.get("pi"), INFO)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m["request"]["sampling"].update(temperature=0.5), "another sampling"),
        (lambda m: m["engine"].update(model="other"), "the model other, and this is policy"),
        (lambda m: m["engine"].update(logprobs_mode="raw"), "raw logprobs, and this engine gives processed"),
    ],
)
async def test_a_session_goes_on_only_as_it_was_sampled(tmp_path: Path, change: Any, named: str) -> None:
    """Guards against tokens of another model or temperature that a resumed session trains as its own, and against raw
    logprobs that are called processed, because the server was started with another mode. An attempt that was
    refused does not make the record its own either."""
    need_bubblewrap()
    async with node(tmp_path) as local:
        directory = Path((await local.rollout(task())).artifacts.journal or "").parent
        _edit(directory, change)
        for _ in range(2):
            start = StartFrom(record=str(directory), owned=True)
            refused = await local.rollout(task().model_copy(update={"start_from": start}))
            assert refused.session.failure is not None
            assert refused.session.failure.kind == "diverged"
            assert re.search(named, refused.session.failure.message)
            branch = await local.rollout(task().model_copy(update={"start_from": StartFrom(record=str(directory))}))
            assert branch.session.failure is None, "a branch may sample in another way"
            directory = Path(refused.artifacts.journal or "").parent


class OtherVocabulary(EmbeddedEngine):
    """An engine whose model has other ids for the same text."""

    async def template(self, messages: Any, tools: Any) -> Any:
        return 9999 - await super().template(messages, tools)


async def test_a_branch_has_the_ids_of_its_record(tmp_path: Path) -> None:
    """Guards against a prompt of two vocabularies: the new model would sample after ids that say something else."""
    _, _, directory = await session(tmp_path, REQUEST, 1, "0.006")
    recording = read_recording(starting(directory), HARNESSES.get("pi"), INFO.model_copy(update={"model": "other"}))
    assert recording is not None
    await check_vocabulary(recording, EmbeddedEngine(EmbeddedOptions(model="other")))
    with pytest.raises(RecordError, match=f"the model other has other ids for the first prompt than {INFO.model}"):
        await check_vocabulary(recording, OtherVocabulary(EmbeddedOptions(model="other")))


def _edit(directory: Path, change: Any) -> None:
    file = directory / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))
