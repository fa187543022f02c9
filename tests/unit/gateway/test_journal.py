"""The journal gives back exactly the calls that were captured, and stores a history once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_gym.gateway.proxy.journal import Journal, JournalError, read_journal
from polar_gym.gateway.proxy.shared_prompts import SharedPrompts
from polar_gym.schema import ModelCall
from tests.support.call_trees import parallel_sessions, sessions
from tests.support.calls import make_call

MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=5)}), max_size=4
)


def written(path: Path, calls: list[ModelCall]) -> list[ModelCall]:
    journal = Journal(path)
    for call in calls:
        journal.append(call)
    journal.close()
    return read_journal(path)


@given(
    calls=st.one_of(sessions(), parallel_sessions()),
    histories=st.lists(MESSAGES, min_size=10, max_size=10),
    data=st.data(),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, calls: list[ModelCall], histories: list, data: st.DataObject
) -> None:
    tools = [{"type": "function", "function": {"name": "a"}}, {"type": "function", "function": {"name": "b"}}]
    for call, history in zip(calls, histories, strict=False):
        call.messages = history
        call.tools = tools[: data.draw(st.integers(0, 2))]
    read = written(tmp_path_factory.mktemp("journal") / "s.jsonl", calls)
    assert [orjson.loads(call.to_json()) for call in read] == [orjson.loads(call.to_json()) for call in calls]


def test_a_session_grows_with_its_length_not_with_its_square(tmp_path: Path) -> None:
    """Guards against storing each call's whole history: 4 times the turns may cost 4 times the bytes, not 16."""

    def size(turns: int) -> int:
        history, ids, calls = [], list(range(1000)), []
        for index in range(turns):
            history = [*history, {"role": "user", "content": "x" * 400}]
            calls.append(make_call(index, ids, [index] * 50, messages=history))
            ids = [*ids, *[index] * 50, *range(100)]
        path = tmp_path / f"{turns}.jsonl"
        written(path, calls)
        return path.stat().st_size

    assert size(80) < 4.5 * size(20)


def test_calls_in_memory_share_the_history_that_they_have_in_common(tmp_path: Path) -> None:
    """Guards against a session's memory growing with the square of its length, while it runs or when it is read: each
    request brings all of it anew, and validation copies lists."""
    journal = Journal(tmp_path / "s.jsonl")
    histories = [[{"role": "user", "content": f"{index}" * 3} for index in range(length)] for length in (2, 3)]
    tools = [[{"type": "function", "function": {"name": "a"}}] for _ in histories]
    calls = [
        make_call(index, [1], [2], messages=history, tools=tools[index]) for index, history in enumerate(histories)
    ]
    for call in calls:
        journal.append(call)
    journal.amend("call1", outcome="abandoned")
    for each in (calls, read_journal(tmp_path / "s.jsonl")):
        assert [call.messages for call in each] == histories
        assert all(ours is theirs for ours, theirs in zip(each[0].messages, each[1].messages, strict=False))
        assert all(ours is theirs for ours, theirs in zip(each[0].tools, each[1].tools, strict=True))


def ids_in_memory(calls: list[ModelCall]) -> int:
    """Bytes of the arrays that the calls' prompts are, or are parts of."""
    owners = [call.prompt_ids if call.prompt_ids.base is None else call.prompt_ids.base for call in calls]
    return sum({id(owner): memoryview(owner).nbytes for owner in owners}.values())


def test_prompts_that_go_on_from_each_other_are_in_memory_once(tmp_path: Path) -> None:
    """Guards against a session whose ids take memory with the square of its length, while it runs or when it is read:
    4 times the turns may take 4 times the memory, not 16."""

    def sizes(turns: int) -> tuple[int, int]:
        ids, calls = list(range(1000)), []
        for index in range(turns):
            calls.append(make_call(index, ids, [index] * 50, parent_id=f"call{index - 1}"))
            ids = [*ids, *[index] * 50, *range(100)]
        read = written(tmp_path / f"{turns}.jsonl", calls)
        return ids_in_memory(calls), ids_in_memory(read)

    for short, long in zip(sizes(20), sizes(80), strict=True):
        assert long < 6 * short


@given(st.lists(st.tuples(st.integers(0), st.lists(st.integers(0, 1), max_size=4), st.booleans()), max_size=25))
def test_prompts_that_share_memory_stay_what_they_were(steps: list[tuple[int, list[int], bool]]) -> None:
    """Forks, retries and shorter prompts of one conversation, of which only one may go on in the shared array."""
    shared, prompts = SharedPrompts(), [[0]]
    views = [shared.add(np.array([0], np.int32), None, 0)]
    for number, more, is_shorter in steps:
        base = number % len(prompts)
        kept = prompts[base][:-1] if is_shorter else prompts[base]
        prompts.append([*kept, *more])
        views.append(shared.add(np.array(prompts[-1], np.int32), base, len(kept)))
    assert [view.tolist() for view in views] == prompts


def test_a_torn_last_line_loses_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    written(path, [make_call(0, [1], [2]), make_call(1, [1, 2, 3], [4])])
    path.write_bytes(path.read_bytes()[:-10])
    assert [call.call_id for call in read_journal(path)] == ["call0"]


def test_damage_before_the_last_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    written(path, [make_call(0, [1], [2]), make_call(1, [1, 2, 3], [4])])
    first, second, _ = path.read_bytes().split(b"\n")
    path.write_bytes(first[:-10] + b"\n" + second + b"\n")
    with pytest.raises(JournalError, match=r"s\.jsonl:1: "):
        read_journal(path)


def test_an_amended_call_is_read_as_amended(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    journal = Journal(path)
    journal.append(make_call(0, [1], [2]))
    journal.amend("call0", outcome="abandoned")
    journal.close()
    assert [call.outcome for call in read_journal(path)] == ["abandoned"]


def piecewise(path: Path, tokens: int) -> Path:
    """Write the journal of a call whose answer came in pieces of two tokens, and of one that continues it."""
    journal = Journal(path)
    call = make_call(0, [1], [])
    journal.append(call)
    for start in range(0, tokens, 2):
        journal.amend("call0", response_ids=[start, start + 1], logprobs=[-0.1, -1.0])
    call.response_ids = np.arange(tokens, dtype=np.int32)
    call.logprobs = np.full(tokens, -1.0, np.float32)
    journal.append(call)
    journal.append(make_call(1, [1, *range(tokens), 7], [8], parent_id="call0"))
    journal.close()
    return path


def test_a_line_of_an_answer_costs_the_same_whatever_stands_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against reading an answer in time with the square of its length: each line of sampled tokens made the
    call anew, with all its tokens so far. A call is made for its first line and for its end only."""
    made: list[object] = []
    validate = ModelCall.model_validate

    def counted(values: object) -> ModelCall:
        made.append(values)
        return validate(values)

    monkeypatch.setattr(ModelCall, "model_validate", counted)
    first, second = read_journal(piecewise(tmp_path / "s.jsonl", 400))
    assert len(made) == 3
    assert first.response_ids.tolist() == list(range(400))
    assert first.logprobs.tolist() == np.array([-0.1, -1.0] * 200, np.float32).tolist()
    assert second.prompt_ids.tolist() == [1, *range(400), 7]
