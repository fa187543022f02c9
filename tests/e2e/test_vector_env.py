"""Vector environments, `polar/task`, and what gymnasium's own tools make of both; the sandboxes are real."""

from __future__ import annotations

import errno
import gc
import io
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnasium.wrappers.vector import RecordEpisodeStatistics as RecordVectorStatistics
from rich.console import Console

import polar_gym  # noqa: F401 - registers the environments
from polar_gym.engines import EngineError
from polar_gym.envs import sessions
from polar_gym.envs.single import HarnessEnv
from polar_gym.envs.vector import HarnessVectorEnv
from polar_gym.episodes.reading import read_calls
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.session.life import SessionLife
from polar_gym.training import make_batch
from tests.e2e.meeting_engine import PARTIES, GatedEngine
from tests.support.requirements import need_bubblewrap

AGENT = {"name": "python", "target": "tests.e2e.own_agent:solve"}
SCRIPTED = {"name": "embedded", "scripts": [{"commands": ["echo new > file"], "final_message": "It is there."}]}
FILE_IS_THERE = {"name": "test_on_output", "command": "grep -q new file"}


@pytest.fixture(autouse=True)
def sandboxes() -> None:
    need_bubblewrap()


@pytest.fixture
def silence() -> Iterator[None]:
    """A warning of gymnasium's is a failure."""
    gc.collect()  # what earlier tests left warns now, not within
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def swe(**settings: Any) -> dict[str, Any]:
    """Keyword arguments of `polar/swe`: the bundled tasks, each task's reference solution."""
    return {"harness": AGENT, "runtime": "bubblewrap", **settings}


def task(workspace: Path | None = None, **settings: Any) -> dict[str, Any]:
    """Keyword arguments of `polar/task`."""
    return {"instruction": "Make a file.", "workspace": workspace, "engine": SCRIPTED, **swe(), **settings}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    directory = tmp_path / "workspace"
    directory.mkdir()
    (directory / "README.md").write_text("Nothing yet.\n")
    return directory


def make_vec(name: str, num_envs: int, **settings: Any) -> HarnessVectorEnv:
    envs = gym.make_vec(name, num_envs=num_envs, **settings)
    assert isinstance(envs, HarnessVectorEnv)
    return envs


def test_sixteen_sessions_run_at_once(silence: None) -> None:
    """Guards against places that wait for each other: the engine answers nobody before all have asked."""
    scripts = [{"commands": ["true"], "final_message": "Done."}]
    engine = {"name": "tests.e2e.meeting_engine:MEETING", "scripts": scripts}
    envs = RecordVectorStatistics(make_vec("polar/task", PARTIES, **task(engine=engine)))
    try:
        observations, infos = envs.reset(seed=0)
        assert observations in envs.observation_space
        observations, rewards, terminations, truncations, infos = envs.step(({},) * PARTIES)
    finally:
        envs.close()
    assert observations in envs.observation_space
    assert rewards.tolist() == [1.0] * PARTIES
    assert terminations.all()
    assert not truncations.any()
    assert infos["_trajectory"].all()
    assert "failure" not in infos
    assert infos["episode"]["r"].tolist() == [1.0] * PARTIES
    episodes = infos["trajectory"]
    assert len({episode.session.node for episode in episodes}) == 1
    assert [episode.session.sample_index for episode in episodes] == list(range(PARTIES))
    assert all(episode.trajectory.fidelity.exact for episode in episodes)
    attempts = [[attempt.status for attempt in episode.trajectory.tool_attempts] for episode in episodes]
    assert attempts == [["ok"]] * PARTIES, "the node judges the tool calls of all sessions"


def test_it_does_what_gymnasiums_own_does(silence: None) -> None:
    """The same seeds choose the same tasks, and all that is returned has the same form."""
    ours = make_vec("polar/swe", 2, **swe())
    theirs = gym.make_vec("polar/swe", num_envs=2, vectorization_mode="sync", **swe())
    try:
        seen, infos = ours.reset(seed=[5, 5])
        assert seen["task_id"][0] == seen["task_id"][1]
        seen, infos = ours.reset(seed=7)
        expected, their_infos = theirs.reset(seed=7)
        assert seen == expected
        assert infos.keys() == their_infos.keys()
        assert ours.observation_space == theirs.observation_space
        seen, *numbers, infos = ours.step([{}] * 2)
        expected, *their_numbers, their_infos = theirs.step(({},) * 2)
        assert seen == expected
        assert all(map(np.array_equal, numbers, their_numbers))
        assert numbers[0].tolist() == [1.0] * 2
        assert infos.keys() == their_infos.keys()
    finally:
        ours.close()
        theirs.close()


def test_next_step_autoreset(silence: None) -> None:
    envs = RecordVectorStatistics(make_vec("polar/task", 2, **task()))
    try:
        envs.reset()
        _, rewards, dones, _, infos = envs.step(({}, {}))
        assert (rewards.tolist(), dones.tolist()) == ([1.0, 1.0], [True, True])
        observations, rewards, dones, _, infos = envs.step(({}, {}))
        assert (rewards.tolist(), dones.tolist()) == ([0.0, 0.0], [False, False])
        assert (observations["message"], "trajectory" in infos) == (("", ""), False)
        _, rewards, dones, _, infos = envs.step(({}, {}))
        assert (rewards.tolist(), dones.tolist()) == ([1.0, 1.0], [True, True])
        assert infos["episode"]["l"].tolist() == [1, 1]
        assert envs.episode_count == 4
    finally:
        envs.close()


def test_same_step_autoreset(silence: None) -> None:
    envs = RecordVectorStatistics(make_vec("polar/task", 2, **task(autoreset_mode="SameStep")))
    try:
        envs.reset()
        for _ in range(2):
            observations, rewards, dones, _, infos = envs.step(({}, {}))
            assert (rewards.tolist(), dones.tolist()) == ([1.0, 1.0], [True, True])
            assert observations["message"] == ("", "")
            assert [seen["message"] for seen in infos["final_obs"]] == ["It is there."] * 2
            assert infos["final_info"]["_trajectory"].all()
            assert infos["_final_info"].all()
            assert [e.session.status for e in infos["final_info"]["trajectory"]] == ["COMPLETED"] * 2
            assert [session.status for session in infos["session"]] == ["READY"] * 2
            assert infos["episode"]["l"].tolist() == [1, 1]
    finally:
        envs.close()


def test_a_failure_in_same_step_autoreset_is_of_the_session_that_ended(silence: None) -> None:
    envs = make_vec(
        "polar/task", 2, **task(autoreset_mode="SameStep", harness={"name": "command", "command": "exit 1"})
    )
    try:
        envs.reset()
        _, rewards, _, _, infos = envs.step(({}, {}))
    finally:
        envs.close()
    assert rewards.tolist() == [0.0, 0.0]
    assert [failure.kind for failure in infos["final_info"]["failure"]] == ["harness_error"] * 2
    assert "failure" not in infos, "the next sessions are there"


def test_without_autoreset_the_mask_says_who_is_reset(silence: None) -> None:
    envs = RecordVectorStatistics(make_vec("polar/swe", 2, **swe(autoreset_mode=AutoresetMode.DISABLED)))
    try:
        first, second = envs.unwrapped.tasks[0].instance_id, envs.unwrapped.tasks[1].instance_id  # type: ignore[attr-defined]
        observations, _ = envs.reset(options={"task_id": [first, second]})
        assert observations["task_id"] == (first, second)
        envs.step(({}, {}))
        observations, infos = envs.reset(options={"reset_mask": np.array([False, True]), "task_id": first})
        assert observations["task_id"] == (first, first)
        assert [bool(diff) for diff in observations["diff"]] == [True, False]
        assert infos["_session"].tolist() == [False, True]
        with pytest.raises(gym.error.ResetNeeded, match=r"sub-environments \[0\]"):
            envs.step(({}, {}))
        envs.reset(options={"reset_mask": np.array([True, False]), "task_id": second})
        observations, rewards, *_ = envs.step(({}, {}))
        assert (observations["task_id"], rewards.tolist()) == ((second, first), [1.0, 1.0])
    finally:
        envs.close()


def test_a_sub_environment_without_an_action_is_left_alone(silence: None) -> None:
    """Guards against sessions that no trainer asked for, where a batch does not fill all places."""
    envs = make_vec("polar/task", 2, **task())
    try:
        envs.reset(options={"reset_mask": np.array([True, False])})
        for _ in range(2):
            *_, infos = envs.step(({}, None))
            assert infos["_trajectory"].tolist() == [True, False]
            envs.reset(options={"reset_mask": np.array([True, False])})
        with pytest.raises(gym.error.ResetNeeded, match=r"sub-environments \[1\]"):
            envs.step(({}, {}))
    finally:
        envs.close()


def test_each_sub_environment_may_branch_an_episode(silence: None) -> None:
    """Each may branch another one, or all the same one. Where it says None, the task begins anew. Guards against a
    refused branch of an episode whose action changed the instruction: its record had the task's own one."""
    envs = make_vec("polar/task", 2, **task())
    try:
        envs.reset()
        *_, infos = envs.step(({}, {"instruction": "Another one."}))
        first, second = infos["trajectory"]
        seen = []
        for branches in ([(first, 1), None], [(second, 2), (first, 1)], (second, 1)):
            envs.reset(options={"branch": branches})
            _, rewards, _, _, infos = envs.step(({}, {}))
            assert rewards.tolist() == [1.0, 1.0]
            for episode in infos["trajectory"]:
                seen.append([call.replayed.session_id for call in read_calls(episode) if call.replayed is not None])
    finally:
        envs.close()
    one, other = first.session.session_id, second.session.session_id
    assert seen == [[one], [], [other, other], [one], [other], [other]]


def test_an_action_reaches_its_own_session(silence: None) -> None:
    envs = make_vec("polar/task", 2, **task())
    try:
        envs.reset()
        *_, infos = envs.step(({}, {"temperature": 0.25, "instruction": "Another one."}))
    finally:
        envs.close()
    requests = [episode.request for episode in infos["trajectory"]]
    assert [request.sampling.temperature for request in requests] == [1.0, 0.25]
    assert [request.instruction for request in requests] == ["Make a file.", "Another one."]
    assert make_batch(infos["trajectory"], allow_scripted=True).counts.groups == 2, "they are different tasks"


def test_a_sample_index_decides_the_seeds(silence: None) -> None:
    """Guards against a trainer that goes on in a new process, and samples again with the seeds of its first steps."""

    def seeds(envs: HarnessVectorEnv, *indices: int | None) -> list[int | None]:
        envs.reset(options={"sample_index": indices})
        *_, infos = envs.step(({}, {}))
        return [call.sampling["seed"] for episode in infos["trajectory"] for call in read_calls(episode)[:1]]

    whole, resumed = (make_vec("polar/task", 2, **task(sampling={"seed": 7})) for _ in range(2))
    try:
        first, second = seeds(whole, 0, 1), seeds(whole, None, None)
        assert len({*first, *second}) == 4
        assert seeds(resumed, 2, 3) == second
        assert len({*seeds(resumed, 5, None), *seeds(resumed, None, None)}) == 4, "none is sampled again"
    finally:
        whole.close()
        resumed.close()


def test_a_sandbox_that_does_not_come_up_is_a_masked_episode(silence: None) -> None:
    """Guards against one broken sandbox that ends every other session."""
    envs = make_vec("polar/task", 2, **task(runtime={"name": "bubblewrap", "scratch": "/nonexistent"}))
    try:
        _, infos = envs.reset()
        assert "/nonexistent" in infos["failure"][0].message
        _, rewards, _, _, infos = envs.step(({}, {}))
    finally:
        envs.close()
    assert rewards.tolist() == [0.0, 0.0]
    assert infos["_failure"].all()
    assert [episode.reward for episode in infos["trajectory"]] == [None, None]


@pytest.mark.parametrize(
    ("owner", "method", "reward"), [(Node, "note", None), (SessionLife, "run", None), (Node, "close_session", 1.0)]
)
def test_an_error_costs_the_session_of_one_place_only(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, reward: float | None
) -> None:
    """Guards against a full disk that cancels all sessions of a step, and throws finished episodes away."""
    works = getattr(owner, method)

    async def fails_at_one(own: Any, given: Any) -> None:
        if (own if owner is SessionLife else given).session.sample_index == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        await works(own, given)

    envs = make_vec("polar/task", 3, **task(workspace))
    try:
        envs.reset()
        with monkeypatch.context() as patched:
            patched.setattr(owner, method, fails_at_one)
            episodes = envs.step(({},) * 3)[-1]["trajectory"]
    finally:
        envs.close()
    assert [(each.session.sample_index, each.reward) for each in episodes] == [(0, 1.0), (1, reward), (2, 1.0)]
    if reward is None:
        failure = episodes[1].session.failure
        assert (failure.kind, failure.message) == ("runtime_error", "[Errno 28] No space left on device")


@pytest.mark.parametrize(
    ("actions", "says"),
    [
        (None, "sequence of 2 dictionaries, .* got None"),
        ({}, "sequence of 2 dictionaries"),
        (({},), "sequence of 2 dictionaries"),
        (({}, {"temperature": 9}), r"action {'temperature': 9} of sub-environment 1 is not in"),
    ],
)
def test_wrong_actions(actions: Any, says: str) -> None:
    """Nothing has run after a refusal: the same episodes can be stepped."""
    envs = make_vec("polar/task", 2, **task())
    try:
        with pytest.raises(gym.error.ResetNeeded, match=r"sub-environments \[0, 1\]"):
            envs.step(({}, {}))
        envs.reset()
        with pytest.raises(ValueError, match=says):
            envs.step(actions)
        assert envs.step(({}, {}))[1].tolist() == [1.0, 1.0]
    finally:
        envs.close()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"reset_mask": [True, False]}, TypeError, "numpy array of bool"),
        ({"reset_mask": np.array([True])}, ValueError, r"shape \(2,\)"),
        ({"reset_mask": np.array([False, False])}, ValueError, "at least one True"),
        ({"task_id": ["task"]}, ValueError, r"name 1 or 2 tasks, got \['task'\]"),
        ({"task_id": 7}, ValueError, "name 1 or 2 tasks, got 7"),
        ({"task_id": [["task"], None]}, KeyError, r"unknown task_id \['task'\]; known: task"),
        ({"task_id": "nope"}, KeyError, "unknown task_id 'nope'; known: task"),
        ({"branch": "call=1"}, ValueError, r"must be one \(episode, calls\) or 2, got 6"),
        ({"branch": [(1, 2), None]}, TypeError, r"must be \(episode, number of calls\), got \(1, 2\)"),
        ({"sample_index": 1}, ValueError, "sample_index'] must have 2 numbers, got 1"),
        ({"sample_index": [0, -1]}, ValueError, "sample_index'] must be an int, at least 0, got -1"),
        ({"mask": None}, KeyError, "unknown reset option 'mask'; known: task_id, branch, sample_index, reset_mask"),
    ],
)
def test_wrong_reset_options(options: dict[str, Any], error: type[Exception], says: str) -> None:
    envs = make_vec("polar/task", 2, **task())
    with pytest.raises(error, match=says):
        envs.reset(options=options)
    for seed in ([1, 2, 3], 1.5):
        with pytest.raises(ValueError, match=r"seed must be one int or 2, got (\[1, 2, 3\]|1\.5)"):
            envs.reset(seed=seed)  # type: ignore[arg-type]
    envs.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"workspace": "/nonexistent"}, "workspace='/nonexistent': there is no directory"),
        ({"workspace": {"path": "/w", "sauce": "."}}, r"workspace\.sauce='\.': unknown key; known here: .*source"),
        ({"instruction": ""}, "instruction='': "),
        ({"engine": "embedded"}, r"engine\.scripts=None: the scripted policy has no demonstration"),
        ({"evaluator": "nope"}, "nope"),
        ({"render_mode": "human"}, "render_mode='human': unknown"),
        ({"autoreset_mode": "Sometimes"}, "autoreset_mode='Sometimes': unknown; known: 'NextStep'"),
        ({"num_envs": 0}, "num_envs=0: expected an int, at least 1"),
        ({"num_envs": "2"}, "num_envs='2': expected an int, at least 1"),
        (
            {"runtime": {"name": "unconfined", "accept_no_isolation": True}},
            "num_envs=2: runtime=unconfined has one session at a time; set num_envs=1",
        ),
    ],
)
def test_wrong_settings_are_said_at_once(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_vec("polar/task", **{"num_envs": 2, **task(), **settings})


def test_a_task_of_ones_own(silence: None, workspace: Path) -> None:
    env = RecordEpisodeStatistics(
        gym.make("polar/task", **task(workspace, evaluator=FILE_IS_THERE, task_id="mine", render_mode="ansi"))
    )
    try:
        observation, info = env.reset()
        assert (observation["task_id"], observation["instruction"]) == ("mine", "Make a file.")
        assert str(env.render()).startswith("== mine #0, python, READY")
        observation, reward, terminated, _, info = env.step({})
    finally:
        env.close()
    assert (reward, terminated, info["episode"]["r"], info["episode"]["l"]) == (1.0, True, 1.0, 1)
    assert "+new" in observation["diff"]
    assert not (workspace / "file").exists(), "the harness works on a copy"
    assert "COMPLETED" in str(env.render())
    assert "It is there." in str(env.render())


def test_work_in_an_empty_workspace_is_graded(silence: None) -> None:
    """Guards against a diff that was always empty where a task names no files."""
    env = gym.make("polar/task", **task(evaluator=FILE_IS_THERE))
    try:
        env.reset()
        observation, reward, *_ = env.step({})
    finally:
        env.close()
    assert "+new" in observation["diff"]
    assert reward == 1.0


def test_the_transcript_can_be_read_while_the_harness_runs() -> None:
    GatedEngine.came.clear()
    GatedEngine.go_on.clear()
    engine = {**SCRIPTED, "name": "tests.e2e.meeting_engine:GATED"}
    envs = make_vec("polar/task", 1, **task(engine=engine, render_mode="ansi"))
    try:
        assert envs.render() == ("",)
        envs.reset()
        stepping = threading.Thread(target=envs.step, args=([{}],))
        stepping.start()
        assert GatedEngine.came.wait(60)
        half = envs.render()
        GatedEngine.go_on.set()
        stepping.join()
        whole = envs.render()
    finally:
        envs.close()
    assert half is not None
    assert whole is not None
    assert re.match(r"== task-[0-9a-f]{12} #0, python, RUNNING\n", half[0])
    assert "echo new > file" in half[0]
    assert "It is there." not in half[0]
    assert "It is there." in whole[0]


def test_a_terminal_shows_in_which_stage_the_sessions_are(
    workspace: Path, silence: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a `step` of minutes that says nothing."""
    terminal = io.StringIO()
    monkeypatch.setattr(sessions, "errors", Console(file=terminal, force_terminal=True))
    envs = make_vec("polar/task", 2, **task(workspace))
    envs.reset(seed=0)
    envs.step(envs.action_space.sample())
    envs.close()
    shown = terminal.getvalue()
    assert "sessions:" in shown
    assert "running" in shown
    monkeypatch.setattr(sessions, "errors", Console(file=terminal, force_terminal=False))
    envs = make_vec("polar/task", 1, **task(workspace))
    envs.reset(seed=0)
    envs.close()
    assert terminal.getvalue() == shown, "a file gets nothing"


def test_gymnasiums_checker_is_silent(silence: None) -> None:
    """On a task of one's own; `test_episode` has the bundled ones."""
    env = gym.make("polar/task", disable_env_checker=True, **task())
    try:
        check_env(env.unwrapped)
    finally:
        env.close()


@pytest.mark.parametrize("num_envs", [None, 2])
def test_after_close_there_is_nothing_to_use(num_envs: int | None) -> None:
    """Guards against a reset after close that starts a node which nobody closes."""
    before = polar_threads()
    env: Any = make_vec("polar/task", num_envs, **task()) if num_envs else gym.make("polar/task", **task()).unwrapped
    env.reset()
    env.close()
    env.close()
    with pytest.raises(gym.error.ClosedEnvironmentError):
        env.reset()
    with pytest.raises(gym.error.ClosedEnvironmentError):
        env.step([{}] * num_envs if num_envs else {})
    assert polar_threads() <= before


@pytest.mark.parametrize("num_envs", [None, 2])
def test_garbage_is_collected_in_the_loops_own_thread(num_envs: int | None) -> None:
    """Guards against a finaliser that waits, in its own loop's thread, for that loop."""
    before = polar_threads()
    env: Any = make_vec("polar/task", num_envs, **task()) if num_envs else gym.make("polar/task", **task()).unwrapped
    assert isinstance(env, HarnessEnv | HarnessVectorEnv)
    env.reset()
    sessions = env._sessions
    env.myself = env  # type: ignore[union-attr] - only a collection finds a ring
    gc.disable()
    try:
        del env

        async def collect() -> None:
            gc.collect()

        assert sessions._loop is not None
        sessions._loop.run(collect())
    finally:
        gc.enable()
    for thread in threading.enumerate():
        if thread.name == "polar-gym-close":
            thread.join(30)
    assert sessions.closed
    assert polar_threads() <= before


def polar_threads() -> set[threading.Thread]:
    """Other tests may have left some that belong to a Docker daemon, not to an environment."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("polar-gym")}


def test_an_engine_without_weights_takes_none(tmp_path: Path) -> None:
    env = gym.make_vec("polar/task", 1, **task())
    with pytest.raises(EngineError, match=r"engine\.policy=scripted has no weights"):
        env.unwrapped.set_weights(tmp_path, "step-1")  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="weights='nowhere': there is no such directory"):
        env.unwrapped.set_weights("nowhere", "step-1")  # type: ignore[attr-defined]
    env.close()
