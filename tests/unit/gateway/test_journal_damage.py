"""A journal stays readable whatever happens while it is written; what is wrong with one is named, also to `verify`."""

from __future__ import annotations

import asyncio
import io
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from polar_gym.builders import BUILDERS, build_trajectory
from polar_gym.builders.trace import verify_trace
from polar_gym.episodes.ablation import recorded_sessions
from polar_gym.episodes.reading import read_calls
from polar_gym.episodes.report import print_verification
from polar_gym.episodes.verify import Verification, verify
from polar_gym.errors import ConfigError
from polar_gym.gateway.proxy.journal import Journal, JournalError, read_journal
from polar_gym.gateway.session.building import build
from polar_gym.schema import BuilderSpec, Episode, Failure, ModelCall, Status
from tests.support import call_trees
from tests.support.calls import make_call
from tests.support.episodes import make_episode


def test_a_write_that_fails_leaves_no_half_line(tmp_path: Path) -> None:
    """Guards against a full disk that damages what comes after it: the next call would go on in the same line."""
    journal = Journal(tmp_path / "s.jsonl")
    journal.append(make_call(0, [1], [2]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.path.stat().st_size + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            journal.append(make_call(1, [1], [2]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.append(make_call(2, [1], [2]))
    journal.close()
    assert [call.call_id for call in read_journal(journal.path)] == ["call0", "call2"]


def test_a_closed_journal_takes_no_more_calls(tmp_path: Path) -> None:
    """Guards against writing to a descriptor that by now belongs to another file."""
    journal = Journal(tmp_path / "s.jsonl")
    journal.append(make_call(0, [1], [2]))
    journal.close()
    with pytest.raises(ValueError, match="closed"):
        journal.append(make_call(1, [1], [2]))


@pytest.mark.parametrize("line", ["5", "[]", '{"amend": "nobody", "outcome": "abandoned"}', '{"messages": 1}'])
def test_a_line_that_is_no_call_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(JournalError, match=r"s\.jsonl:1: "):
        read_journal(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"amend": "call0", "response_ids": [6, 7], "logprobs": [-1.0]}',
        '{"amend": "call0", "response_ids": ["a"], "logprobs": [-1.0]}',
        '{"amend": "call0", "response_ids": [4294967296], "logprobs": [-1.0]}',
        '{"amend": "call0", "response_ids": [6], "logprobs": [null]}',
        '{"amend": "call0", "response_ids": [6], "logprobs": [-1.0], "outcome": "lost"}',
        '{"amend": "call0", "response_ids": [6]}',
    ],
)
def test_damage_in_an_answer_is_named_and_the_tokens_before_it_are_kept(tmp_path: Path, line: str) -> None:
    """Guards against tokens that are lost, or noticed at the file's end only, because their lines are joined late."""
    journal = Journal(tmp_path / "s.jsonl")
    journal.append(make_call(0, [1], [2]))
    for token in (3, 4, 5):
        journal.amend("call0", response_ids=[token], logprobs=[-float(token)])
    journal.close()
    whole = journal.path.read_text()
    journal.path.write_text(whole + line + "\n" + '{"amend": "call0", "outcome": "abandoned"}\n')
    with pytest.raises(JournalError, match=r"s\.jsonl:5: ") as damage:
        read_journal(journal.path)
    (call,) = damage.value.calls
    assert (call.response_ids.tolist(), call.logprobs.tolist()) == ([2, 3, 4, 5], [-1.0, -3.0, -4.0, -5.0])
    journal.path.write_text(whole + line)
    assert read_journal(journal.path)[0].response_ids.tolist() == [2, 3, 4, 5], "a torn last line"


def test_a_trace_of_a_call_without_a_record_fails_the_exact_test() -> None:
    """Guards against a traceback where the journal's last line was torn."""
    calls = [make_call(0, [1], [2]), make_call(1, [1, 2, 3], [4])]
    (trace,) = build_trajectory(calls, BuilderSpec(name="prefix_merging")).traces
    with pytest.raises(ValueError, match="there is no record of call call1"):
        verify_trace(trace, calls[:1])


class ShortSighted:
    """Scores the first four ids."""

    async def score(self, ids: np.ndarray) -> np.ndarray:
        return np.full(min(4, len(ids)), -1.0, np.float32)


class WithoutNumbers:
    """Scores what its weights have overflowed for."""

    async def score(self, ids: np.ndarray) -> np.ndarray:
        return np.full(len(ids), np.nan, np.float32)


NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
NEUTRAL |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}


def recorded(directory: Path, calls: list[ModelCall]) -> Episode:
    journal = Journal(directory / "s.jsonl")
    for call in calls:
        journal.append(call)
    journal.close()
    episode = make_episode("s", 1.0, calls)
    episode.artifacts.journal = str(journal.path)
    return episode


def printed(result: Verification) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_verification(result, 1e-4, console)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


async def test_what_the_engine_has_no_room_for_is_not_compared_and_counted(tmp_path: Path) -> None:
    """Guards against comparing a span with the wrong end of another when the trace is longer than the context, and
    against leaving tokens out without a word."""
    calls = [
        make_call(0, [1, 2, 3], [4, 5], sampling=NEUTRAL),
        make_call(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9, 10], sampling=NEUTRAL),
    ]
    result = await verify([recorded(tmp_path, calls)], ShortSighted())  # pyright: ignore[reportArgumentType]
    assert result.broken == []
    assert np.concatenate(result.compared["free"]).tolist() == [0.0]
    assert "not compared: 8 tokens" in printed(result)


async def test_a_logprob_that_is_no_number_is_beyond_every_bound(tmp_path: Path) -> None:
    """Guards against `nan > bound`, which is false."""
    episode = recorded(tmp_path, [make_call(0, [1, 2, 3], [4, 5], sampling=NEUTRAL)])
    result = await verify([episode], WithoutNumbers())  # pyright: ignore[reportArgumentType]
    assert "2 beyond 0.0001" in printed(result)


def forked() -> list[ModelCall]:
    """Two answers that both continue the first one: two traces, which share its span."""
    return [make_call(0, [1], [2, 3]), make_call(1, [1, 2, 3, 4], [5]), make_call(2, [1, 2, 3, 6], [7])]


async def test_verify_finds_a_call_that_two_traces_of_its_session_train(tmp_path: Path) -> None:
    """Guards against a token that is trained twice and passes, because each trace by itself is what the model saw."""
    episode = recorded(tmp_path, forked())
    assert (await verify([episode], None)).broken == []
    (again,) = (trace for trace in episode.trajectory.traces if not trace.loss_mask[0])
    again.loss_mask[:2], again.logprobs[:2] = 1, -1.0
    result = await verify([episode], None)
    assert result.broken == ["session s: call call0: the traces train 4 tokens of it, and 2 are due"]
    assert "exact: 2 of 2 traces" in printed(result)


async def test_verify_finds_a_trace_that_is_missing(tmp_path: Path) -> None:
    """Guards against sampled tokens that are lost in silence: the traces that are left are what the model saw."""
    episode = recorded(tmp_path, [*forked(), make_call(3, [8], [9])])
    del episode.trajectory.traces[-1]
    assert (await verify([episode], None)).broken == [
        "session s: call call3: the traces train 0 tokens of it, and 1 are due"
    ]
    episode.trajectory.traces.clear()
    assert len((await verify([episode], None)).broken) == 4


async def test_verify_finds_a_trained_call_that_is_excluded(tmp_path: Path) -> None:
    """Guards against training on a call under a grammar where the episode's builder settings leave it out."""
    episode = recorded(tmp_path, [make_call(0, [1], [2], sampling_mismatch=["a grammar"])])
    trained = BuilderSpec(name="prefix_merging", train_on_sampling_mismatch=True)
    episode.trajectory = build_trajectory(read_calls(episode), trained)
    said = "session s: call call0: the traces train 1 tokens of it, and 0 are due (excluded: sampling_mismatch)"
    assert (await verify([episode], None)).broken == [said]
    episode.request.builder = trained
    assert (await verify([episode], None)).broken == []


@pytest.mark.parametrize("builder", BUILDERS.names())
@settings(max_examples=60)
@given(calls=call_trees.sessions(), rejected=st.booleans(), kinds=st.sampled_from([["main"], ["main", "subagent"], []]))
def test_verify_passes_what_a_builder_made(
    builder: str, calls: list[ModelCall], rejected: bool, kinds: list[Any]
) -> None:
    """Guards against faults in lawful episodes: excluded calls, empty answers, forks, builders that merge nothing."""
    spec = BuilderSpec(name=builder, train_rejected=rejected, train_kinds=kinds)
    with tempfile.TemporaryDirectory() as directory:
        episode = recorded(Path(directory), calls)
        episode.request.builder, episode.trajectory = spec, build_trajectory(calls, spec)
        assert asyncio.run(verify([episode], None)).broken == []


async def test_verify_passes_an_episode_whose_builder_failed(tmp_path: Path) -> None:
    """Guards against tokens that count as lost, where the session's failure says why there are no traces."""
    episode = recorded(tmp_path, forked())
    episode.trajectory, problem = await build(forked(), BuilderSpec(name="no_such_builder"))
    episode.session.failure = Failure(stage=Status.BUILDING, kind="gateway_error", message=str(problem))
    assert (await verify([episode], None)).broken == []


@pytest.mark.parametrize("reader", [recorded_sessions, None])
async def test_a_damaged_journal_is_named_by_what_reads_episodes(tmp_path: Path, reader: Any) -> None:
    """Guards against a traceback."""
    episode = recorded(tmp_path, [make_call(0, [1, 2, 3], [4, 5])])
    Path(str(episode.artifacts.journal)).write_text("5\n")
    file = tmp_path / "episodes.jsonl"
    file.write_bytes(episode.to_json() + b"\n")
    with pytest.raises(ConfigError, match=r"s\.jsonl:1: expected a JSON object, got int"):
        await verify([episode], None) if reader is None else reader([file])
