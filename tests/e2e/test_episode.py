"""Whole episodes: the real harnesses, real sandboxes, the embedded engine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

import polar_gym  # noqa: F401 - registers the environment
from polar_gym.gateway.proxy.generation import GenerationGate
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.schema import Episode
from tests.e2e.play import make, play, scripted, solve_a_task
from tests.support.requirements import need_bubblewrap, need_node

HARNESSES = ["pi", "codex", "gemini_cli", "claude_code"]


@pytest.fixture(params=["bubblewrap", "docker"])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    need_node()
    if request.param == "bubblewrap":
        need_bubblewrap()
    else:
        monkeypatch.setenv("DOCKER_HOST", request.getfixturevalue("docker_host"))
    return request.param


@pytest.fixture
def bubblewrap() -> str:
    need_node()
    need_bubblewrap()
    return "bubblewrap"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory of this test's own, so that what a run leaves behind can be told from others' files."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return scratch


def leftovers(scratch: Path) -> list[str]:
    """Files, and the processes of sandboxes: their scratch directory is among their arguments."""
    processes = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in processes.splitlines() if str(scratch) in line] + [str(p) for p in scratch.iterdir()]


@pytest.mark.parametrize("harness", HARNESSES)
def test_a_real_harness_solves_a_task(runtime: str, harness: str, tmp_path: Path) -> None:
    solve_a_task(runtime, harness, tmp_path)


@pytest.mark.parametrize("harness", HARNESSES)
def test_a_real_harness_reads_along(bubblewrap: str, harness: str, tmp_path: Path) -> None:
    """With real streaming the harness does the same things, and the record is the same but for ids made anew."""
    records = []
    for streaming in ("real", "synthetic"):
        env = make(tmp_path, harness=harness, runtime=bubblewrap, proxy={"streaming": streaming})
        try:
            reward, terminated, _, episode = play(env)
        finally:
            env.close()
        assert (reward, terminated) == (1.0, True), episode.session.failure
        fidelity = episode.trajectory.fidelity
        assert fidelity.trainable_tokens == fidelity.sampled_tokens
        calls = read_journal(Path(str(episode.artifacts.journal)))
        records.append([(call.response_ids.tolist(), call.finish_reason, call.outcome) for call in calls])
    assert records[0] == records[1]


@pytest.mark.parametrize("choices", ['harness="pi", runtime="bubblewrap"', 'harness="claude_code", runtime="docker"'])
def test_the_readme_snippet_runs(
    choices: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands, and with other choices. `test_a_real_harness_solves_a_task` has all pairs of choices."""
    need_node()
    need_bubblewrap()
    if "docker" in choices:
        monkeypatch.setenv("DOCKER_HOST", request.getfixturevalue("docker_host"))
    snippet = re.search(r"```python\n(import gymnasium.*?)```", Path("README.md").read_text(), re.DOTALL)
    assert snippet is not None
    written = 'harness="pi", runtime="bubblewrap"'
    assert written in snippet[1]
    program = snippet[1].replace(written, choices)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=True
    )
    assert "reward 1.0" in done.stdout
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_the_environment_passes_gymnasiums_checker(bubblewrap: str, tmp_path: Path, scratch: Path) -> None:
    env = make(tmp_path, runtime=bubblewrap)
    try:
        check_env(env, skip_render_check=True)
    finally:
        env.close()
    assert leftovers(scratch) == []


def test_a_wrong_solution_is_worth_nothing(bubblewrap: str, tmp_path: Path) -> None:
    env = make(tmp_path, runtime=bubblewrap, engine=scripted(["echo '# looks fine to me' >> README.md"]))
    try:
        reward, terminated, _, episode = play(env)
    finally:
        env.close()
    assert (reward, terminated) == (0.0, True)
    assert episode.session.failure is None
    assert "looks fine to me" in episode.artifacts.diff
    assert episode.reward == 0.0


def test_no_diff_is_worth_nothing(bubblewrap: str, tmp_path: Path) -> None:
    env = make(tmp_path, runtime=bubblewrap, engine=scripted(["ls"]))
    try:
        reward, _, _, episode = play(env)
    finally:
        env.close()
    assert reward == 0.0
    assert episode.reward == 0.0
    assert episode.artifacts.diff == ""
    assert episode.artifacts.final_message == "I am done."


def test_a_harness_that_crashes_is_an_error_with_its_stderr(bubblewrap: str, tmp_path: Path) -> None:
    env = make(tmp_path, runtime=bubblewrap, harness={"name": "tests.e2e.broken_harness:CRASHING"})
    try:
        reward, _, _, episode = play(env)
    finally:
        env.close()
    assert reward == 0.0
    assert episode.reward is None, "a failure of the machinery has no reward: it must be masked"
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "harness_error"
    assert "cannot find my left shoe" in episode.session.failure.message
    assert episode.session.exit_code == 3


def test_a_harness_that_hangs_is_truncated_with_the_traces_so_far(
    bubblewrap: str, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a deadline that throws away what was captured.

    The agent's time begins when it hangs: how long it takes until then depends on how busy the machine is.
    """
    passes = GenerationGate.sleep

    async def passes_once_it_hangs(gate: GenerationGate, seconds: float) -> None:
        await asyncio.to_thread(_wait_for_process, "sleep 7654321")
        await passes(gate, seconds)

    monkeypatch.setattr(GenerationGate, "sleep", passes_once_it_hangs)
    engine = scripted(["echo '# half way' >> README.md", "sleep 7654321"])
    env = make(tmp_path, runtime=bubblewrap, engine=engine, rollout={"timeout_seconds": 0.5})
    try:
        _, terminated, truncated, episode = play(env)
    finally:
        env.close()
    assert (terminated, truncated) == (False, True)
    assert episode.session.truncated_by == "time"
    assert episode.trajectory.fidelity.calls == 2
    assert episode.trajectory.fidelity.trainable_tokens > 0
    assert "half way" in episode.artifacts.diff
    assert episode.reward == 0.0, "what was there at the deadline is evaluated"
    assert leftovers(scratch) == []


def test_a_budget_of_calls_truncates(bubblewrap: str, tmp_path: Path) -> None:
    env = make(tmp_path, runtime=bubblewrap, engine=scripted(["ls"] * 9), budget={"max_calls": 2})
    try:
        _, _, truncated, episode = play(env)
    finally:
        env.close()
    assert truncated
    assert episode.session.truncated_by == "calls"
    assert episode.trajectory.fidelity.calls == 2


def test_the_actions_sampling_reaches_the_engine(bubblewrap: str, tmp_path: Path) -> None:
    env = make(tmp_path, runtime=bubblewrap)
    try:
        env.reset(options={"task_id": env.tasks[0].instance_id})
        _, _, _, _, info = env.step({"temperature": 0.5, "instruction": "Say hello."})
    finally:
        env.close()
    episode: Episode = info["trajectory"]
    assert episode.artifacts.journal is not None
    calls = read_journal(Path(episode.artifacts.journal))
    assert {call.sampling["temperature"] for call in calls} == {0.5}
    assert "Say hello." in str(calls[0].messages)


def test_step_before_reset_is_refused(tmp_path: Path) -> None:
    env = make(tmp_path)
    with pytest.raises(gym.error.ResetNeeded):
        env.step({})
    env.close()


def test_an_unknown_task_is_named_with_the_known_ones(tmp_path: Path) -> None:
    env = make(tmp_path)
    with pytest.raises(KeyError, match="unknown task_id 'nope'; known: "):
        env.reset(options={"task_id": "nope"})
    env.close()


ENDINGS = {
    "close": ("env.close()", None),
    "exception": ("raise ValueError('the trainer died')", None),
    "interrupt": ("env.step({})", signal.SIGINT),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left_behind(bubblewrap: str, tmp_path: Path, scratch: Path, ending: str) -> None:
    """However it ends: no process, no folder."""
    last, sent = ENDINGS[ending]
    program = (
        "import gymnasium as gym, polar_gym\n"
        "engine = {'name': 'embedded', 'scripts': [{'commands': ['sleep 1234567'], 'final_message': 'x'}]}\n"
        "env = gym.make('polar/swe', runtime='bubblewrap', engine=engine, disable_env_checker=True)\n"
        "env.reset(seed=0)\n"
        "print('ready', flush=True)\n"
        f"{last}\n"
    )
    workdir = tmp_path / "workdir"
    workdir.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=workdir, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if sent is not None:
        _wait_for_process("sleep 1234567")
        os.kill(process.pid, sent)
    _, stderr = process.communicate(timeout=60)
    assert leftovers(scratch) == []
    assert list(workdir.iterdir()) == []
    assert {"close": "", "exception": "the trainer died", "interrupt": "KeyboardInterrupt"}[ending] in stderr


def _wait_for_process(argument: str) -> None:
    """Until the harness runs the command: then the interrupt hits a live sandbox."""
    for _ in range(2400):
        listed = subprocess.run(["pgrep", "-f", f"^{argument}"], capture_output=True, check=False)
        if listed.returncode == 0:
            return
        subprocess.run(["sleep", "0.05"], check=True)
    raise AssertionError(f"{argument!r} was never run")
