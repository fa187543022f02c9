"""Sub-agents and compactions of real harnesses: every thread of a session is captured, in a trace of its own kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_gym.builders.trace import verify_trace
from polar_gym.conformance.acting import SUMMARY
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.schema import ModelCall, Trace, Trajectory
from tests.e2e.play import make, play
from tests.support.requirements import need_bubblewrap, need_node

HARNESSES = ["claude_code", "codex", "opencode"]


def solved(tmp_path: Path, harness: str, profile: str, engine: str) -> tuple[Trajectory, list[ModelCall]]:
    """The trajectory and the calls of a solved task; what holds for every session is checked."""
    need_node()
    need_bubblewrap()
    env = make(
        tmp_path,
        harness={"name": harness, "profile": profile},
        runtime="bubblewrap",
        engine={"name": f"polar_gym.conformance.acting:{engine}"},
    )
    try:
        reward, terminated, truncated, episode = play(env)
    finally:
        env.close()
    assert (reward, terminated, truncated) == (1.0, True, False), episode.session.failure
    calls = read_journal(Path(str(episode.artifacts.journal)))
    fidelity = episode.trajectory.fidelity
    assert fidelity.calls == len(calls)
    assert fidelity.sampled_tokens == sum(len(call.response_ids) for call in calls)
    assert fidelity.exact
    assert set(fidelity.excluded) <= {"kind:auxiliary"}, "nothing but titles is left out"
    for trace in episode.trajectory.traces:
        verify_trace(trace, calls)
    return episode.trajectory, calls


def of_kind(calls: list[ModelCall], kind: str) -> list[ModelCall]:
    return [call for call in calls if call.kind == kind]


def is_one_chain(trace: Trace, calls: list[ModelCall]) -> bool:
    """Whether `trace` is `calls`: a conversation of its own, every later turn spliced to the one before."""
    root, *later = calls
    assert (root.continuation, root.parent_id) == ("root", None)
    assert [call.continuation for call in later] == ["spliced"] * len(later)
    assert [call.parent_id for call in later] == [call.call_id for call in calls[:-1]]
    trained = trace.trainable_tokens == sum(len(call.response_ids) for call in calls)
    return trained and trace.call_ids == [call.call_id for call in calls]


@pytest.mark.parametrize("harness", HARNESSES)
def test_a_subagent_has_a_trace_of_its_own(harness: str, tmp_path: Path) -> None:
    """The sub-agent solves the task; the thread that called it goes on where it was."""
    trajectory, calls = solved(tmp_path, harness, "default", "Delegating")
    main, subagent = sorted(trajectory.traces, key=lambda trace: trace.kind)
    assert (main.kind, subagent.kind) == ("main", "subagent")
    assert is_one_chain(main, of_kind(calls, "main"))
    assert is_one_chain(subagent, of_kind(calls, "subagent"))
    assert of_kind(calls, "main")[-1].index > of_kind(calls, "subagent")[-1].index, "it did go on"
    assert trajectory.fidelity.breaks == []


@pytest.mark.parametrize("harness", [*HARNESSES, "pi"])
def test_a_compaction_has_a_trace_of_its_own(harness: str, tmp_path: Path) -> None:
    """Guards against a summary that is trained as part of the conversation which it is about, wherever a harness asks
    for it: in a conversation of its own, or at the end of the very one."""
    trajectory, calls = solved(tmp_path, harness, "lean", "Compacting")
    (summary,) = of_kind(calls, "compaction")
    (compaction,) = [trace for trace in trajectory.traces if trace.kind == "compaction"]
    assert compaction.call_ids[-1] == summary.call_id
    assert compaction.trainable_tokens == len(summary.response_ids)
    before, after = [trace for trace in trajectory.traces if trace.kind == "main"]
    refused = [call.call_id for call in calls if call.error_kind == "context_length"]  # Pi compacts after such an error
    answered = [call for call in of_kind(calls, "main") if call.call_id not in refused]
    assert len(refused) == (harness == "pi")
    assert is_one_chain(before, [call for call in answered if call.index < summary.index])
    assert is_one_chain(after, [call for call in answered if call.index > summary.index])
    assert len(before.call_ids) > 2
    assert (SUMMARY in str(before.messages), SUMMARY in str(after.messages)) == (False, True)
