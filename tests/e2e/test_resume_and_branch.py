"""Runs that are killed and go on, and branches of their episodes, with real harnesses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from polar_gym.episodes.reading import read_calls, read_episodes
from polar_gym.episodes.verify import verify
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.harnesses import HARNESSES
from polar_gym.schema import Episode
from tests.e2e.play import make, play
from tests.support.requirements import need_bubblewrap, need_node
from tests.wire.harness_probe import installed

SETTINGS = ["tasks.limit=1", "runtime=bubblewrap"]


def command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("polar-gym")), *arguments]


def run(*arguments: str) -> None:
    ended = subprocess.run(command(*arguments), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def kill_after(calls: int, output: Path, *settings: str) -> None:
    """Begin a run, and kill it when the journal of its session has so many delivered calls."""
    slow = [*settings, "engine.delay_seconds=2"]
    rollout = subprocess.Popen(command("rollout", *slow, f"rollout.output={output}"), stdout=subprocess.DEVNULL)
    delivered = 0
    while delivered < calls:
        assert rollout.poll() is None, "the run ended before it was killed"
        journals = list(output.with_suffix(".state").glob("*/sessions/*/calls.jsonl"))
        delivered = sum(call.outcome == "delivered" for path in journals for call in read_journal(path))
        time.sleep(0.05)  # a file of another process has no event to wait for
    os.kill(rollout.pid, signal.SIGKILL)
    rollout.wait()


def checked(*episodes: Episode) -> None:
    verification = asyncio.run(verify(episodes, None))
    assert not verification.broken


@pytest.mark.parametrize("harness", ["pi", "codex", "mini_swe_agent"])
def test_a_killed_run_goes_on_and_each_turn_can_be_branched(harness: str, tmp_path: Path) -> None:
    """Guards, with an agent that a command ends, against branches whose scripts are those of another harness."""
    need_node()
    need_bubblewrap()
    installed(HARNESSES.get(harness))
    output, branches = tmp_path / "run.jsonl", tmp_path / "branches.jsonl"
    settings = [f"harness={harness}", *SETTINGS]
    kill_after(2, output, *settings)
    (journal,) = (tmp_path / "run.state").glob("1/sessions/*/calls.jsonl")
    before = [call for call in read_journal(journal) if call.outcome == "delivered"]
    run("rollout", *settings, "--resume", str(output))
    (resumed,) = read_episodes(output)
    calls = {call.call_id: call for call in read_calls(resumed)}
    assert all(calls[call.call_id].replayed is not None for call in before), "no token is sampled twice"
    assert resumed.reward == 1.0
    assert resumed.session.attempt == 1
    run("rollout", *settings, "--resume", str(output))
    assert len(list(read_episodes(output))) == 1, "a run that has ended has nothing to go on with"
    branch = ["branch", str(output), "tasks.limit=1", f"rollout.output={branches}"]
    run(*branch, "--at", "before-last-edit", "--samples", "2")
    branched = list(read_episodes(branches))
    assert [episode.reward for episode in branched] == [1.0, 1.0]
    lengths = {len(read_calls(episode)) for episode in branched}
    assert lengths == {len(calls)}, "the policy ends them as it ended the episode"
    assert all(
        trace.branched_from == resumed.session.session_id for each in branched for trace in each.trajectory.traces
    )
    checked(resumed, *branched)


@pytest.mark.parametrize("damage", ["harness update", "journal", "task"])
def test_a_run_whose_record_cannot_be_used_begins_its_samples_again(damage: str, tmp_path: Path) -> None:
    need_node()
    need_bubblewrap()
    output, settings = tmp_path / "run.jsonl", ["harness=pi", *SETTINGS]
    kill_after(1, output, *settings)
    (directory,) = (tmp_path / "run.state" / "1" / "sessions").iterdir()
    manifest = json.loads((directory / "manifest.json").read_text())
    if damage == "harness update":
        manifest["harness_version"] = "0.0.1"
    elif damage == "task":
        manifest["request"]["instruction"] = "It was another one."
    else:
        (directory / "calls.jsonl").write_text("{}\n{}\n")
    (directory / "manifest.json").write_text(json.dumps(manifest))
    subprocess.run(command("rollout", *settings, "--resume", str(output)), check=False)
    *refused, again = read_episodes(output)
    assert [episode.session.failure.kind for episode in refused if episode.session.failure] == ["diverged"]
    assert again.reward == 1.0
    assert all(call.replayed is None for call in read_calls(again))
    checked(*refused, again)


def test_the_date_may_change_and_a_tool_may_fail_where_it_did_not(tmp_path: Path) -> None:
    """The policy goes on from what it saw: the first date, and what the tool said the first time."""
    need_node()
    need_bubblewrap()
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "there.txt").write_text("It is there.")
    engine = {"scripts": [{"commands": ["cat there.txt", "ls"], "final_message": "Done."}]}
    harness, rollout = {"name": "pi", "today": date(2026, 1, 5)}, {"state": str(tmp_path / "state")}
    with contextlib.closing(
        gym.make(
            "polar/task",
            instruction="Look.",
            workspace=workspace,
            harness=harness,
            engine=engine,
            runtime="bubblewrap",
            rollout=rollout,
        )
    ) as env:
        env.reset()
        first = env.step({})[-1]["trajectory"]
        agent = first.request.agent.model_copy(update={"today": date(2026, 2, 7)})
        first.request.agent = agent
        record = Path(first.artifacts.journal).parent / "manifest.json"
        manifest = json.loads(record.read_text())
        manifest["request"]["agent"]["today"] = "2026-02-07"
        record.write_text(json.dumps(manifest))
        (workspace / "there.txt").unlink()
        env.reset(options={"branch": (first, 2)})
        branch = env.step({})[-1]["trajectory"]
    assert branch.session.failure is None
    recorded, calls = read_calls(first), read_calls(branch)
    replayed = [call.replayed for call in calls if call.replayed is not None]
    assert [how.volatile for how in replayed] == [{"date": 1}] * 2
    (difference,) = replayed[1].differences
    assert not difference.only_volatile
    seen = np.concatenate([recorded[1].prompt_ids, recorded[1].response_ids])
    assert np.array_equal(calls[2].prompt_ids[: len(seen)], seen)
    checked(first, branch)


def test_verify_finds_tokens_that_two_sessions_train(tmp_path: Path) -> None:
    need_node()
    need_bubblewrap()
    env = make(tmp_path, harness="pi", runtime="bubblewrap")
    try:
        *_, episode = play(env)
        env.reset(options={"branch": (episode, 2)})
        *_, info = env.step({})
        branch = info["trajectory"]
        checked(episode, branch)
        (trace,) = branch.trajectory.traces
        start, end = trace.turns[0].start, trace.turns[0].end
        trace.loss_mask[start:end] = 1
        trace.logprobs[start:end] = episode.trajectory.traces[0].logprobs[start:end]
        verification = asyncio.run(verify([episode, branch], None))
        (fault,) = verification.broken
        assert f"session {branch.session.session_id}: call {trace.call_ids[0]}" in fault
        assert "0 are due (excluded: branched)" in fault
    finally:
        env.close()
